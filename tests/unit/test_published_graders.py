"""Our scorers against the graders that others publish: every difference is in a table of data/07_graders."""

import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from published_graders import CASES, GRADERS, Case, Unavailable, score
from text_samples import text_sample

from cookbook_npu.config import RewardConfig
from cookbook_npu.data.rewards import RewardPool
from cookbook_npu.data.sample import Sample

pytestmark = pytest.mark.lane("packages")

NOTEBOOK = Path(__file__).parents[2] / "nbs/data/07_graders.ipynb"


class Row(NamedTuple):
    "A row of the notebook's table"

    scorer: str
    cases: list[tuple[str, str]]  # (response, label)
    ours: float
    theirs: list[str]  # graders that say something else
    why: str


@cache
def table() -> list[Row]:
    "The table under 'Against the published graders'"
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    (text,) = [t for t in texts if t.startswith("## Against the published graders")]
    rows = []
    for line in [line for line in text.splitlines() if line.startswith("| ")][1:]:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        plain = cells[1].replace(r"\|", "|").replace("⏎", "\n")
        cases = re.findall("`([^`]*)` for `([^`]*)`", plain)
        theirs = cells[3].split(", ")
        rows.append(Row(cells[0], cases, float(cells[2]), theirs, cells[4]))
    return rows


def rows_of(case: Case) -> list[Row]:
    "The rows that hold a case"
    key = (case.text, str(case.label))
    return [row for row in table() if row.scorer == case.scorer and key in row.cases]


def sample(case: Case) -> Sample:
    metadata = {**case.metadata, "prompt_id": f"{case.scorer}:0"}
    return text_sample(case.text, case.label, metadata=metadata)


def test_ours():
    "What the reward pool gives, with the processes and limits of a run"
    scorers = dict.fromkeys(case.scorer for case in CASES)
    config = RewardConfig(by_source={name: {name: 1.0} for name in scorers})
    with RewardPool(config) as pool:
        found = pool.score([sample(case) for case in CASES])
    wrong = [
        (case, reward)
        for case, reward in zip(CASES, found, strict=True)
        if reward != case.ours
    ]
    assert not wrong
    assert len(CASES) >= 150


@pytest.mark.parametrize("ours, theirs", GRADERS)
def test_theirs(ours, theirs):
    "Each difference is in the table, and each row that names this grader holds a difference"
    try:
        grade = GRADERS[ours, theirs]()
    except Unavailable as error:
        pytest.skip(str(error))
    differ = [
        case for case in CASES if case.scorer == ours and score(grade, case) != case.ours
    ]
    explained = [
        case for case in differ if any(theirs in row.theirs for row in rows_of(case))
    ]
    assert differ == explained
    texts = {(case.text, str(case.label)) for case in differ}
    for row in table():
        if row.scorer == ours and theirs in row.theirs:
            assert texts & set(row.cases), f"no difference from {theirs} is left in {row}"
