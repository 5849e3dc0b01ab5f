"""What `make test` leaves out: one command runs all of it, and the pages list what it needs."""

import re
import sys

import opt_in
from places import ROOT, TESTS
from upstream_sources import CHECKOUTS


def lane(name: str, code: str, **more) -> opt_in.Lane:
    return opt_in.Lane(name, 0.01, "2026-11-28", (sys.executable, "-c", code), **more)


def test_every_lane_ends_in_a_line(capsys):
    says_why = "print('SKIPPED [2] tests/a.py:7: no index answers')"
    lanes = [
        lane("good", says_why),
        lane("bad", "import os; assert os.environ['MINE'] == '2'", env={"MINE": "1"}),
        lane("absent", "raise SystemExit(9)", why_not=lambda: "pip install it"),
    ]
    assert opt_in.run_all(lanes) == 1
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[:2] for line in lines] == [
        ["good", "passed"],
        ["skipped", "tests/a.py:7:"],
        ["bad", "exit"],
        ["absent", "skipped"],
    ]
    assert "no index answers" in lines[1] and "pip install it" in lines[3]
    assert opt_in.run_all(lanes[:1]) == 0


def test_every_variable_of_the_page_has_a_lane():
    page = (TESTS / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(COOKBOOK_\w+)=", page, re.M))
    in_lanes = {name for one in opt_in.LANES for name in one.env}
    assert named and named - {"COOKBOOK_UPSTREAM"} == in_lanes


def test_the_page_has_every_lane_with_its_minutes_and_last_run():
    page = (TESTS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| [^|]+ \| ([\d.]+) \| ([^|]+) \|$", page, re.M)
    expected = [(one.name, f"{one.minutes:g}", one.last) for one in opt_in.LANES]
    assert rows == expected


def test_lanes_that_time_does_not_reach_are_left_out_and_stopped(capsys):
    lanes = [lane("slow", "import time; time.sleep(600)"), lane("late", "")]
    assert opt_in.run_all(lanes, until=1.0, pace=1.0) == 0
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split()[:3] for line in lines] == [
        ["slow", "left", "out"],
        ["late", "left", "out"],
    ]
    assert "stopped after" in lines[0] and "last run" in lines[1]


def test_every_mark_is_a_lane():
    texts = [file.read_text(encoding="utf-8") for file in TESTS.rglob("*.py")]
    named = {
        name for text in texts for name in re.findall(r'mark\.lane\("([\w-]+)"\)', text)
    }
    assert named <= {one.name for one in opt_in.LANES}


def test_every_target_and_file_of_a_lane_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for one in opt_in.LANES:
        if one.words[0] == "make":
            assert f"\n{one.words[1]}:" in makefile, one.name
        for word in one.words:
            assert not word.startswith("tests/") or (ROOT / word).exists(), word


def test_the_documented_checkouts_are_those_that_tests_ask_for():
    prose = (TESTS / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^(?:at|commit) https://\S+/(\S+)\.git (\S+)$", prose, re.M)
    assert sorted("@".join(line) for line in lines) == sorted(CHECKOUTS)
    for file in sorted((TESTS / "upstream").glob("*.py")):
        asked = re.findall(r'"([A-Za-z-]+@[\w.]+)[/"]', file.read_text(encoding="utf-8"))
        assert set(asked) <= set(CHECKOUTS), file.name
