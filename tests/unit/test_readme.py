"""README as a reader uses it: its Python is run as typed, in a folder and an environment of its own."""

import os
import re
import subprocess
import sys

import pytest
from places import ROOT

PAGES = [ROOT / "README.md", ROOT / ".github" / "README_zh.md"]


def python_blocks(page):
    "The Python of a page"
    return re.findall(
        r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S
    )


def test_both_languages_have_the_same_python():
    english, chinese = map(python_blocks, PAGES)
    assert english == chinese and english


@pytest.mark.slow
@pytest.mark.parametrize("code", python_blocks(PAGES[0]))
def test_its_python_runs_as_typed(code, tmp_path):
    (tmp_path / "try.py").write_text(code, encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "try.py"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\d+) (\S+) (\S+)$", done.stdout, re.M)
    assert [int(step) for step, _, _ in rows] == list(range(11))
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "report.html").is_file()


def test_readme_fits_one_screen_of_prose():
    "The rest is on the pages that it links to"
    text = PAGES[0].read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    lines = [line for line in prose.splitlines() if line and line[0] not in "#|!"]
    assert len(" ".join(lines).split()) < 400
