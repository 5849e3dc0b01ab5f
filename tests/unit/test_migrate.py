"""The page that translates the keys of other frameworks: ours exist, and every row has all columns."""

import re

import pytest
from places import ROOT

from cookbook_npu.config import config_keys
from cookbook_npu.recipes import PARAMETERS, RECIPES

PAGE = ROOT / ".docs" / "pages" / "howto" / "migrate.md"
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| setting")
]
# the list of what a user looks for
WANTED = """group size, learning rate, lower and upper clip, loss aggregation, reward function,
response tokens, temperature, checkpoint interval, resume, asynchronous, engine TP, KL in the loss"""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_our_key_exists_and_no_column_is_empty(row):
    assert len(row) == 6 and all(row)
    keys = {key.name for key in config_keys()}
    named = re.findall(r"`([a-z_0-9.]+)`", row[1])
    assert set(named) <= keys | set(RECIPES)
    assert named or "`cookbook-npu " in row[1]


def test_what_a_user_looks_for_has_a_row():
    titles = {row[0] for row in ROWS}
    assert {name.strip() for name in WANTED.split(",")} <= titles


def test_a_parameter_is_one_of_the_recipe():
    "A key with a star"
    for row in ROWS:
        assert set(re.findall(r"`([a-z_.]+)` \*", row[1])) <= set(PARAMETERS.values())
