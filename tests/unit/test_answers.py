"""Which answers `math` accepts: how numbers are compared, and which part of a response is the answer."""

import pytest
from answer_pairs import PAIRS, UNEVALUATED
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


DIFFERENT_NUMBERS = [
    (r"1.6\times10^{-19}", r"3.2\times10^{-19}"),
    (r"\frac{1}{20!}", r"-\frac{1}{20!}"),
    (r"\frac{1}{26^{12}}", r"\frac{1}{36^{12}}"),
    (r"e^{-50}", r"e^{-60}"),
    ("0.00000045", "0.00000041"),
    ("1.0000001", "1.0000004"),
    (r"\frac{1}{2^{90}}", r"\frac{1}{2^{91}}"),
    (r"6.63\times10^{-34}", r"1.05\times10^{-34}"),
    (r"\sqrt{2}\cdot10^{-20}", r"\sqrt{3}\cdot10^{-20}"),
    (r"\frac{\pi}{10^{18}}", r"\frac{2\pi}{10^{18}}"),
    (r"(0, 4\times10^{-9})", r"(0, 8\times10^{-9})"),
    (r"\frac{x}{20!}", r"-\frac{x}{20!}"),
    (
        r"\begin{pmatrix}10^{-20}\\1\end{pmatrix}",
        r"\begin{pmatrix}10^{-21}\\1\end{pmatrix}",
    ),
    ("16386.20", "16386.18"),
    ("123457", "123456.8"),
    (r"\frac13", "0.333"),
    ("3.14", r"\pi"),
    ("2.5", "2.50001"),
]
SAME_NUMBERS = [
    (r"\frac13", "0.333333"),
    (r"1.6\times10^{-19}", r"0.16\times10^{-18}"),
    (r"\sqrt{17}", "4.123105625617661"),
    ("4.123105625617661", r"\sqrt{17}"),
    (r"\frac{8}{3}", "2.6667"),
    (r"6.62607015\times10^{-34}", r"6.62607\times10^{-34}"),
    (r"\frac{1}{20!}", r"\frac{1}{19! \cdot 20}"),
    (r"e^{-50}", r"\frac{1}{e^{50}}"),
    (r"(\frac{3}{5},\frac{8}{3}]", "(0.6,2.6667]"),
    (r"\frac{x}{20!}", r"\frac{2x}{2 \cdot 20!}"),
    (r"\sin(\pi)", "0"),
    (r"28\%", "0.28"),
    ("1", r"100\%"),
    ("16386.20", r"16,\!386.2"),
]


@pytest.mark.parametrize(("label", "answer"), DIFFERENT_NUMBERS)
def test_numbers_that_differ_relative_to_their_size_are_not_equal(label, answer):
    assert math(boxed(answer), label, {}) == 0
    assert math(boxed(label), answer, {}) == 0


@pytest.mark.parametrize(("label", "answer", "verdict"), PAIRS)
def test_forms_that_grammars_misread_and_answers_not_worked_out(label, answer, verdict):
    assert math(boxed(answer), label, {}) == deepscaler(boxed(answer), label, {}) == verdict


@pytest.mark.parametrize(("label", "text"), UNEVALUATED)
def test_an_expression_does_not_answer_a_label_that_is_a_number(label, text):
    assert math(text, label, {}) == deepscaler(text, label, {}) == 0
    assert dapo(f"Answer: {text}", label, {}) == -1


@pytest.mark.parametrize(("label", "answer"), SAME_NUMBERS)
def test_equal_numbers_and_roundings_are_equal(label, answer):
    assert math(boxed(answer), label, {}) == 1


FRAGMENTS = [
    ("2", r"<answer>\frac{1}{2}</answer>"),
    ("3", r"so x equals \sqrt{3}"),
    ("2", "it is x^2"),
    ("2", r"\fbox{\frac{1}{2}}"),
    ("2", "答案是 \\frac{1}{2}。"),
    ("7", "The value is 3/7"),
    ("5", "we find 2 + 5"),
    ("5", r"therefore 2\cdot 5"),
    ("3", r"which gives \log_2 3"),
    ("4", "hence f(4)"),
    ("2", "the interval [1, 2]"),
    ("9", "5 = 9"),
    ("3", "<answer>2 or 3</answer>"),
]
FOUND = [
    (r"\frac{1}{2}", r"<answer>\frac{1}{2}</answer>"),
    (r"\frac{1}{2}", r"\fbox{\frac{1}{2}}"),
    (r"\frac{1}{2}", "答案是 \\frac{1}{2}。"),
    (r"\sqrt{3}", r"so x equals \sqrt{3}"),
    ("7", "we find 2 + 5 = 7"),
    ("73", "The answer is 73 because 70+3=73."),
    ("14916", "The final answer is $14916$. I hope it is correct."),
    ("42", "The answer is 42. I hope this helps."),
    ("42", "The answer is $42$. Done."),
    ("42", "My first answer is 7. The correct answer is 42."),
    ("42", "So the answer is 42, which is even."),
    ("42", "The answer to the question should be 42."),
    ("42", "**Answer:** 42 apples"),
    ("42", "最终答案：４２。"),
    ("42", "答案为42，因为6×7=42"),
    ("42", "<think>4 and 2</think>\n<answer> 42 </answer>"),
    ("42", "<think>so \\boxed{6}?</think>The answer is 42."),
    ("(1,2)", "The answer is (1, 2)."),
    ("1,2", r"\boxed{1} and \boxed{2}"),
    ("1,2,3", r"\boxed{1}, \boxed{2} and \boxed{3}"),
    ("2", r"It is \boxed{1}. No: \boxed{2}"),
    ("2.74", "It costs 2,74 euros"),
    ("11111", r"\boxed{11,\! 111}"),
    ("1000", "1 000"),
    ("0.4", ".4"),
    (r"\frac{1}{2}", r"Long text. So the answer is $\boxed{\frac{1}{2}}$."),
    ("5", r"We use the formula in \boxed{5} and conclude."),
    ("5", r"a solution that ends with \boxed{5}"),
    ("5", "The answer is therefore 5."),
    ("5", "The answer is, therefore, 5."),
    ("5", "The final answer is then $5$."),
    ("5", "Answer: approximately $5$."),
    ("18", "Answer: 18 (rounded)"),
    ("18", "12 + 6 = 18 (see step 2)."),
    ("45", "The angle is 45°."),
    ("12", r"The answer is $\boxed{\text{(C)}\ 12}$"),
]
NOT_FOUND = [
    ("5", r"\boxed{4} and \boxed{5}"),
    ("4", r"\boxed{4} and \boxed{5}"),
    ("4", "The answer is $4$ million."),
    ("4", "The answer is $4$ or 5."),
    ("5", "The answer is not 5."),
    ("5", "Answer: 5 (mod 7)"),
    ("5", "The answer is about 5 million."),
    ("5", "The answer is just 5 or 6."),
    ("6", "The answer is therefore about 5 or 6."),
    ("5", "The answer is clearly not equal to 5."),
    ("5", "The answer is less than 5."),
    ("42", "The answer is 42 \\boxed{42"),
    ("7", "My first answer is 7. The correct answer is 42."),
]


