"""Which answers `math` accepts: how numbers are compared, and which part of a response is the answer."""

import pytest
from answer_pairs import PAIRS, TEXTS, UNEVALUATED
from text_samples import text_sample

from cookbook_npu.config import RewardConfig
from cookbook_npu.data.graders import (
    SCORERS,
    check_label,
    dapo,
    deepscaler,
    exact,
    f1,
    format_think,
    math,
)
from cookbook_npu.data.rewards import RewardPool, write_policy_text
from cookbook_npu.errors import DataError


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    "The scorer changes math-verify for its process; other tests run the library as it is"
    import math_verify.grader as grader
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy

    monkeypatch.setattr(grader, "sympy_numeric_eq", grader.sympy_numeric_eq)
    monkeypatch.setattr(_Latex2Sympy, "parse_number", _Latex2Sympy.parse_number)


def boxed(answer: str) -> str:
    return rf"\boxed{{{answer}}}"


@pytest.mark.parametrize(("label", "answer", "verdict"), PAIRS)
def test_forms_that_grammars_misread_and_answers_not_worked_out(label, answer, verdict):
    assert math(boxed(answer), label, {}) == deepscaler(boxed(answer), label, {}) == verdict


@pytest.mark.parametrize(("label", "text"), UNEVALUATED)
def test_an_expression_does_not_answer_a_label_that_is_a_number(label, text):
    assert math(text, label, {}) == deepscaler(text, label, {}) == 0
    assert dapo(f"Answer: {text}", label, {}) == -1


@pytest.mark.parametrize(("label", "text", "verdict"), TEXTS)
def test_the_answer_is_found_and_no_fragment_or_earlier_claim(label, text, verdict):
    assert math(text, label, {}) == verdict


def test_the_cases_through_the_pool_of_a_run():
    "In restricted processes, where nothing may be compiled or evaluated"
    cases = [(boxed(answer), label, float(verdict)) for label, answer, verdict in PAIRS]
    cases += [(text, label, float(verdict)) for label, text, verdict in TEXTS]
    samples = [text_sample(text, label) for text, label, _ in cases]
    with RewardPool(RewardConfig(scorers={"math": 1.0}, workers=1, timeout_s=10.0)) as pool:
        assert pool.score(samples) == [score for _, _, score in cases]
        assert pool.counts.crashed == pool.counts.timed_out == 0


# ---------------------------------------------------------------- thinking

OPENED = {"prompt": "<|im_start|>assistant\n<think>\n"}
CLOSED = {"prompt": "<|im_start|>assistant\n<think>\n\n</think>\n\n"}


@pytest.mark.parametrize(
    ("text", "metadata", "score"),
    [
        ("Two and three.\n</think>\n\n5", OPENED, 1),
        ("a</think>5", {"prompt": "?\n<think>"}, 1),
        ("<think>a</think>5", {}, 1),
        ("<think>a</think>5", {"prompt": "2+3?"}, 1),
        ("Two and three. 5", OPENED, 0),
        ("Two and three.\n</think>\n", OPENED, 0),
        ("</think>5", OPENED, 0),
        ("<think>a</think>5", OPENED, 0),
        ("a</think>5", {"prompt": "Begin with <think>, please."}, 0),
        ("a</think>5", CLOSED, 0),
        ("a</think>5", {}, 0),
    ],
)
def test_the_format_with_an_opening_tag_in_the_prompt(text, metadata, score):
    assert format_think(text, "5", metadata) == score


@pytest.mark.parametrize(
    ("text", "metadata", "score"),
    [
        (r"\boxed{5}", {}, 1),
        (r"\boxed{5}", {"prompt": "2+3?"}, 1),
        (r"So \boxed{5}.", CLOSED, 1),
        (r"a</think>\boxed{5}", OPENED, 1),
        (r"<think>a</think>\boxed{5}", {}, 1),
        (r"\boxed{5}", OPENED, 0),
        (r"<think>\boxed{5}", {}, 0),
        ("<think>" + "so " * 20_000 + r"\boxed{5}", {}, 0),
        (r"<think>\boxed{5}</think>4", {}, 0),
        ("5", {}, 0),
    ],
)
def test_deepscaler_grades_models_that_do_not_reason_in_tags(text, metadata, score):
    assert deepscaler(text, "5", metadata) == score


