"""The reward pool as a process: throughput, orphans, and many answers of mixed kinds."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import text_sample

from cookbook_npu.config import RewardConfig
from cookbook_npu.data.final_answer import (
    evaluate_expression,
    find_answer,
    find_choice,
    last_boxed,
    numbers_in,
    plain_answer,
)
from cookbook_npu.data.graders import dapo, exact, f1, format_think, gpqa, repetition
from cookbook_npu.data.rewards import Counts, RewardPool
from cookbook_npu.errors import DataError

HANGS = r"\boxed{99999999999!}"


@pytest.fixture(scope="module")
def pool():
    with RewardPool(RewardConfig(scorers={"math": 1.0}, workers=2, timeout_s=30.0)) as pool:
        yield pool  # no answer of these tests takes a tenth of a second on an idle machine


def test_simple_answers_keep_their_order_and_their_processes(pool):
    "A process for each answer would take a second each"
    pids = [p.process.pid for p in pool.processes]
    samples = [
        text_sample(rf"so \boxed{{\frac{{{i % 50}}}{{7}}}}", f"{i % 49}/7")
        for i in range(400)
    ]
    scores = pool.score(samples)
    assert scores == [float(i % 50 == i % 49) for i in range(400)]
    assert [p.process.pid for p in pool.processes] == pids


def test_an_answer_has_a_time_limit():
    "Fails where there is none: the tests below would hang"
    config = RewardConfig(scorers={"run_driver:hangs": 1.0}, workers=1, timeout_s=0.2)
    with RewardPool(config) as pool:
        grading = threading.Thread(
            target=pool.score, args=([text_sample("4")],), daemon=True
        )
        grading.start()
        grading.join(200)
        assert not grading.is_alive(), "no time limit"
        assert pool.counts.timed_out == 1


BURNS = """
import time

def burns(text, label, metadata):
    while time.process_time() < float(text):
        pass
    return 1.0
"""


def test_a_busy_machine_makes_no_answer_late(tmp_path, monkeypatch):
    "Six processes share the core of a scorer that needs half its limit"
    (tmp_path / "burning.py").write_text(BURNS)
    monkeypatch.syspath_prepend(str(tmp_path))
    limits = RewardConfig(scorers={"burning:burns": 1.0}, workers=1, timeout_s=0.8)
    with RewardPool(limits) as pool:
        grader = psutil.Process(pool.processes[0].process.pid)
        core = grader.cpu_affinity()[:1]
        grader.cpu_affinity(core)
        hogs = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)
        ]
        try:
            for hog in hogs:
                psutil.Process(hog.pid).cpu_affinity(core)
            used_s = sum(grader.cpu_times()[:2])
            assert pool.score([text_sample(str(used_s + 0.4), "1")]) == [1.0]
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
        assert pool.score([text_sample("9999", "1")]) == [0.0]
        assert pool.counts.timed_out == 1


PARENT = """
import os, psutil, sys, threading, time
from test_rewards import HANGS, text_sample
from cookbook_npu.config import RewardConfig
from cookbook_npu.data.rewards import RewardPool
pool = RewardPool(RewardConfig(scorers={"math": 1.0}, workers=2, timeout_s=600))
pool.open()
workers = [psutil.Process(p.process.pid) for p in pool.processes]
idle = [w.cpu_times().user for w in workers]
threading.Thread(target=pool.score, args=([text_sample(HANGS, "x!")] * 2,), daemon=True).start()
while any(w.cpu_times().user < before + 0.2 for w, before in zip(workers, idle)):
    time.sleep(0.01)  # until both compute the answer
