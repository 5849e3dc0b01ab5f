"""The dictionary of metrics knows every name that the package writes, and no other."""

import ast
import re
from functools import cache

import pytest
from metrics_page import PAGE, entries, unknown_metrics
from places import ROOT

from cookbook_npu.config import config_keys
from cookbook_npu.runs.metrics import CONSOLE_METRICS, STEP_PHASES
from cookbook_npu.runs.plots import PANELS

pytestmark = pytest.mark.lane("docs")

WRITERS = [*("train", "rl", "rollout"), "data/rewards.py", "runs/metrics.py"]
# prefixes of names; what starts with another one is no metric
METRIC = re.compile(
    r"(?:async|critic|dynamic|env|memory|perf|reward|staleness|time|eval_accuracy)/[\w{}]+"
)


@cache
def texts() -> set[str]:
    "Every text of the modules that write metrics, with {} for a value"
    found = set()
    for writer in WRITERS:
        place = ROOT / "cookbook_npu" / writer
        for file in [place] if place.is_file() else place.glob("*.py"):
            tree, pieces = ast.parse(file.read_text()), set()
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    parts = [
                        v.value if isinstance(v, ast.Constant) else "{}"
                        for v in node.values
                    ]
                    found.add("".join(parts))
                    pieces |= {id(part) for part in node.values}
                elif isinstance(node, ast.Constant) and id(node) not in pieces:
                    found.add(str(node.value))
                elif isinstance(node, ast.keyword) and node.arg:
                    found.add(node.arg)  # dict(ess=...)
    return found


def test_every_name_in_the_source_has_an_entry():
    whole = {text for text in texts() if METRIC.fullmatch(text)}
    written = {text for text in whole if "{}" not in text}
    assert len(written) > 30
    numbered = {text.replace("{}", "1") for text in whole if "{}" in text}
    # a prefix whose names are a loop over others
    loops = {"critic/1", "env/1", "memory/1", "reward/verifier_1"}
    assert unknown_metrics(written | (numbered - loops)) == []


def test_names_that_others_show_have_an_entry():
    shown = {name for panel in PANELS for name in panel.metrics if "*" not in name}
    shown |= set(CONSOLE_METRICS) | {f"time/{phase}" for phase in STEP_PHASES}
    assert unknown_metrics(shown) == []


@cache
def words() -> set[str]:
    return {word for text in texts() for word in re.findall(r"[\w@{}/]+", text)}


@pytest.mark.parametrize("name", entries())
def test_an_entry_is_of_a_name_that_exists(name):
    "The name, its last part, or its text with a hole stands in the source"
    holes = re.sub(r"<\w+>", "{}", name)
    last = name.rpartition("/")[2]
    verifier = last.removeprefix("verifier_")
    ratio = last.removesuffix("_ratio")
    assert words() & {holes, last, verifier, ratio, f"eval_{holes}"}


def test_every_row_has_its_columns_and_names_keys_that_exist():
    text = PAGE.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(set(entries()))
    assert all(row.count(" |") == 5 for row in rows)
    keys = {key.name for key in config_keys()}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    named = re.findall(r"`([a-z_]+\.[a-z_.]+)`", text)
    wrong = [n for n in named if n.partition(".")[0] in sections and n not in keys]
    assert wrong == []
