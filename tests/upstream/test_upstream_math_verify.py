"""math-verify's own published test cases through our scorer `math`.

A case is a reference answer, a response and whether they are equal. The cases where we differ are
listed with the reason.
"""

import importlib
import sys
from collections.abc import Iterator

import pytest
from text_samples import text_sample
from upstream_sources import checkout

from cookbook_npu.config import RewardConfig
from cookbook_npu.data.rewards import RewardPool

pytestmark = pytest.mark.lane("upstream")

MODULES = ("all", "boxed", "numina_cases", "open_thoughts", "strict", "yujianll")

# How a reference ends -> why the score of its response differs.
DIFFERENT = {
    "$10$": "9 + 1 is an expression, and the reference a number",
    "$1$": "3/3 is an expression, and the reference a whole number",
    "$\\boxed{1}\\boxed{2}$": "two boxes are a list if a comma or a conjunction connects them",
    "$9$": "a line break inside \\( \\) changes nothing in LaTeX",
    "$10/9$": "1/2 = 10/9 is false: every side of a chain must equal the reference",
    "\\frac{1}{5} \\end{pmatrix})$": "published for 2 decimals; 0.33 is not 1/3 with ours",
    "$x \\in [-2,7]$": "published for both settings of allow_set_relation_comp; ours is always on",
    "++++++ \\\\boxed{4}$": "pluses do not connect two boxes to one answer",
    "\\\\text{ and } W(n) = -1": "W(x) is not W(n), and the box of the reference is not closed",
    "1 - \\frac{1}{\\mathrm{e}}$": "1 + 1/e is not 1 - 1/e",
}


def published() -> Iterator[tuple[str, str, float]]:
    "Reference, response and score of each case; the parameter sets of the test functions are read, not run"
    for name in MODULES:
        module = importlib.import_module(f"tests.test_{name}")
        for test in vars(module).values():
            for mark in getattr(test, "pytestmark", ()):
                names = [n.strip() for n in mark.args[0].split(",")]
                if "gold" not in names:
                    continue
                for values in mark.args[1]:
                    case = dict(zip(names, values, strict=True))
                    if case.get("strict", True):
                        expected = case["expected" if "expected" in case else "result"]
                        yield case["gold"], case["pred"], float(expected)


@pytest.fixture
def cases(monkeypatch):
    monkeypatch.syspath_prepend(str(checkout("Math-Verify@main")))
    for name in [n for n in sys.modules if n.partition(".")[0] == "tests"]:
        monkeypatch.delitem(sys.modules, name)
    found = list(published())
    for name in [n for n in sys.modules if n.partition(".")[0] == "tests"]:
        monkeypatch.delitem(sys.modules, name)
    return found


def test_the_scorer_agrees_with_the_published_cases(cases):
    with RewardPool(RewardConfig(scorers={"math": 1.0}, timeout_s=10.0)) as pool:
        scores = pool.score([text_sample(text, label) for label, text, _ in cases])
        assert pool.counts.graded == len(cases)
    differ = [
        (label, text, score)
        for (label, text, expected), score in zip(cases, scores, strict=True)
        if score != expected
    ]
    assert len(cases) >= 240
    unexplained = [case for case in differ if not case[0].endswith(tuple(DIFFERENT))]
    assert not unexplained
    assert len(differ) == len(DIFFERENT)
