"""The committed outputs of the recipes are those of a run of these very notebooks"""

import json
import re

import pytest
from recorded import ROOT, as_written, faults, label, labelled, shows_run

from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.runs.folder import RunFolder, append_line

pytestmark = pytest.mark.lane("docs")

RECIPES = sorted((ROOT / "recipes").glob("*.ipynb"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_outputs_belong_to_the_recipe(path):
    "Same code, same settings, expected numbers, nothing of a machine: else `make record RECIPE=...`"
    assert faults(path) == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_written_as_jupyterlab_saves_it(path):
    "Opened and saved it is unchanged (test_lab.py does that): no difference in `git status`"
    text = path.read_text(encoding="utf-8")
    assert text == as_written(json.loads(text))


def test_the_smoke_notebook_shows_a_table_that_passed():
    cells = json.loads((ROOT / "recipes" / "smoke.ipynb").read_text())["cells"]
    outputs = [o for c in cells for o in c.get("outputs", [])]
    (table,) = [t for o in outputs if (t := o.get("data", {}).get("text/markdown"))]
    assert "".join(table).count("| pass |") == 7
    assert "all 7 checks passed" in "".join(outputs[-1]["text"])


@pytest.mark.parametrize(
    "path", [p for p in RECIPES if p.stem != "smoke"], ids=lambda path: path.stem
)
def test_a_reader_sees_curves_answers_and_the_result(path):
    "Without running anything: a picture, a table of answers, the verdict"
    cells = json.loads(path.read_text())["cells"]
    data = [o.get("data", {}) for c in cells for o in c.get("outputs", [])]
    assert sum("image/png" in d for d in data) == 1
    pages = ["".join(d.get("text/html", "")) for d in data]
    answers = 0 if path.stem == "qwen3_4b_sft" else 1  # it has no engine that answers
    assert sum("held-out prompt" in page for page in pages) == answers
    assert sum("as expected</b>" in page for page in pages) == 1


def changed(path, tmp_path, change):
    "A copy of a recipe of the same name, changed"
    notebook = json.loads(path.read_text())
    change(notebook)
    copy = tmp_path / path.name
    copy.write_text(json.dumps(notebook))
    return copy


def test_the_outputs_say_whose_run_they_show(tmp_path):
    "A reader's own parameters stand above the recorded run until the cells run again"
    place = {"output.root": str(tmp_path), "output.name": "one"}
    with RunFolder.create(qwen3_4b_colocate(overrides=place)) as run:
        append_line(run.metrics_file, {"step": 1, "raw_reward": 0.5})
        words = label(run)
    assert re.fullmatch(r"recorded by the project, \d{4}-\d\d-\d\d, 1 step", words)

    def relabelled(notebook):
        notebook["metadata"]["recorded"]["label"] = words
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                kept = [o for o in cell["outputs"] if words not in str(o)]
                cell["outputs"] = labelled(kept, words)
                assert shows_run(kept) == (words in str(cell["outputs"]))

    assert faults(changed(RECIPES[0], tmp_path, relabelled)) == []
