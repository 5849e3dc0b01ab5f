"""Conversations in tokens: ids carried forward are those of the published chat templates."""

import random
from pathlib import Path

import pytest

from cookbook_npu.data.tasks import build_tokenizer
from cookbook_npu.data.turns import TurnFormat

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


def test_an_end_token_of_another_kind_gets_the_one_of_the_template():
    "Qwen ends with <|im_end|> or <|endoftext|>; the next turn always begins behind <|im_end|>"
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template("qwen3")
    turns = TurnFormat(tokenizer, chat=True)
    told = [{"role": "tool", "content": "42"}]
    after_end = turns.observation_ids(told, tokenizer.eos_token_id)
    after_other = turns.observation_ids(told, tokenizer.pad_token_id)
    assert after_other == [tokenizer.eos_token_id, *after_end]
    assert tokenizer.decode(after_end).startswith("\n<|im_start|>user\n<tool_response>\n42")


def renderers_answer(
    renderer, turns: TurnFormat, messages: list[dict], tools: list[dict], end: int
) -> list[int]:
    "The ids of a conversation as the package `renderers` carries them forward"
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    ids = turns.ids(turns.prompt_text(messages[:first], tools))
    told: list[dict] = []
    completion: list[int] = []
    for message in messages[first:]:
        if message["role"] != "assistant":
            told.append(message)
            continue
        if told:
            longer = renderer.bridge_to_next_turn(ids, completion, told, tools=tools)
            assert longer is not None
            ids = list(longer.token_ids)
            told = []
        completion = [*turns.ids(message["content"]), end]
    return ids + completion


def test_another_implementation_carries_the_same_ids():
    "The package `renderers`, which writes Qwen3's turns without its template"
    from renderers.qwen3 import Qwen3Renderer

    tokenizer = build_tokenizer()
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    responses = ("<tool_response>", "</tool_response>")
    tokenizer.add_tokens([*marks, *responses])
    tokenizer.chat_template = template("qwen3")
    turns = TurnFormat(tokenizer, chat=True)
    renderer = Qwen3Renderer(tokenizer)
    rng = random.Random("renderers")
    several = 0
    for _ in range(100):
        messages = conversation(rng, thinks=True)
        several += sum(m["role"] == "assistant" for m in messages) > 1
        tools = [TOOL] if rng.random() < 0.5 else []
        end = tokenizer.eos_token_id
        ours = carried(turns, messages, tools, end)
        assert ours == renderers_answer(renderer, turns, messages, tools, end)
    assert several > 50
