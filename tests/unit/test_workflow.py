"""The workflows, as far as they can be tried without the machine that runs them."""

import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from places import ROOT

pytestmark = pytest.mark.lane("docs")

FILE = ROOT / ".github" / "workflows" / "docs.yml"
WORKFLOW = yaml.safe_load(FILE.read_text())
FILES = sorted(FILE.parent.glob("*.yml"))
ACTIONLINT = shutil.which("actionlint")
NO_SCHEMA = importlib.util.find_spec("check_jsonschema") is None
MISTAKES = {
    "no runner": ("    runs-on: ubuntu-24.04\n", ""),
    "a step that does nothing": ("      - run: make docs\n", "      - name: make docs\n"),
    "an unknown permission": ("pages: write", "page: write"),
    "an unknown trigger": ("workflow_dispatch:", "workflow_dispatched:"),
}


@pytest.mark.skipif(NO_SCHEMA, reason="check-jsonschema is not installed (extra dev)")
def test_the_schema_of_workflows_accepts_it_and_finds_mistakes(tmp_path):
    "The published schema, which the package holds; all files in one process, which takes seconds"
    text = FILE.read_text()
    for file in FILES:
        (tmp_path / f"right {file.name}").write_text(file.read_text())
    for name, (right, wrong) in MISTAKES.items():
        assert right in text
        (tmp_path / f"{name}.yml").write_text(text.replace(right, wrong))
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    command = [sys.executable, *words, "--output-format", "json"]
    command += [str(path) for path in sorted(tmp_path.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert {Path(error["filename"]).stem for error in found["errors"]} == set(MISTAKES)
    assert found["parse_errors"] == []


def steps(job: str) -> list[dict]:
    return WORKFLOW["jobs"][job]["steps"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_make_knows_what_is_made(file):
    "Every call of make, without doing anything"
    jobs = yaml.safe_load(file.read_text())["jobs"].values()
    runs = [step.get("run", "") for job in jobs for step in job["steps"]]
    made = [run for run in runs if run.startswith("make ")]
    assert made
    for line in made:
        words = ["make", "--dry-run", *shlex.split(line)[1:]]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_it_keeps_and_publishes_what_the_site_is_made_of():
    "The folders that the program reads and writes"
    program = (ROOT / ".docs" / "make_site.py").read_text()
    stage = (ROOT / ".docs" / "stage.py").read_text()
    used = {step["uses"].split("@")[0]: step for step in steps("build") if "uses" in step}
    kept = used["actions/cache"]["with"]["path"].split()
    assert kept == ["build/executed"]
    assert 'EXECUTED = ROOT / "build" / "executed"' in stage
    assert used["actions/upload-pages-artifact"]["with"]["path"] == "_docs"
    assert 'default=ROOT / "_docs"' in program


@pytest.mark.skipif(not ACTIONLINT, reason="actionlint is not installed")
def test_actionlint_has_nothing_against_it():
    "Expressions, inputs of actions, names of runners, programs of steps"
    done = subprocess.run([ACTIONLINT, "-no-color", *FILES], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout
