"""The documentation site: what its pages are made of, and that its checks can fail."""

import json
import posixpath
import re
import sys
from pathlib import Path

import pytest
from places import ROOT
from sphinx.util.matching import patmatch

sys.path.insert(0, str(ROOT / ".docs"))

import make_site  # noqa: E402
import reference  # noqa: E402
import stage  # noqa: E402

from cookbook_npu.recipes import RECIPES  # noqa: E402

# noqa: E402

pytestmark = pytest.mark.lane("docs")


@pytest.fixture(scope="module")
def api():
    return reference.pages()


def test_every_public_name_has_an_entry(api):
    for module in reference.modules():
        text = api[f"{module.name}.md"]
        for name in module.names:
            kinds = ("function", "class", "data")
            found = [kind for kind in kinds if f"{{py:{kind}}} {name}" in text]
            assert found, f"{module.name}: {name}"


def test_every_module_is_in_the_list_of_the_api(api):
    listed = stage.chapter_pages()["reference/api/index.md"]
    names = {name.removesuffix(".md") for name in api}
    assert {*re.findall(r"<(cookbook_npu[\w.]*)>", listed), "cookbook_npu"} == names


def listed_pages() -> set[str]:
    "What the lists of pages name, patterns among it"
    found = set()
    for page, text in (stage.written_pages() | stage.chapter_pages()).items():
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.M | re.S):
            for line in block.splitlines():
                entry = line.rpartition("<")[2].rstrip(">")
                if entry and not entry.startswith(":"):
                    place = posixpath.join(posixpath.dirname(page), entry)
                    found.add(posixpath.normpath(place))
    return found


def test_every_notebook_is_in_a_chapter():
    "A page that no list names is in no sidebar"
    patterns = listed_pages()
    names = [str(p.relative_to(ROOT).with_suffix("")) for p in stage.notebooks()]
    left = [name for name in names if not any(patmatch(name, p) for p in patterns)]
    assert left == []


def rows_of(text: str, columns: int) -> list[list[str]]:
    "The rows of the tables of so many columns, without their heads"
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [re.split(r"\s*\|\s*", line.strip("| \n")) for line in lines]
    return [row for row in cells if len(row) == columns]


def test_the_readme_says_what_recipes_reach():
    "Its table is that of the recipes"
    readme = (ROOT / "README.md").read_text()
    rows = {re.search(r"\w+", row[0])[0]: row for row in rows_of(readme, 6)}
    for name, recipe in RECIPES.items():
        expected = recipe.expected["laptop"]
        metric, values = next(iter(expected.metrics.items()))  # of tenants: the mean
        first, last = values[0], values[max(values)]
        loss = "loss " if metric == "eval_loss" else ""
        shown = [f"{loss}{first:.2f} to {last:.2f}", str(max(values))]
        assert rows[name][2:5] == [*shown, expected.minutes.split(",")[0].split()[0]]


def test_configuration_and_commands():
    keys = stage.configuration_page()
    assert "| `optim.clip_grad` |" in keys and "| advanced |" in keys
    commands = stage.commands_page()
    assert "## compare" in commands and "`--against expected`" in commands


def cell(kind: str, text: str, **more) -> dict:
    return {"cell_type": kind, "metadata": {}, "source": text.splitlines(True), **more}


def write(path: Path, *cells: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cells": cells, "metadata": {}}))
    return path


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(stage, "ROOT", tmp_path)
    monkeypatch.setattr(stage, "EXECUTED", tmp_path / "executed")
    return tmp_path


TITLE = cell("markdown", "# rl.demo")
HIDDEN = cell("code", "#| hide\nimport secret")
SUM = cell("code", "#| export\n1 + 1")
RESULT = {"output_type": "execute_result", "data": {"text/plain": ["2"]}}


def test_a_page_shows_the_results_of_the_same_cells(checkout):
    notebook = write(checkout / "nbs/rl/demo.ipynb", TITLE, HIDDEN, SUM)
    page = stage.notebook_page(notebook)
    assert "not executed" in page["cells"][1]["source"]
    assert stage.not_executed() == [notebook]

    done = SUM | {"outputs": [RESULT, {"name": "stderr", "output_type": "stream"}]}
    write(stage.EXECUTED / "nbs/rl/demo.ipynb", TITLE, HIDDEN, done)
    page = stage.notebook_page(notebook)
    assert [c["source"] for c in page["cells"]] == ["# rl.demo", "1 + 1"]
    assert page["cells"][1]["outputs"] == [RESULT]
    assert stage.not_executed() == []

    write(notebook, TITLE, HIDDEN, cell("code", "1 + 2"))  # changed since
    assert "not executed" in stage.notebook_page(notebook)["cells"][1]["source"]


def test_dead_links_are_found(tmp_path):
    first = tmp_path / "index.html"
    first.write_text('<a href="b.html#there">x</a><a href="https://example.org/">y</a>')
    (tmp_path / "b.html").write_text('<h1 id="there">t</h1><a href="index.html">i</a>')
    assert make_site.dead_links(tmp_path) == []
    first.write_text('<a href="b.html#gone">x</a><img src="no.png">')
    dead = make_site.dead_links(tmp_path)
    assert dead == ["index.html: b.html#gone", "index.html: no.png"]


def test_llms_lists_pages_that_exist():
    text = stage.llms_text()
    assert text.startswith("# cookbook_npu\n\n> ")
    targets = re.findall(r"\]\(([^)]+)\.html\)", text)
    pages = {name.rpartition(".")[0] for name in stage.written_pages()}
    pages |= {str(p.relative_to(ROOT).with_suffix("")) for p in stage.notebooks()}
    assert {"agents", "howto/troubleshooting", "nbs/rl/02_kl"} <= set(targets)
    assert set(targets) <= pages | {"reference/configuration", "reference/commands"}
