"""Notebooks that passed through another tool run like the recipe they were, or are refused in one line.

Real tools where they are installed (nbformat, nbconvert) or left their file in fixtures/notebooks
(jupytext 1.19.6), else the shapes that their documentation shows.
"""

import copy
import json
from pathlib import Path

import nbformat
import pytest
from nbconvert.exporters import NotebookExporter
from nbconvert.preprocessors import ClearMetadataPreprocessor
from places import FIXTURES
from typer.testing import CliRunner

from cookbook_npu.cli import app, find_notebook
from cookbook_npu.errors import ConfigError
from cookbook_npu.notebook import parameter_defaults, read_notebook, recipe_of

pytestmark = pytest.mark.lane("schedulers")

RECIPE = "qwen3_4b_colocate"
ORIGINAL = json.loads(find_notebook(RECIPE).read_text())


def with_cells(change, **metadata) -> dict:
    "The recipe's notebook with changed cells"
    made = copy.deepcopy(ORIGINAL)
    made["metadata"] = metadata
    for number, cell in enumerate(made["cells"]):
        change(number, cell)
    return made


def colab(number, cell):
    "A copy into Colab: ids among the metadata, forms, no tags"
    cell["metadata"] = {"id": f"aB{number}", "cellView": "form", "colab": {"height": 17}}
    cell.pop("id")


def vscode(number, cell):
    cell["metadata"] = {"vscode": {"languageId": "python"}, **cell["metadata"]}
    cell["source"] = "".join(cell["source"])


def windows(number, cell):
    cell["source"] = [line.replace("\n", "\r\n") for line in cell["source"]]


def stripped(number, cell):
    "What output filters leave: not even the metadata of cells"
    for key in ("id", "metadata", "outputs", "execution_count"):
        cell.pop(key, None)


def executed(number, cell):
    "After a run that failed, in format 4.4, with keys of the tool"
    cell.pop("id")
    cell["metadata"] |= {"papermill": {"exception": True, "status": "failed"}}
    if cell["cell_type"] == "code":
        cell["execution_count"] = number
        error = {"ename": "KeyError", "evalue": "'x'", "traceback": ["..."]}
        cell["outputs"] = [{"output_type": "error", **error}]
        cell["nuid"] = "of a platform"


PYTORCH = {"name": "PyTorch-2.1.0", "display_name": "PyTorch-2.1.0"}
SHAPES = {
    "colab": with_cells(colab, colab={"provenance": []}, accelerator="TPU"),
    "vscode": with_cells(vscode, language_info={"name": "python", "version": "3.9.7"}),
    "modelarts": with_cells(lambda n, c: None, kernelspec=PYTORCH, AIGalleryInfo={}),
    "windows": with_cells(windows, kernelspec={"name": ".venv", "language": "Python"}),
    "stripped": with_cells(stripped),
    "executed": with_cells(executed, widgets={"application/x": {"version_major": 2}}),
}


def converted() -> dict[str, str]:
    "What real tools write, as text"
    nb = nbformat.reads(json.dumps(ORIGINAL), 4)
    found = {"nbconvert": NotebookExporter().from_notebook_node(nb)[0]}
    kept = {("tags",)}
    clear = ClearMetadataPreprocessor(enabled=True, preserve_cell_metadata_mask=kept)
    found["nbconvert, no metadata"] = nbformat.writes(clear.preprocess(nb, {})[0])
    for file in sorted((FIXTURES / "notebooks").glob("*.json")):
        found[file.stem] = file.read_text()
    return found


TEXTS = {name: json.dumps(shape) for name, shape in SHAPES.items()} | converted()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_notebook_of_another_tool_is_the_recipe_that_it_was(name, encoding, tmp_path):
    file = tmp_path / "mine.ipynb"
    file.write_text(TEXTS[name], encoding=encoding)
    assert parameter_defaults(file) == parameter_defaults(find_notebook(RECIPE))
    assert recipe_of(file) == RECIPE
    nbformat.validate(read_notebook(file))


REFUSED = {
    "format 3": (
        nbformat.writes(nbformat.reads(json.dumps(ORIGINAL), 4), version=3),
        "format 3",
    ),
    "web page": ("<!DOCTYPE html><html></html>", "is not a notebook"),
    "pointer": ("version https://git-lfs.github.com/spec/v1\n", "is not a notebook"),
    "truncated": (json.dumps(ORIGINAL)[:5000], "is not a notebook"),
    "conflict": ("<<<<<<< HEAD\n" + json.dumps(ORIGINAL), "is not a notebook"),
    "empty": ("", "is not a notebook"),
    "script": ("# %%\nx = 1\n", "is not a notebook"),
    "R": (json.dumps(ORIGINAL | {"metadata": {"kernelspec": {"language": "R"}}}), "for R"),
    "no cells": (json.dumps(ORIGINAL | {"cells": []}), "0 code cells tagged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_in_one_sentence(name, tmp_path):
    text, words = REFUSED[name]
    file = tmp_path / "mine.ipynb"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as raised:
        parameter_defaults(file)
    assert str(file) in str(raised.value) and "\n" not in str(raised.value)


OWN = {  # what a notebook has in place of the call of its recipe
    "values": "config = qwen3_4b_colocate(scale=scale, num_steps=5, overrides=overrides)",
    "changed": "overrides = {'seed': 2}\nconfig = qwen3_4b_colocate(**check_parameters())",
    "positions": "config = qwen3_4b_colocate(scale, overrides=overrides)",
    "configuration": "config = RunConfig(recipe='mine', scale=scale)",
    "recipe": "mine = Recipe('mine', 'Mine', base={})\nconfig = mine(scale=scale)",
    "variable": "config = find_recipe(name)(scale=scale, overrides=overrides)",
    "two": "one = qwen3_4b_colocate(seed=seed)\nconfig = qwen3_4b_colocate(scale=scale)",
}


def own_notebook(folder: Path, call: str) -> Path:
    "A notebook with a configuration of its own"
    made = copy.deepcopy(ORIGINAL)
    (cell,) = [c for c in made["cells"] if "config = qwen3_4b" in "".join(c["source"])]
    cell["source"] = call
    file = folder / "mine.ipynb"
    file.write_text(json.dumps(made))
    return file


@pytest.mark.parametrize("words", [["plan"], ["launch", "--rehearse"]], ids=" ".join)
@pytest.mark.parametrize("name", OWN)
def test_a_configuration_that_is_not_of_a_recipe_is_not_planned(tmp_path, words, name):
    file = own_notebook(tmp_path, OWN[name])
    with pytest.raises(ConfigError, match="mine.ipynb does not pass its parameters to"):
        CliRunner().invoke(app, [*words, str(file)], catch_exceptions=False)
