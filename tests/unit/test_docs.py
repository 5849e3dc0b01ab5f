"""The documentation site: what its pages are made of, and that its checks can fail."""

import json
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from places import ROOT
from sphinx.util.inventory import InventoryFile
from sphinx.util.matching import patmatch

sys.path.insert(0, str(ROOT / ".docs"))

import curve  # noqa: E402
import look  # noqa: E402
import make_site  # noqa: E402
import plans  # noqa: E402
import reference  # noqa: E402
import search  # noqa: E402
import stage  # noqa: E402

from cookbook_npu.config import RunConfig  # noqa: E402
from cookbook_npu.recipes import RECIPES  # noqa: E402

# noqa: E402
from cookbook_npu.runs.folder import RunFolder, append_line  # noqa: E402

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


def test_an_entry_says_what_the_source_says(api):
    text = api["cookbook_npu.rl.advantages.md"]
    entry = text[text.index("{py:function} rloo(") :].split(":::", 1)[0]
    assert "rewards_B: Tensor, group_ids: Sequence[str], group_size: int" in entry
    assert "| `group_size` | `int` |  | G, at least 2 |" in entry
    assert r"**Returns** `Tensor`: adv\_B" in entry
    assert "**Raises** {py:obj}`~cookbook_npu.errors.DataError`" in entry


def test_options_stand_right_below_the_opening_line(api):
    "Below a blank line they would be text"
    assert (
        ":::{py:data} ProcessRole\n:value: Literal["
        in api["cookbook_npu.npu.shims.bootstrap.md"]
    )
    for name, text in api.items():
        found = re.search(
            r"^(:::+\{py:.*\n\n+:(?:type|value|\w+method):.*)", text, re.MULTILINE
        )
        assert not found, f"{name}: {found[1]}"


def test_a_long_module_name_can_be_broken_in_the_sidebar():
    entry = stage.api_entry("npu.shims.megatron_core")
    assert (
        entry
        == "npu.\u200bshims.\u200bmegatron_core <cookbook_npu.npu.shims.megatron_core>"
    )


def test_every_module_is_in_the_list_of_the_api(api):
    listed = stage.chapter_pages()["reference/api/index.md"]
    names = {name.removesuffix(".md") for name in api}
    assert {*re.findall(r"<(cookbook_npu[\w.]*)>", listed), "cookbook_npu"} == names


def test_a_value_in_quotes_is_no_yaml(api):
    "An option that starts with a quote would end there"
    for name, text in api.items():
        assert not re.search(r"^:value: '", text, re.M), name


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


def picture() -> ElementTree.Element:
    return ElementTree.parse(ROOT / ".docs" / "pages" / "system.svg").getroot()


def test_the_picture_takes_the_colour_of_the_theme():
    "Light and dark: no colour but the text's own; a page may set it"
    root = picture()
    style = root.find("{*}style").text
    assert "prefers-color-scheme: dark" in style
    assert set(re.findall(r"(?:fill|stroke): ([^;]+);", style)) <= {"currentColor", "none"}
    assert not [e for e in root.iter() if {"fill", "stroke", "style"} & set(e.attrib)]
    css = (ROOT / ".docs" / "static" / "site.css").read_text()
    assert "svg.system {" in css and "color: var(--color-foreground-primary)" in css
    assert ":file: system.svg" in (ROOT / ".docs" / "pages" / "index.md").read_text()


def test_the_words_of_the_picture_fit():
    "Each in its box, with 7.6 units a letter of 15, 6.6 of 13; a reader without eyes has title and text"
    root = picture()
    boxes = [
        {k: float(v) for k, v in e.attrib.items() if k in ("x", "y", "width", "height")}
        for e in root.iterfind("{*}rect")
    ]
    for text in root.iterfind("{*}text"):
        x, y = float(text.get("x")), float(text.get("y"))
        half = len(text.text) * (7.6 if text.get("class") == "name" else 6.6) / 2
        around = [
            b
            for b in boxes
            if b["y"] < y < b["y"] + b["height"] and b["x"] < x < b["x"] + b["width"]
        ]
        for box in around:
            assert box["x"] <= x - half and x + half <= box["x"] + box["width"], text.text
    assert root.find("{*}title").text and root.find("{*}desc").text


def prose(notebook: Path) -> str:
    cells = json.loads(notebook.read_text())["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def rows_of(text: str, columns: int) -> list[list[str]]:
    "The rows of the tables of so many columns, without their heads"
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [re.split(r"\s*\|\s*", line.strip("| \n")) for line in lines]
    return [row for row in cells if len(row) == columns]


NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)*")
LOG = (ROOT / ".docs" / "pages" / "lab_log.md").read_text()
LOG_ROWS = [row for row in rows_of(LOG, 3) if "](" in row[2]]


