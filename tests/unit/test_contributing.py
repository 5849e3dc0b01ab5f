"""What is written for contributors: targets, commands, files and options that it names exist."""

import os
import re
import subprocess
import tomllib

import pytest
import yaml
from places import ROOT
from typer.testing import CliRunner

from cookbook_npu.cli import app
from cookbook_npu.recipes import RECIPES

pytestmark = pytest.mark.lane("docs")

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
CHANGELOG = ROOT / ".docs" / "pages" / "changelog.md"
TEXTS = [ROOT / ".github" / "CONTRIBUTING.md", CHANGELOG, *FORMS]
ids = {"ids": lambda path: path.name}


def help_of(command: str) -> str:
    "What a command says of itself"
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, command
    return done.output


@pytest.mark.parametrize("file", TEXTS, **ids)
def test_commands_and_options_exist(file):
    for line in re.findall(r"cookbook-npu ([a-z]+[^`\n;]*)", file.read_text()):
        command, *words = line.split()
        shown = help_of(command)
        missing = [
            w for w in words if w.startswith("--") and not re.search(rf"{w}\b", shown)
        ]
        assert not missing, line


@pytest.mark.parametrize("file", TEXTS, **ids)
def test_targets_of_make_exist(file):
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M)
    named = re.findall(r"(?:^|`)make ([a-z0-9-]+)", file.read_text(), re.M)
    assert set(named) <= set(targets)


@pytest.mark.parametrize("file", [f for f in FORMS if f.name != "config.yml"], **ids)
def test_a_form_is_one_that_github_shows(file):
    "Keys and types of GitHub's syntax for issue forms; ids are used once; the doctor is asked for"
    form = yaml.safe_load(file.read_text())
    assert {"name", "description", "body"} <= set(form)
    kinds = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    assert {part["type"] for part in form["body"]} <= kinds
    names = [part["id"] for part in form["body"]]
    assert len(set(names)) == len(names)
    for part in form["body"]:
        assert set(part) <= {"type", "id", "attributes", "validations"}
        assert part["attributes"]["label"]
        assert bool(part["attributes"].get("options")) == (
            part["type"] in ("dropdown", "checkboxes")
        )
    doctor = next(part for part in form["body"] if part["id"] == "doctor")
    assert doctor["validations"]["required"]
    assert "--bundle" in file.read_text()


def test_the_changelog_is_of_this_version():
    text = CHANGELOG.read_text()
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", text, re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert versions[0] == project["version"]
    assert all(f"`{name}`" in text for name in RECIPES)


def test_make_lab_installs_once_and_stays_on_this_machine(tmp_path):
    words = ["make", "--dry-run", "lab", f"VENV={tmp_path}", "ARGS=--no-browser"]
    # `make test` hands its own level and flags down, and then make says where it is
    env = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True, env=env
    )
    lines = done.stdout.splitlines()
    kernel = [
        line for line in lines if "ipykernel install --sys-prefix --name cookbook" in line
    ]
    assert len(kernel) == 1
    root = ["--allow-root"] if os.getuid() == 0 else []
    command = [f"{tmp_path}/bin/jupyter", "lab", "--ServerApp.ip=127.0.0.1", *root]
    assert lines[-1].split() == [*command, "--no-browser"]
    for name in (".run", ".lab", "bin/python"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    words += ["-o", f"{tmp_path}/.run"]
    again = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True, env=env
    )
    assert again.stdout.splitlines() == lines[-1:]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = (ROOT / ".constraints.txt").read_text()
    assert [name.partition(">")[0] for name in extras["optional-dependencies"]["lab"]] == [
        "jupyterlab"
    ]
    assert re.search(r"^jupyterlab==4\.", pinned, re.M)


@pytest.mark.parametrize("script", sorted((ROOT / "findings").glob("*.sh")), **ids)
def test_a_finding_pins_what_it_installs_and_runs_without_the_package(script):
    text = script.read_text()
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert "set -euo pipefail\nfolder=$(mktemp -d)\n" in text
    assert re.search(r"^# Seen on 20\d\d-\d\d-\d\d", text, re.M)
    assert re.search(r"pip\S* install(?:.|\n)*==", text)
    assert "cookbook" not in text
