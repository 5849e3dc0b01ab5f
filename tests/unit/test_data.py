"""Properties of the subpackage `data`: round trips, formats, and the split of the generated tasks."""

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cookbook_npu.config import DataConfig
from cookbook_npu.data.final_answer import evaluate_expression, numbers_in
from cookbook_npu.data.prompts import PromptReader
from cookbook_npu.data.tasks import GENERATORS, LEVELS, ArithmeticTask, PuzzleTask
from cookbook_npu.data.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@given(st.text(max_size=60))
def test_every_text_survives_the_tokenizer(text):
    tokenizer = test_every_text_survives_the_tokenizer.tokenizer
    if any(0xD800 <= ord(c) < 0xE000 for c in text) or "<|" in text:
        text = text.encode("utf-8", "replace").decode().replace("<|", "")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


test_every_text_survives_the_tokenizer.tokenizer = build_tokenizer()


@given(
    st.sampled_from(sorted(LEVELS)), st.integers(0, 3), st.floats(0.05, 0.5), st.booleans()
)
@settings(max_examples=12)
def test_no_held_out_problem_is_trained_in_any_order_of_operands(level, seed, share, pad):
    task = ArithmeticTask(level=min(level, 4), seed=seed, eval_share=share, pad=pad)
    held_out = {(frozenset((p.a, p.b)), p.op) for p in task.held_out}
    assert not any((frozenset((p.a, p.b)), p.op) in held_out for p in task.train)
    assert len(task.train) + len(task.held_out) == len({p.prompt for p in task.problems})


@given(
    st.sampled_from(sorted(GENERATORS)),
    st.integers(1, 4),
    st.integers(0, 50),
    st.integers(0, 50),
    st.floats(0.05, 0.5),
)
@settings(max_examples=15)
def test_no_evaluation_puzzle_is_trained_under_any_seed(kind, level, seed, other, share):
    "Neither the problem itself nor one with its numbers or letters in another order"
    train = PuzzleTask(kind, level=level, per_level=150, seed=seed, eval_share=share).train
    held_out = PuzzleTask(
        kind, level=level, per_level=150, seed=other, eval_share=share
    ).held_out
    if kind in ("geometry", "triangles", "calculator"):
        assert not {p.family for p in train} & {p.family for p in held_out}
        return
    if kind == "wordle":  # each prompt is the list of letters
        assert not {p.answer for p in train} & {p.answer for p in held_out}
        return
    assert not {p.prompt for p in train} & {p.prompt for p in held_out}
    assert not {same_up_to_order(kind, p.prompt) for p in train} & {
        same_up_to_order(kind, p.prompt) for p in held_out
    }


def same_up_to_order(kind, prompt):
    "A key that is equal for prompts that differ only in the order of numbers or letters"
    if kind == "counting":
        letter, word = prompt[:-1].split(" in ")
        return letter, "".join(sorted(word))
    numbers, _, target = prompt[:-1].partition(">")
    return tuple(sorted(numbers.split())), target


@given(st.sampled_from(sorted(GENERATORS)), st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=15)
def test_puzzles_are_right_and_the_same_every_time(kind, level, seed):
    task = PuzzleTask(kind, level=level, per_level=40, seed=seed)
    assert task.problems == PuzzleTask(kind, level=level, per_level=40, seed=seed).problems
    assert len({p.family for p in task.problems}) == len(task.problems)
    for p in task.problems:
        if kind == "countdown":
            assert evaluate_expression(p.answer) == int(p.label)
            assert numbers_in(p.answer) == sorted(p.metadata["numbers"])
        if kind == "sorting":
            assert list(map(int, p.label.split())) == sorted(
                map(int, p.prompt[:-1].split())
            )
        if kind == "counting":
            assert int(p.label) == sum(c == p.prompt[0] for c in p.prompt[5:-1])
        if kind == "calculator":
            assert evaluate_expression(p.prompt[:-1]) == int(p.label)


def test_the_arithmetic_of_the_laptop_recipe_stays_as_it_is():
    "Part of the recipe's published numbers: its problems, their order and the split never change"
    task = ArithmeticTask()
    text = "".join(p.prompt + p.answer for p in [*task.train, *task.held_out])
    assert (len(task.train), len(task.held_out)) == (1991, 509)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "e708c097ca336f4c"


def test_every_format_from_file_to_prompt(tmp_path, tokenizer):
    message = [{"role": "user", "content": "Solve."}]
    records = {
        "gsm8k": ({"question": "Solve.", "answer": "2*2=<<2*2=4>>4\n#### 1,004"}, "1004"),
        "dapo-math-17k": (
            {"prompt": message, "reward_model": {"ground_truth": "34", "style": "rule"}},
            "34",
        ),
        "aime-2024": ({"ID": "2024-I-1", "Problem": "Solve.", "Answer": 204}, "204"),
        "math-500": (
            {
                "problem": "Solve.",
                "answer": "x",
                "subject": "Algebra",
                "level": 5,
                "unique_id": "a",
            },
            "x",
        ),
        "geo3k": ({"problem": "Solve.", "answer": "3", "images": []}, "3"),
        "plain": ({"prompt": "Solve.", "label": 7}, "7"),
    }
    keyed = DataConfig(input_key="question", label_key="answer")
    for name, (record, label) in records.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(record) + "\n")
        for record_format in ("auto", name):
            found, source, counts = PromptReader(
                DataConfig(record_format=record_format), tokenizer
            ).read(path)
            assert [(p.text, p.label, p.ids) for p in found] == [
                ("Solve.", label, list(b"Solve."))
            ]
            assert counts["read"] == counts["kept"] == 1
            assert name in source and ("detected" in source) == (record_format == "auto")
        if name == "gsm8k":  # a format's label rule holds for keys that are its own, too
            found, source, _ = PromptReader(keyed, tokenizer).read(path)
            assert found[0].label == label and "gsm8k (detected)" in source
        chat = PromptReader(DataConfig(apply_chat_template=True), tokenizer).read(path)
        assert (
            chat.prompts[0].text
            == "<|im_start|>user\nSolve.<|im_end|>\n<|im_start|>assistant\n"
        )