@pytest.mark.parametrize("row", LOG_ROWS, ids=lambda row: row[0][:40])
def test_a_number_of_the_lab_log_stands_where_the_row_leads(row):
    (target,) = re.findall(r"\]\(([^)]+)\)", row[2])
    there = prose((ROOT / ".docs" / "pages" / target).resolve())
    missing = set(NUMBER.findall(row[1])) - set(NUMBER.findall(there))
    assert not missing, target


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


def test_the_curve_of_the_readme_is_of_a_run_as_expected():
    "Its points are what its text says, and that is near the table"
    root = ElementTree.parse(ROOT / ".docs" / "pages" / "laptop_run.svg").getroot()
    said = re.findall(r"([\d.]+) at step (\d+)", root.find("{*}desc").text)
    points = [e for e in root.iterfind("{*}circle") if float(e.get("cy")) != 14]
    drawn = [(float(e.get("cx")), float(e.get("cy"))) for e in points]
    assert drawn == [curve.place(int(s), float(v), 40) for v, s in said]
    expected = RECIPES["qwen3_4b_colocate"].expected["laptop"]
    for step, value in expected.metrics["eval_accuracy"].items():
        (found,) = [float(v) for v, s in said if int(s) == step]
        assert abs(found - value) <= expected.within


def test_the_curve_is_drawn_from_the_files_of_a_run(tmp_path):
    config = RunConfig(
        recipe="demo", num_steps=2, output={"root": str(tmp_path), "name": "a"}
    )
    with RunFolder.create(config) as run:
        run.save_stack({"name": "simulated NPU", "count": 2, "simulated": True}, [])
        for step, reward in ((0, None), (1, 0.0), (2, 1.0)):
            row = {"step": step, "raw_reward": reward, "eval_accuracy": step / 2}
            append_line(run.metrics_file, row)
    drawn = curve.curve(tmp_path / "a")
    assert f'points="{(curve.LEFT + curve.RIGHT) / 2},{curve.BOTTOM}.0 ' in drawn
    assert "0.500 at step 1, 1.000 at step 2" in drawn and "2 x simulated NPU" in drawn
    ElementTree.fromstring(drawn)


def test_a_link_to_what_only_the_repository_shows_leads_to_the_site():
    index = stage.shown_notebook(ROOT / "nbs" / "index.ipynb", None)
    text = "".join(cell["source"] for cell in index["cells"])
    assert ".github/" not in text and "](../zh/readme.md)" in text
    assert ".docs/" not in text and "](../howto/index.md)" in text
    downloads = [file for path in stage.notebooks() for file in stage.linked_files(path)]
    folders = {file.relative_to(ROOT).parts[0] for file in downloads}
    assert ".docs" not in folders, "a page would be there twice"


def test_a_name_that_nothing_defines_is_refused():
    module = reference.read_module(ROOT / "cookbook_npu" / "rl" / "kl.py")
    with pytest.raises(LookupError, match="kl.nothing is in __all__"):
        reference.definition(module, "nothing")


def test_the_inventory_holds_the_names_of_a_module(api, tmp_path):
    (tmp_path / "index.md").write_text(api["cookbook_npu.weights.manifest.md"])
    settings = ['extensions = ["myst_parser"]', 'html_theme = "basic"']
    settings += ['myst_enable_extensions = ["colon_fence"]']
    (tmp_path / "conf.py").write_text("\n".join(settings))
    command = [sys.executable, "-m", "sphinx", "-Q", tmp_path, tmp_path / "out"]
    subprocess.run(command, check=True)
    inventory = tmp_path / "out" / "objects.inv"
    found = reference.modules()
    named = [m for m in found if m.name == "cookbook_npu.weights.manifest"]
    assert make_site.missing_names(inventory, named) == []
    with inventory.open("rb") as file:
        objects = InventoryFile.load(file, "", lambda *parts: "/".join(parts))
    assert "cookbook_npu.weights.manifest.Manifest" in objects["py:class"]
    others = [m for m in found if m.name == "cookbook_npu.rl.kl"]
    assert "cookbook_npu.rl.kl.kl_estimate" in make_site.missing_names(inventory, others)


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


def test_a_record_for_programs_is_not_shown_beside_its_text(checkout):
    "Sphinx warns of it, which is an error here"
    data = {stage.RESULT_TYPE: {"reward": 1}, "text/plain": ["reward 1"]}
    shown = SUM | {"outputs": [{"output_type": "display_data", "data": data}]}
    notebook = write(checkout / "nbs/rl/demo.ipynb", TITLE, shown)
    (output,) = stage.shown_notebook(notebook, None)["cells"][1]["outputs"]
    assert output["data"] == {"text/plain": ["reward 1"]}


