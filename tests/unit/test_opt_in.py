"""What `make test` leaves out: the pages list what it needs."""

import re

import opt_in
from places import TESTS


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
