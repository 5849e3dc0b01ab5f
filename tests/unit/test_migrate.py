"""The page that translates the keys of other frameworks: all keys exist, and every row has all columns.

The names of TRL are looked up in `test_rl_trl.py`, which imports it."""

import re

import pytest
import yaml
from places import ROOT
from published_graders import Unavailable, unpacked

from cookbook_npu.config import OTHER_NAMES, config_keys, same_setting
from cookbook_npu.recipes import PARAMETERS, RECIPES

pytestmark = pytest.mark.lane("docs")

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


def keys_below(tree: dict, above: str = "") -> set[str]:
    "The dotted keys of nested mappings"
    found = set()
    for name, value in tree.items():
        found.add(f"{above}{name}")
        if isinstance(value, dict):
            found |= keys_below(value, f"{above}{name}.")
    return found


def test_verl_has_the_keys_of_its_column():
    try:
        site = unpacked("verl==0.9.1")
    except Unavailable as e:
        pytest.skip(str(e))
    assert "verl 0.9.1" in PAGE.read_text()
    trainer = site / "verl/trainer/config/_generated_ppo_megatron_trainer.yaml"
    keys = keys_below(yaml.safe_load(trainer.read_text()))
    folder = site / "verl/experimental/fully_async_policy"
    asynchronous = folder / "config/fully_async_ppo_megatron_trainer.yaml"
    keys |= keys_below(yaml.safe_load(asynchronous.read_text()))
    modules = {".".join(folder.relative_to(site).parts)}
    named = {name for row in ROWS for name in re.findall(r"`([\w.]+)`", row[3])}
    assert named - keys == modules


# another name, or none of a setting
NO_SETTING = {"enable", "path", "name", "py", "model", "fully_async_policy"}


def test_an_error_translates_the_keys_of_the_page():
    "`optim.lr` is answered with `optim.learning_rate`: the page and the errors agree"
    meant: dict[str, set[str]] = {}
    for row in ROWS:
        ours = re.findall(r"`([a-z_0-9.]+)`", row[1])
        if ours and row[0] != "passes over a rollout":
            for name in re.findall(r"`(?:--)?([a-z_0-9.-]+)`", " ".join(row[2:])):
                meant.setdefault(name, set()).update(ours)
    keys = [key.name for key in config_keys()]
    for name, ours in meant.items():
        if name.rpartition(".")[2] not in NO_SETTING:
            assert ours & set(same_setting(name, keys)), name


def test_the_page_has_every_name_that_an_error_knows():
    for key, names in OTHER_NAMES.items():
        (first, *rest) = [row for row in ROWS if f"`{key}`" in row[1]]
        text = " ".join(" ".join(row[2:]) for row in (first, *rest)).replace("-", "_")
        for name in names.split():
            assert re.search(rf"[`._]{name}`", text), (key, name)