@pytest.mark.parametrize(("label", "text"), [*FRAGMENTS, *NOT_FOUND])
def test_a_fragment_and_an_earlier_claim_are_no_answer(label, text):
    assert math(text, label, {}) == 0


@pytest.mark.parametrize(("label", "text"), FOUND)
def test_the_answer_is_found(label, text):
    assert math(text, label, {}) == 1


SPELLINGS = [
    ("5", "5。"),
    ("(1,2)", "（1，2）"),
    ("5", "５"),
    ("-5", "–5"),
    ("-5", "\u22125"),
    ("-5", "－５"),
    ("－５", "-5"),
    ("（1，2）", "(1,2)"),
    ("5", "5,"),
    ("5", "5;"),
    ("12", r"12~\text{apples}"),
    ("12", r"12\,\text{cm}"),
    ("12", r"12 \mbox{ apples}"),
    (r"12\text{ apples}", "12 apple"),
    (r"\frac{1}{2}", r"\frac{1}{2}\text{ of the cake}"),
    (r"\emptyset", r"\varnothing"),
    (r"\varnothing", r"\emptyset"),
    (r"\emptyset", r"\{\}"),
    (r"\emptyset", r"\text{no solution}"),
    ("no solution", r"\varnothing"),
    ("[1,2]", r"1\le x\le 2"),
    ("(-2,7]", r"-2 < x \le 7"),
    (r"1\le x\le 2", "[1,2]"),
    (r"(3,\infty)", "x>3"),
    (r"(-\infty,3]", r"x\le 3"),
    (r"[2,\infty)", r"x \geq 2"),
    ("4", "2+2=4"),
    ("45", "45°"),
    (r"45^\circ", "45º"),
    (r"\sqrt{18}", "3√2"),
    (r"\infty", "∞"),
    (r"(-\infty,1)\cup(2,\infty)", "(-∞,1)∪(2,∞)"),
    ("1/2", "½"),
    ("2·3", "6"),
    ("C", r"\textbf{(C)}\ 12"),
    ("12 m", "12 meters"),
    ("12 hours", "12 hrs"),
    ("12 cm^2", r"12\text{ square centimeters}"),
    ("4,4", "4,4"),
    ("1000.99", "1000,99"),
    (r"\$5.50", "5.5"),
    ("$2x+4y-3=0$", r"y=-\frac{1}{2}x+\frac{3}{4}"),
    ("$x^2/4+y^2/3=1$", "x^2/16+y^2/12=1/4"),
]


@pytest.mark.parametrize(("label", "answer"), SPELLINGS)
def test_spellings_of_a_right_answer(label, answer):
    assert math(boxed(answer), label, {}) == 1


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("4", "4=5=4"),
        ("4", "x=4=5=4"),
        ("4", "4=3+2=4"),
        ("4", "4=5"),
        ("4", "4,4,4,4"),
        ("4", "4,4"),
        ("4", r"4 \text{ and } 4"),
        ("4", "4; 4"),
        ("2", "2,2"),
        ("4", r"4\text{ million}"),
        ("4", r"4\text{ or more}"),
        (r"4\text{ m}", r"4\text{ cm}"),
        ("4 m", "4 minutes"),
        ("4 m^2", "4 cubic meters"),
        ("C", r"\textbf{(D)}\ C"),
        ("45", "54°"),
        (r"\infty", "-∞"),
        ("[1,2]", "1 < x < 2"),
        ("(3,\\infty)", "x<3"),
        (r"\emptyset", "0"),
        ("5", "-5"),
        ("5", "٥"),
        ("5", "⑤"),
    ],
)
def test_spellings_of_a_wrong_answer(label, answer):
    assert math(boxed(answer), label, {}) == 0


def test_the_cases_through_the_pool_of_a_run():
    "In restricted processes, where nothing may be compiled or evaluated"
    cases = [(boxed(answer), label, float(verdict)) for label, answer, verdict in PAIRS]
    cases += [(boxed(answer), label, 1.0) for label, answer in SAME_NUMBERS]
    cases += [(boxed(answer), label, 0.0) for label, answer in DIFFERENT_NUMBERS]
    cases += [(boxed(answer), label, 1.0) for label, answer in SPELLINGS]
    cases += [(text, label, 1.0) for label, text in FOUND]
    cases += [(text, label, 0.0) for label, text in FRAGMENTS]
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
