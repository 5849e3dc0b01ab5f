"""Conversations for supervised fine-tuning: loss masks as in TRL, and refusals of damaged records."""

import json

import pytest

from cookbook_npu.config import DataConfig
from cookbook_npu.data.conversations import (
    ConversationFormat,
    ConversationReader,
    held_out_conversations,
    load_conversations,
)
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.errors import DataError

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "12+30="},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "\u00e9?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n14 \u00e9"},
]
CALL = {"function": {"name": "add", "arguments": {"a": 12, "b": 30}}, "type": "function"}
TOOLS = [
    *CHAT[:2],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42"},
    CHAT[2],
]
TEMPLATES = (
    "qwen3",
    "qwen3_instruct_2507",
    "qwen3_vl",
    "qwen3_5_think",
    "qwen3_5_nothink",
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_mask_is_that_of_trl(name):
    "On the template that TRL trains with; where the model's own writes the same text, on that, too"
    pytest.importorskip("trl", reason="trl is not installed: pip install -e '.[dev]'")
    from trl import chat_template_utils

    tokenizer = build_tokenizer()
    tokenizer.chat_template = getattr(chat_template_utils, f"{name}_chat_template")
    training = chat_template_utils.get_training_chat_template(tokenizer)
    patched = build_tokenizer()
    patched.chat_template = training
    for chat in (CHAT, TOOLS, CHAT[:3]):
        theirs = tokenizer.apply_chat_template(
            chat,
            chat_template=training,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ours = ConversationFormat(patched).conversation(chat)
        assert ours.ids == theirs["input_ids"]
        assert ours.loss_mask == theirs["assistant_masks"]
        own = ConversationFormat(tokenizer).conversation(chat)
        learned = [i for i, mask in zip(own.ids, own.loss_mask, strict=True) if mask]
        if own.text == ours.text:
            assert own.loss_mask == ours.loss_mask
        assert tokenizer.decode(learned).count("<|im_end|>") == sum(
            message["role"] == "assistant" for message in chat
        )


def test_the_last_turn_alone():
    tokenizer = build_tokenizer()
    one = ConversationFormat(tokenizer, "last").conversation(CHAT)
    learned = [i for i, mask in zip(one.ids, one.loss_mask, strict=True) if mask]
    assert tokenizer.decode(learned) == f"{CHAT[-1]['content']}<|im_end|>\n"


def reader(**values) -> ConversationReader:
    config = DataConfig(apply_chat_template=True, **values)
    return ConversationReader(config, ConversationFormat(build_tokenizer()), 128)


def test_held_out_repeated_and_long_conversations_are_left_out_and_counted(
    tmp_path, capsys
):
    turns = [[{"role": "user", "content": str(n)}, CHAT[2]] for n in range(4)]
    long = [{"role": "user", "content": "1" * 200}, CHAT[2]]
    files = {"train": [*turns, turns[0], long], "held_out": turns[2:]}
    for name, chats in files.items():
        lines = [json.dumps({"messages": chat}) for chat in chats]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    data = {"prompt_data": "train", "eval_data": "held_out"}
    paths = {key: str(tmp_path / f"{name}.jsonl") for key, name in data.items()}
    found = reader(**paths, eval_prompts=1)
    held_out = held_out_conversations(found)
    dataset = load_conversations(found)
    assert (len(held_out), len(dataset)) == (1, 2)  # the second is not trained, either
    assert "1 of 2 evaluated" in capsys.readouterr().out
    said = "6 conversations, 2 kept, 1 longer than 128 tokens, 1 repeated, 2 also in the evaluation"
    assert dataset.source.endswith(said)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"prompt": "1+1="}, "has no list of messages under 'messages'; it has prompt"),
        ({"messages": CHAT[:2]}, "nothing to learn"),
        ({"messages": CHAT, "images": ["a.png"]}, "has images, which are not read"),
        ({"messages": [{"role": "user"}]}, "message 1 of the prompt"),
        (
            {"messages": [{"role": "user", "content": "<|im_start|>"}, CHAT[2]]},
            "message 1 has",
        ),
    ],
)
def test_a_damaged_record_is_refused_with_file_and_line(tmp_path, record, why):
    file = tmp_path / "chat.jsonl"
    good = {"messages": CHAT}
    file.write_text(f"{json.dumps(good)}\n{json.dumps(record)}\n")
    with pytest.raises(DataError, match=why) as error:
        load_conversations(reader(prompt_data=str(file)))
    assert f"{file} line 2" in str(error.value)
