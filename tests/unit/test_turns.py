"""Conversations in tokens: ids carried forward are those of the published chat templates."""

import json
import random
from pathlib import Path

import pytest

from cookbook_npu.config import DataConfig
from cookbook_npu.data.environments import find_environment
from cookbook_npu.data.messages import TurnFormat
from cookbook_npu.data.prompts import PromptReader, load_prompts
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.errors import DataError
from cookbook_npu.rollout.engine import Request
from cookbook_npu.rollout.episodes import EpisodeRunner, InitialPromptLength

TEMPLATES = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_training")
CONVERSATIONS = 500  # over all templates
LETTERS = "ab \n\t.1é漢<>{}\"'\\/|"
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}


def template(name: str) -> str:
    "A chat template as its model was published with, from TRL's collection"
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def words(rng: random.Random) -> str:
    "A text without white space at its ends, which some templates take away"
    text = "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 12)))
    return text.strip() or "x"


def conversation(rng: random.Random, thinks: bool) -> list[dict]:
    "Question, then turns and results of tools, then an answer"
    messages = [{"role": "user", "content": words(rng)}]
    if rng.random() < 0.5:
        messages.insert(0, {"role": "system", "content": words(rng)})
    for number in range(rng.randint(0, 4)):
        messages.append({"role": "assistant", "content": turn(rng, thinks)})
        for _ in range(rng.randint(1, 2)):
            messages.append({"role": "tool", "content": words(rng) + str(number)})
    messages.append({"role": "assistant", "content": turn(rng, thinks)})
    return messages


def turn(rng: random.Random, thinks: bool) -> str:
    "What a policy writes"
    return f"<think>\n{words(rng)}\n</think>\n\n{words(rng)}" if thinks else words(rng)


def carried(
    turns: TurnFormat, messages: list[dict], tools: list[dict], end: int
) -> list[int]:
    "The ids of a conversation as a rollout makes them, turn by turn"
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    ids = turns.ids(turns.prompt_text(messages[:first], tools))
    told = []
    for message in messages[first:]:
        if message["role"] != "assistant":
            told.append(message)
            continue
        if told:
            ids += turns.observation_ids(told, ids[-1])
            told = []
        ids += [*turns.ids(message["content"]), end]
    return ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_carried_forward_are_those_of_the_template(name):
    "500 random conversations; no end token stands twice, and the line break behind it never misses"
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template(name)
    turns = TurnFormat(tokenizer, chat=True)
    rng = random.Random(name)
    thinks = name in ("qwen3", "qwen3_training")
    for _ in range(CONVERSATIONS // len(TEMPLATES)):
        messages = conversation(rng, thinks)
        tools = [TOOL] if rng.random() < 0.5 else []
        got = carried(turns, messages, tools, tokenizer.eos_token_id)
        whole = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)
        assert tokenizer.decode(got) + "\n" == whole
        assert [*got, *turns.ids("\n")] == turns.ids(whole)


def with_calculator(limit: int) -> tuple[EpisodeRunner, TurnFormat]:
    "Episodes whose template shows the calculator, and how they are written"
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template("qwen3")
    turns = TurnFormat(tokenizer, chat=True)
    runner = EpisodeRunner(
        find_environment("calculator"), turns, 2, max_prompt_tokens=limit
    )
    return runner, turns


def prompt_file(folder: Path, questions: list[str]) -> DataConfig:
    "Questions as a file, and how it is read"
    lines = [json.dumps({"prompt": q, "label": str(n)}) for n, q in enumerate(questions)]
    (folder / "sums.jsonl").write_text("\n".join(lines))
    return DataConfig(prompt_data=str(folder / "sums.jsonl"), apply_chat_template=True)


def test_the_filter_of_prompts_counts_the_schema_of_a_tool(tmp_path):
    "A prompt that is short enough alone is left out, before anything starts; what is left can begin"
    questions = ["1+1=", "1+" * 100 + "1=", "2+2="]
    config = prompt_file(tmp_path, questions)
    runner, turns = with_calculator(0)
    tools = runner.environments.make().tools
    shown = [
        len(turns.prompt_ids([{"role": "user", "content": q}], tools)) for q in questions
    ]
    alone = len(turns.prompt_ids([{"role": "user", "content": questions[1]}]))
    assert alone < shown[0] < shown[1], "the schema is longer than the longest question"
    limit = shown[1] - 1
    config = config.model_copy(update={"max_prompt_tokens": limit})
    runner, turns = with_calculator(limit)
    plain = load_prompts(config, turns.tokenizer)
    assert len(plain) == 3, "without an environment every prompt is short enough"
    prompts = load_prompts(
        config, turns.tokenizer, initial_tokens=InitialPromptLength(runner)
    )
    assert [p.text.count("+") for p in prompts.prompts] == [1, 1]
    assert "1 longer than" in prompts.source and "environment adds" in prompts.source
    requests = [
        Request(group_id=p.prompt_id, index=0, prompt_ids=p.ids, seed=0)
        for p in prompts.prompts
    ]
    batch = runner.begin(requests, {p.prompt_id: p for p in prompts.prompts}, 10)
    assert not batch.failures
    assert {len(r.prompt_ids) for r in batch.requests} == {shown[0]}
    lost = runner.begin(requests[:1], {requests[0].group_id: plain.prompts[1]}, 10)
    assert "data.max_prompt_tokens" in str(lost.failures), (
        "what happened without the filter"
    )
    runner.close()


def test_generated_problems_that_are_too_long_with_the_tool_end_a_run_at_once():
    "None of them would be left, so it is an error that names both numbers"
    runner, turns = with_calculator(100)
    config = DataConfig(
        prompt_data="calculator",
        apply_chat_template=True,
        max_prompt_tokens=100,
        eval_prompts=8,
    )
    load_prompts(config, turns.tokenizer)
    with pytest.raises(DataError, match="with what its environment adds.*is 100"):
        load_prompts(config, turns.tokenizer, initial_tokens=InitialPromptLength(runner))
    with pytest.raises(DataError, match="with what its environment adds.*is 100"):
        length = InitialPromptLength(runner)
        PromptReader(config, turns.tokenizer, None, length).evaluated()
    runner.close()


def test_metadata_is_a_part_of_a_task_in_an_environment(tmp_path):
    "Tasks of one opening message are several in an environment, and one question without it"
    runner, turns = with_calculator(1000)
    rows = [
        {"prompt": "Begin.", "label": "", "metadata": {"row": n % 5}} for n in range(10)
    ]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps(rows[0]) + "\n")
    config = DataConfig(
        prompt_data=str(file), eval_data=str(held_out), apply_chat_template=True
    )
    length = InitialPromptLength(runner)
    found = load_prompts(config, turns.tokenizer, initial_tokens=length)
    assert [p.metadata["row"] for p in sorted(found.prompts, key=lambda p: p.prompt_id)] == [
        1, 2, 3, 4,
    ]  # fmt: skip
    with pytest.raises(DataError, match="no prompt is left"):
        load_prompts(config, turns.tokenizer)
    runner.close()