print(*[w.pid for w in workers], flush=True)
{end}
"""


@pytest.mark.lane("runs")
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(3)", "sys.exit(0)"])
def test_no_worker_survives_its_run_even_in_the_middle_of_a_hung_answer(end):
    here = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run(
        [sys.executable, "-c", PARENT.replace("{end}", end)],
        capture_output=True,
        text=True,
        cwd=here,
        timeout=400,
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    wait_for_end(*pids)


def wait_for_end(*pids):
    "A process that was killed ends soon, not at once"
    while any(map(alive, pids)):
        time.sleep(0.01)


def alive(pid):
    "Is this process running? A zombie waits for its parent, it runs no more."
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_pool_opened_in_a_thread_outlives_the_thread():
    pool = RewardPool(RewardConfig(scorers={"math": 1.0}, workers=1))
    thread = threading.Thread(target=pool.open)
    thread.start()
    thread.join()
    pids = [p.process.pid for p in pool.processes]
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        time.sleep(0.01)  # it has ended for Python, but not yet for the kernel
    try:
        assert pool.score([text_sample(r"\boxed{4}")]) == [1.0]
        assert [p.process.pid for p in pool.processes] == pids
        assert pool.counts == Counts(graded=1)
    finally:
        pool.close()


def test_a_worker_killed_between_two_calls_is_replaced(pool):
    os.kill(pid := pool.processes[0].process.pid, signal.SIGKILL)
    wait_for_end(pid)
    assert pool.score([text_sample(r"\boxed{4}")] * 6).count(1.0) >= 5
    assert pool.score([text_sample(r"\boxed{4}")] * 6) == [1.0] * 6


def test_a_pool_that_is_dropped_without_close_leaves_nothing():
    pool = RewardPool(RewardConfig(scorers={"math": 1.0}, workers=1))
    pool.open()
    pid = pool.processes[0].process.pid
    del pool
    wait_for_end(pid)


LABELS = st.text(max_size=20).filter(
    lambda text: text.strip().lstrip("+-").lower() not in ("", "nan", "inf", "infinity")
)


@given(st.text(alphabet="ab\\{} 1", max_size=40))
def test_a_box_is_found_again_whatever_stands_around_it(noise):
    inside = noise.replace("{", "").replace("}", "").replace("\\", "")
    assert last_boxed(noise + r" \boxed{" + inside + "} end") == inside


# ---------------------------------------------------------------- hostile answers

BOMBS = [
    "9" * 10_000_000,
    "\\boxed{" + "9" * 10_000 + "}",
    "\\boxed{" * 5000 + "}" * 5000,
    "\\boxed{" + "{" * 200 + "4" + "}" * 200 + "}",
    "\\boxed{" + r"\sqrt{" * 60 + "5" + "}" * 60 + "}",
    "\\boxed{" + r"\frac{1}{1+" * 40 + "1" + "}" * 40 + "}",
    r"\boxed{9^{9^{9^{9^{9}}}}}",
    r"\boxed{99999999999!}",
    r"\boxed{\prod_{i=1}^{999999999} i^i}",
    r"\boxed{\lim_{n \to \infty} (1+\frac{1}{n})^{n^{n^n}}}",
    r"\boxed{\begin{pmatrix}" + r"1&2\\" * 80 + r"\end{pmatrix}^{999}}",
    r"\boxed{\text{__import__('os').system('kill -9 1')}}",
    r"\boxed{\input{/etc/passwd}\write18{touch owned}}",
    "\\boxed{\u202e4\u2066}",
    "\\boxed{٤}",
    "\\boxed{\x00\ud7ff\U0010ffff}",
    "The answer is " + "answer is" * 10**6,
    r"\boxed{5}" * 10**5,
]


@pytest.mark.parametrize("scorer", ["math", "deepscaler"])
@pytest.mark.lane("runs")
def test_hostile_answers_are_wrong_and_those_between_them_right(scorer):
    "Each within its time limit: one that is above it is counted, and none hangs"
    config = RewardConfig(scorers={scorer: 1.0}, workers=2, timeout_s=1.0)
    prefix = "</think>" if scorer == "deepscaler" else ""
    with RewardPool(config) as pool:
        right = text_sample(prefix + r"\boxed{4}")
        bombs = [text_sample(prefix + text, r"\sqrt{17}") for text in BOMBS]
        answers = [answer for bomb in bombs for answer in (bomb, right)]
        assert pool.score(answers) == [0.0, 1.0] * len(BOMBS)
        c = pool.counts
        assert c.graded + c.timed_out + c.limited + c.crashed == len(answers)


ATOMS = [
    *"0123456789+-*/^_!|,.;:=<>()[]{}$%&~#@'\"\\ xyne\n",
    *r"\frac \sqrt \sum_ \int \pi \infty \cup \text{ \left( \right) \cdot \le".split(),
    *r"\boxed{ \begin{ \end{ \pm \circ \% \{ \}".split(),
    *"{4} {2}{3} #### </think> pmatrix __import__ lambda: eval( ٤ ４ ½".split(),
    *("answer is", "\u200b", "\u202e", "\x00"),
]
soup = st.lists(st.sampled_from(ATOMS), max_size=14).map("".join)


@given(st.lists(soup, min_size=8, max_size=8))
@settings(max_examples=60)
def test_fuzzed_answers_get_a_score_and_never_end_the_pool(pool, texts):
    before = pool.counts.crashed
    label = r"123457\pi"  # so long that no soup of 14 pieces hits it by luck in 200 draws
    scores = pool.score([text_sample(rf"\boxed{{{text}}}", label) for text in texts])
    assert scores == [0.0] * len(texts)
    assert pool.counts.crashed == before


@given(st.one_of(soup, st.text(max_size=400)), LABELS)
@settings(max_examples=260)
def test_fuzzed_answers_through_every_text_rule(text, label):
    assert exact(text, label, {}) in (0, 1)
    assert format_think(text, label, {}) in (0, 1)
    assert dapo(text, label, {}) in (-1, 1)
    for found in (find_answer(text), last_boxed(text)):
        assert found is None or isinstance(found, str)
    assert find_choice(text) in (None, *"ABCDEFGHIJ")
    assert isinstance(plain_answer(text), str)
    assert gpqa(text, "B", {}) in (0, 1)
    assert 0 <= f1(text, "4", {}) <= 1
    assert -1 <= repetition(text, None, {}, size=2) <= 0
    assert evaluate_expression(text) is None or isinstance(
        evaluate_expression(text), Fraction
    )


expressions = st.recursive(
    st.integers(0, 99).map(lambda n: (str(n), Fraction(n))),
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*/"), inner)
        .filter(lambda t: t[1] != "/" or t[2][1] != 0)
        .map(
            lambda t: (
                f"({t[0][0]}{t[1]}{t[2][0]})",
                {
                    "+": lambda a, b: a + b,
                    "-": lambda a, b: a - b,
                    "*": lambda a, b: a * b,
                    "/": lambda a, b: a / b if b else None,
                }[t[1]](t[0][1], t[2][1]),
            )
        )
    ),
    max_leaves=12,
)


@given(expressions)
def test_expressions_have_the_value_that_their_tree_has(pair):
    text, value = pair
    assert evaluate_expression(text) == value
    assert evaluate_expression(f"  {text} ") == value
    assert (
        evaluate_expression(text + ")") is None and evaluate_expression("(" + text) is None
    )
    digits = [int(n) for n in "".join(c if c.isdigit() else " " for c in text).split()]
    assert numbers_in(text) == sorted(digits)


OPERATIONS = {
    "+": (lambda p, q: f"({p}+{q})", lambda a, b: a + b),
    "-": (lambda p, q: f"({p}-{q})", lambda a, b: a - b),
    r"\cdot": (lambda p, q: rf"({p} \cdot {q})", lambda a, b: a * b),
    r"\frac": (lambda p, q: rf"\frac{{{p}}}{{{q}}}", lambda a, b: a / b if b else None),
}
latex = st.recursive(
    st.integers(1, 20).map(lambda n: (str(n), Fraction(n))),
    lambda inner: (
        st.tuples(inner, st.sampled_from(sorted(OPERATIONS)), inner)
        .map(
            lambda t: (
                OPERATIONS[t[1]][0](t[0][0], t[2][0]),
                OPERATIONS[t[1]][1](t[0][1], t[2][1]),
            )
        )
        .filter(lambda pair: pair[1] is not None)
    ),
    max_leaves=6,
)


@given(st.lists(latex, min_size=6, max_size=6))
@settings(max_examples=20)
def test_latex_expressions_are_compared_by_their_exact_value(pool, pairs):
    right = [text_sample(rf"so \boxed{{{value}}}", text) for text, value in pairs]
    wrong = [text_sample(rf"so \boxed{{{v + Fraction(1, 3)}}}", text) for text, v in pairs]
    assert pool.score(right) == [1.0] * len(pairs)
    assert pool.score(wrong) == [0.0] * len(pairs)


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=9),
    st.lists(st.sampled_from("bcd"), min_size=1, max_size=9),
)
def test_f1_equals_counting_by_hand(found, right):
    # "a" is an article and does not count.
    left = [w for w in found if w != "a"]
    other = list(right)
    shared = 0
    for w in left:
        if w in other:
            other.remove(w)
            shared += 1
    precision = shared / max(len(left), 1)
    recall = shared / len(right)
    expected = 2 * precision * recall / (precision + recall) if shared else 0.0
    assert f1(" ".join(found), " ".join(right), {}) == pytest.approx(expected)


def test_what_the_environment_wrote_is_never_graded():
    "Random dialogues in which only the environment names the answer earn nothing, with any scorer"
    from cookbook_npu.data.rewards import write_policy_text

    rng = random.Random(0)
    config = RewardConfig(
        scorers={"exact": 1.0, "dapo": 1.0, "gpqa": 1.0, "f1": 1.0, "repetition": 0.0}
    )
    with RewardPool(config) as pool:
        for _ in range(50):
            turns = [("no idea", 1)]
            for _ in range(rng.randrange(1, 4)):
                turns += [
                    (rng.choice(["Answer: B", r"\boxed{B}", "B"]), 0),
                    (rng.choice(["hm", "so", "?"]), 1),
                ]
            ids = [ord(c) for text, _ in turns for c in text]
            mask = [m for text, m in turns for _ in text]
            dialogue = text_sample("".join(text for text, _ in turns), "B")
            dialogue.response_ids = ids
            dialogue.loss_mask = mask
            write_policy_text(dialogue, lambda ids: "".join(map(chr, ids)))
            assert pool.score([dialogue]) == [-1.0]  # dapo's worst, nothing else


def test_a_label_that_no_answer_can_be_compared_with_is_ungradable():
    """Its answers cost their time limit a few times, then nothing; it is reported once. The pool grades
    other labels, and a label with hanging answers, as before."""
    config = RewardConfig(scorers={"math": 1.0}, workers=1, timeout_s=1.0)
    hopeless = [text_sample(rf"\boxed{{{n}}}", "99999999999!") for n in range(30)]
    with RewardPool(config) as strict:
        assert strict.score(hopeless) == [0.0] * 30
        assert strict.counts.timed_out == 3 and strict.counts.ungradable == 27
        (report,) = strict.take_reports()
        assert (report.scorer, report.label, report.why) == (
            "math",
            '"99999999999!"',
            "timed_out",
        )
        assert strict.score(hopeless) == [0.0] * 30
        assert strict.counts.timed_out == 3 and strict.counts.ungradable == 57
        assert not strict.take_reports()
        assert strict.score([text_sample(r"\boxed{4}")]) == [1.0]


def test_labels_that_are_no_number_stop_the_grading():
    for scorer in ("math", "deepscaler", "dapo"):
        rewards = RewardPool(RewardConfig(scorers={scorer: 1.0}))
        for label in ("nan", "-Infinity", float("nan"), float("inf")):
            with pytest.raises(DataError, match=f"sample p/0: scorer {scorer}: the label"):
                rewards.score([text_sample("Answer: nan", label)])