def test_a_page_says_nothing_of_the_machine_that_executed_it():
    "No folder of its own, no warning of a library; other paths stay"
    packages = "/a/b/.venv/lib/python3.11/site-packages"
    warned = f"{packages}/x.py:7: UserWarning: Apex is not installed\n  warnings.warn(\n"
    text = f"{warned}3 shims\n/models/Qwen3-4B\n{packages}/y.py\n"
    stream = {"output_type": "stream", "text": text.splitlines(keepends=True)}
    stage.clean_output(stream)
    kept = "3 shims\n/models/Qwen3-4B\n.venv/lib/python3.11/site-packages/y.py\n"
    assert "".join(stream["text"]) == kept
    shown = {"data": {"text/plain": [f"report  {stage.ROOT}/runs/a/report.html"]}}
    stage.clean_output(shown)
    assert shown["data"]["text/plain"] == ["report  runs/a/report.html"]


def test_a_page_without_code_to_see_needs_no_results(checkout):
    page = stage.notebook_page(write(checkout / "nbs/index.ipynb", TITLE, HIDDEN))
    assert [c["source"] for c in page["cells"]] == ["# rl.demo"]


def test_a_recipe_shows_its_recorded_run_and_says_where_it_ran(checkout):
    recipe = write(checkout / "recipes/demo.ipynb", TITLE, SUM | {"outputs": [RESULT]})
    notebook = json.loads(recipe.read_text())
    notebook["metadata"]["recorded"] = {"where": "Recorded run: scale laptop"}
    recipe.write_text(json.dumps(notebook))
    page = stage.notebook_page(recipe)["cells"]
    assert "Recorded run: scale laptop" in page[1]["source"]
    assert page[2]["outputs"] == [RESULT]


def test_dead_links_are_found(tmp_path):
    first = tmp_path / "index.html"
    first.write_text('<a href="b.html#there">x</a><a href="https://example.org/">y</a>')
    (tmp_path / "b.html").write_text('<h1 id="there">t</h1><a href="index.html">i</a>')
    assert make_site.dead_links(tmp_path) == []
    first.write_text('<a href="b.html#gone">x</a><img src="no.png">')
    dead = make_site.dead_links(tmp_path)
    assert dead == ["index.html: b.html#gone", "index.html: no.png"]


WIDE = "| " + " | ".join(["a_long_word_of_a_head"] * 12) + " |\n" + "|---" * 12 + "|\n"
PAGE = f"""# cookbook

{WIDE}

```python
{"value = function(argument) + " * 20}
```
"""


needs_browser = pytest.mark.skipif(
    bool(look.missing_browser()), reason=look.missing_browser() or ""
)


def build(pages: Path, site: Path) -> Path:
    "Pages with the settings of the site"
    command = [sys.executable, "-m", "sphinx", "-Q", "-b", "html"]
    command += ["-c", str(ROOT / ".docs"), pages, site]
    subprocess.run(command, check=True, cwd=ROOT)
    search.write_texts(site)
    return site


@needs_browser
def test_a_browser_finds_what_is_cut_or_complains(tmp_path):
    "Theme and style of the site: long code and wide tables are no problem; these three are"
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "index.md").write_text(PAGE)
    site = build(pages, tmp_path / "site")
    searches = {"cookbook": "index"}
    assert look.problems(site, searches) == []
    index = site / "index.html"
    wrong = '<img src="no.png"><script>console.error("said")</script>'
    wrong += '<pre style="width: 900px; white-space: pre">x</pre></article>'
    index.write_text(index.read_text().replace("</article>", wrong))
    found = "\n".join(look.problems(site, searches | {"word": "howto/"}))
    assert "no picture: " in found and "said" in found and "at 420: PRE ends at" in found
    assert "index.html: at 1360: page is" not in found
    assert "word: index.html comes before howto/" in found or "word: finds nothing" in found


@needs_browser
def test_the_search_leads_to_the_page_that_explains(tmp_path, api):
    "Real pages among real listings of functions; English and Chinese; without a server"
    pages = tmp_path / "pages"
    texts = stage.written_pages()
    names = ["howto/resume", "howto/troubleshooting", "howto/read_a_report"]
    names += ["zh/resume", "zh/troubleshooting", "zh/read_a_report", "lab_log"]
    chosen = {f"{name}.md": texts[f"{name}.md"] for name in names}
    for name in ("train.session", "train.checkpointing", "data.prompts"):
        chosen[f"reference/api/{name}.md"] = api[f"cookbook_npu.{name}.md"]
    chosen["index.md"] = "# cookbook\n\nfirst page\n"
    for name, text in chosen.items():
        stage.write(pages / name, text)
    site = build(pages, tmp_path / "site")
    with look.open_browser(tmp_path / "profile") as driver:
        for query, target in look.SEARCHES.items():
            assert look.search_problems(driver, site, query, target) == []
        wrong = look.search_problems(driver, site, "resume", "lab_log")
        assert wrong == ["search.html: resume: howto/resume.html comes before lab_log"]


