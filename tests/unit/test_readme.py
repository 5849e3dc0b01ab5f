"""README as a reader uses it: its Python is run as typed, in a folder and an environment of its own."""

import re

import pytest
from places import ROOT
from reader import Reader, make_environment

PAGES = [ROOT / "README.md", ROOT / ".github" / "README_zh.md"]


def python_blocks(page):
    "The Python of a page"
    return re.findall(
        r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S
    )


def test_both_languages_have_the_same_python():
    english, chinese = map(python_blocks, PAGES)
    assert english == chinese and english


@pytest.mark.parametrize("code", python_blocks(PAGES[0]))
def test_its_python_runs_as_typed(code, tmp_path):
    (tmp_path / "try.py").write_text(code, encoding="utf-8")
    shown = Reader(make_environment(tmp_path / "env"), tmp_path).check("python try.py", 0)
    steps = re.findall(r"^step +(\d+)/10 ", shown, re.M)
    assert [int(step) for step in steps] == list(range(11))
    (folder,) = (tmp_path / "runs").iterdir()
    assert str(folder / "report.html") in shown and (folder / "report.html").is_file()


def test_readme_fits_one_screen_of_prose():
    "The rest is on the pages that it links to"
    text = PAGES[0].read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    lines = [line for line in prose.splitlines() if line and line[0] not in "#|!"]
    assert len(" ".join(lines).split()) < 400
