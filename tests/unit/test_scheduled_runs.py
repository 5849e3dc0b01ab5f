"""The pages about scheduled runs: their files, checked by real programs and started as a scheduler would."""

import ast
import json
import os
import re
from pathlib import Path

import papermill
import pytest
from places import ROOT
from typer.testing import CliRunner

from cookbook_npu.cli import app, find_notebook
from cookbook_npu.config import RunConfig
from cookbook_npu.plan.plan import make_plan
from cookbook_npu.recipes import find_recipe
from cookbook_npu.runs.folder import RunFolder, append_line
from cookbook_npu.stop import EXIT_STOPPED

pytestmark = pytest.mark.lane("schedulers")

PAGES = ROOT / ".docs" / "pages" / "howto"
FILE = re.compile(r"^```\{code-block\}.*?\n:caption: (\S+)\n\n(.*?)^```$", re.M | re.S)


def text_of(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


def files_of(name: str) -> dict[str, str]:
    "Name -> content of the files of a page"
    return {found[1]: found[2] for found in FILE.finditer(text_of(name))}


def crontab_line() -> str:
    (line,) = re.findall(r"^```text\n(\d.*)\n```$", text_of("schedule"), re.M)
    return line


def test_the_exit_codes_are_those_of_the_program():
    rows = re.findall(r"^\| ([\d, ]+) \|", text_of("schedule"), re.M)
    codes = [int(code) for row in rows for code in row.split(", ")]
    assert codes == [0, 1, 2, 73, EXIT_STOPPED, 128 + 1, 128 + 2, 128 + 15, 128 + 9]
    assert "-E 73 " in crontab_line()
    assert f"SuccessExitStatus={EXIT_STOPPED}\n" in files_of("schedule")["nightly.service"]


def test_old_runs_are_said_first_and_then_removed(tmp_path):
    for number in range(3):
        output = {"root": str(tmp_path / "runs"), "name": f"night-{number}"}
        config = RunConfig(recipe="qwen3_4b_colocate", num_steps=1, output=output)
        with RunFolder.create(config) as run:
            append_line(run.metrics_file, {"step": 1, "raw_reward": 0.5})
        os.utime(run.config_file, (1e9 + number,) * 2)
        os.utime(run.metrics_file, (1e9 + number,) * 2)
    words = ["runs", str(tmp_path / "runs"), "--keep", "1"]
    said = CliRunner().invoke(app, words)
    assert "2 of 3 runs would be removed; add --remove" in said.output
    assert len(list((tmp_path / "runs").iterdir())) == 3
    CliRunner().invoke(app, [*words, "--remove"])
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["night-2"]
    assert "Give --keep N" in str(
        CliRunner().invoke(app, [*words[:2], "--remove"]).exception
    )


def airflow_parameters() -> dict:
    "What the DAG of the page hands to papermill"
    source = files_of("schedule_airflow")["nightly_dag.py"]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "PapermillOperator":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            names = {"str": str, "RUNS": Path("runs"), "RUN": Path("runs/nightly")}
            written = ast.Expression(given["parameters"])
            return eval(compile(written, "nightly_dag.py", "eval"), names)
    raise AssertionError("the DAG has no PapermillOperator")


def jupyter_parameters() -> dict:
    "What jupyter-scheduler writes into the cell"
    body = json.loads(files_of("schedule_jupyter")["nightly.json"])
    return {name: ast.literal_eval(text) for name, text in body["parameters"].items()}


@pytest.mark.parametrize("given", [airflow_parameters, jupyter_parameters])
def test_papermill_takes_the_parameters(given, tmp_path, caplog):
    "None is unknown to the recipe, which papermill would only warn of"
    parameters = given()
    recipe = find_notebook("qwen3_4b_colocate")
    assert set(parameters) <= set(papermill.inspect_notebook(str(recipe)))
    out = tmp_path / "out.ipynb"
    papermill.execute_notebook(recipe, out, parameters, prepare_only=True)
    assert "unknown parameter" not in caplog.text
    cells = json.loads(out.read_text())["cells"]
    (cell,) = [c for c in cells if "injected-parameters" in c["metadata"].get("tags", [])]
    read: dict = {}
    exec("".join(cell["source"]), read)
    assert {name: read[name] for name in parameters} == parameters
    assert (
        find_recipe("qwen3_4b_colocate")(**parameters).num_steps == parameters["num_steps"]
    )


PAGES_WITH_A_LIMIT = [
    page for page in PAGES.parent.rglob("*.md") if '"auto_stop"' in page.read_text()
]


@pytest.mark.parametrize("page", PAGES_WITH_A_LIMIT, ids=lambda page: page.parent.name)
def test_a_night_fits_the_time_limit_of_its_job(page):
    "By the plan of the page's own parameters, with evaluations"
    files = dict(FILE.findall(page.read_text()))
    job = json.loads(files["job.json"])
    recipe = re.search(r"run (\S+) -f", job["algorithm"]["command"])[1]
    plan = make_plan(find_recipe(recipe)(**json.loads(files["parameters.json"])))
    limit = job["spec"]["auto_stop"]
    assert limit["time_unit"] == "HOURS"
    plan.check_hours(limit["duration"])
    assert plan.evaluation and plan.warnings == []
    assert f" {plan.run_seconds() / 3600:.1f} " in page.read_text()