def test_the_text_of_a_page_is_its_prose():
    html = "<nav>menu</nav><article><h1>Title<a>¶</a></h1><p>one <b>two</b></p>"
    html += "<pre>code</pre><p>three</p></article><p>footer</p>"
    assert search.page_text(html) == "Title one two three"


def test_chinese_words_are_pairs_of_signs():
    words = search.SearchBoth({}).split("GRPO 的奖励函数 x")
    assert words == ["GRPO", "的奖", "奖励", "励函", "函数", "x"]


def test_llms_lists_pages_that_exist():
    text = stage.llms_text()
    assert text.startswith("# cookbook_npu\n\n> ")
    targets = re.findall(r"\]\(([^)]+)\.html\)", text)
    pages = {name.rpartition(".")[0] for name in stage.written_pages()}
    pages |= {str(p.relative_to(ROOT).with_suffix("")) for p in stage.notebooks()}
    assert {"agents", "howto/troubleshooting", "nbs/rl/02_kl"} <= set(targets)
    assert set(targets) <= pages | {"reference/configuration", "reference/commands"}


def test_the_page_for_agents_names_what_exists():
    "Targets of make, folders and files"
    text = (ROOT / ".docs" / "pages" / "agents.md").read_text()
    made = re.findall(r"^(?:make|\| `)?make ([a-z-]+)|`make ([a-z-]+)", text, re.M)
    targets = {first or second for first, second in made}
    known = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"run", "export", "docs"} <= targets <= known
    rows = [row[0] for row in rows_of(text, 3) if row[0].startswith("`")]
    folders = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    outputs = {"runs/", "build/", "_docs/"}
    assert [f for f in folders if not (ROOT / f).exists() and f not in outputs] == []


def test_a_page_knows_its_source():
    assert stage.source_path("howto/resume") == ".docs/pages/howto/resume.md"
    assert stage.source_path("nbs/rl/02_kl") == "nbs/rl/02_kl.ipynb"
    assert stage.source_path("contributing") == ".github/CONTRIBUTING.md"
    assert stage.source_path("reference/commands") is None


def test_plans_name_their_origin():
    "Predictions by the planner, one report, what does not fit, A3 unverified"
    rows = plans.rows()
    origins = {row[5].partition(",")[0] for row in rows}
    assert origins == {"predicted", "reported"}
    assert all("A3" not in row[1] or "unverified" in row[5] for row in rows)
    assert ("Qwen3-4B", "8 x 910B1", "up to 8192", "", "457.4") in [r[:5] for r in rows]
    small = [row for row in rows if row[1] == "8 x 910B4" and row[0] == "Qwen3-VL-8B"]
    assert len(small) == len(plans.LENGTHS)
    assert all("does not fit: " in row[3] and "Raise" in row[3] for row in small)
    tight = [row for row in rows if "only the lower end fits" in row[3]]
    assert any(row[:2] == ("Qwen3-4B", "8 x 910B4") for row in tight)
    assert all(row[4] for row in tight)  # they have a time


@needs_browser
def test_the_selectors_show_the_chosen_plan(tmp_path):
    "Without the script every row is there; with it, those of the first choice"
    from selenium.webdriver.support.select import Select

    page = tmp_path / "page.html"
    css = "<style>[hidden] { display: none }</style>"
    page.write_text(f"<meta charset=utf-8>{css}{plans.page_part()}")
    with look.open_browser(tmp_path / "profile") as driver:
        driver.get(page.as_uri())

        def shown() -> list[str]:
            rows = driver.find_elements("css selector", "tbody tr")
            return [row.text for row in rows if row.is_displayed()]

        assert len(shown()) == len(plans.LENGTHS) + 1  # and the report
        assert all("Qwen3-4B 8 x 910B1" in row for row in shown())
        model, devices, length = map(Select, driver.find_elements("css selector", "select"))
        length.select_by_visible_text("4096")
        model.select_by_visible_text("Qwen3.5-9B")
        devices.select_by_visible_text("16 x 910B3")
        (row,) = shown()
        assert row.startswith("Qwen3.5-9B 16 x 910B3 4096") and "predicted" in row
        assert look.console_errors(driver) == []
