"""What `make test` leaves out: one command runs all of it, and the pages list what it needs."""

import re
import sys

import opt_in
from places import TESTS


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


def test_the_page_has_every_lane_with_its_minutes_and_last_run():
    page = (TESTS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| [^|]+ \| ([\d.]+) \| ([^|]+) \|$", page, re.M)
    expected = [(one.name, f"{one.minutes:g}", one.last) for one in opt_in.LANES]
    assert rows == expected


def test_every_mark_is_a_lane():
    texts = [file.read_text(encoding="utf-8") for file in TESTS.rglob("*.py")]
    named = {
        name for text in texts for name in re.findall(r'mark\.lane\("([\w-]+)"\)', text)
    }
    assert named <= {one.name for one in opt_in.LANES}