# ---------------------------------------------------------------- labels


def verdict(scorer: str, text: str, label) -> float | str:
    try:
        check_label(SCORERS[scorer], label, {"numbers": [4, 6]}, "prompt d:1")
    except DataError as e:
        assert e.what.startswith(f"prompt d:1: scorer {scorer}: the label is"), e.what
        assert e.remedy
        return "refused"
    functions = dict(exact=exact, f1=f1, dapo=dapo, math=math, deepscaler=deepscaler)
    return functions[scorer](text, label, {})


RIGHT = {
    "exact": "24",
    "f1": "24",
    "dapo": "Answer: 24",
    "math": boxed("24"),
    "deepscaler": boxed("24"),
}


@pytest.mark.parametrize("scorer", RIGHT)
def test_a_label_is_used_as_it_is_meant_or_refused(scorer):
    for label in ("24", 24, 24.0, ["24"], [24], [24.0], " 24 "):
        assert verdict(scorer, RIGHT[scorer], label) == 1, label
    for label in (None, True, False, {"value": 24}, float("nan"), "", [], [None], [[1, 2]]):
        assert verdict(scorer, RIGHT[scorer], label) == "refused", label
    several = verdict(scorer, RIGHT[scorer], ["42", "24"])
    assert several == (1 if scorer in ("exact", "f1") else "refused")


@pytest.mark.parametrize("label", ["ten", None, True, 9.5, ["1", "2"], {}])
def test_countdown_refuses_a_label_that_is_no_target(label):
    assert verdict("countdown", "", label) == "refused"


@pytest.mark.parametrize("scorer", ["format", "length", "repetition", "environment"])
def test_scorers_without_a_label_take_any(scorer):
    for label in (None, True, {"a": 1}, ["1", "2"]):
        check_label(SCORERS[scorer], label, {}, "prompt d:1")


OF_REAL_VARIABLES = [  # answer, label, equal for all real values
    (r"\sqrt{x^2}", "|x|", True),
    (r"\frac{\sqrt{n}}{n}", r"\frac{1}{\sqrt{n}}", True),
    (r"\ln e^{2x}", "2x", True),
    (r"\sqrt{\frac{1}{n}}", r"\frac{1}{\sqrt n}", False),
    (r"\sqrt{x^2}", "x", False),
    (r"\sqrt{ab}", r"\sqrt{a}\sqrt{b}", False),
    (r"\ln x^2", r"2\ln x", False),
]


@pytest.mark.parametrize(
    ("turns", "score"),
    [
        ([r"So \boxed{41}.", r"\boxed{42}"], 1),
        ([r"$\boxed{41}$", r"and $\boxed{42}$"], 1),
        ([r"\boxed{40},", r"x = \boxed{41}", r"x = \boxed{42}"], 1),
        ([r"\boxed{42}", "That is all."], 1),
        ([r"\boxed{42}", r"\boxed{41}"], 0),
        ([r"\boxed{41}, \boxed{42}"], 0),
        ([r"\boxed{41}", r"\boxed{42} and \boxed{42}"], 1),
    ],
)
def test_the_last_turn_with_a_box_counts(turns, score):
    dialogue = text_sample("", "42")
    parts = [part for turn in turns for part in ((turn, 1), (" Try again. ", 0))]
    dialogue.response_ids = [ord(c) for text, _ in parts for c in text]
    dialogue.loss_mask = [mask for text, mask in parts for _ in text]
    text = write_policy_text(dialogue, lambda ids: "".join(map(chr, ids)))
    assert math(text, "42", {}) == deepscaler(text, "42", {}) == score


@pytest.mark.parametrize(("answer", "label", "equal"), OF_REAL_VARIABLES)
def test_variables_are_real_as_in_math_verify(answer, label, equal):
    from math_verify import parse, verify

    with_dollars = (parse(f"${text}$", parsing_timeout=None) for text in (label, answer))
    assert verify(*with_dollars, timeout_seconds=None) == equal
    assert math(boxed(answer), label, {}) == equal
