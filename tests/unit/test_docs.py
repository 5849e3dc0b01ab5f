"""The documentation site: what its pages are made of."""

import posixpath
import re
import sys

import pytest
from places import ROOT
from sphinx.util.matching import patmatch

sys.path.insert(0, str(ROOT / ".docs"))

import reference  # noqa: E402
import stage  # noqa: E402

from cookbook_npu.recipes import RECIPES  # noqa: E402

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


def test_every_page_can_be_written(tmp_path):
    "Those in Chinese take the code cells of their notebook; a part shows its modules"
    stage.stage(tmp_path)
    assert "../nbs/train/13_driver.html" in (tmp_path / "modules" / "train.md").read_text()


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


def test_llms_lists_pages_that_exist():
    text = stage.llms_text()
    assert text.startswith("# cookbook_npu\n\n> ")
    targets = re.findall(r"\]\(([^)]+)\.html\)", text)
    pages = {name.rpartition(".")[0] for name in stage.written_pages()}
    pages |= {str(p.relative_to(ROOT).with_suffix("")) for p in stage.notebooks()}
    assert {"agents", "howto/troubleshooting", "nbs/rl/03_losses"} <= set(targets)
    assert set(targets) <= pages | {"reference/configuration", "reference/commands"}
