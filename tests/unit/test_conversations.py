"""Conversations for supervised fine-tuning: loss masks as in TRL, and refusals of damaged records."""

import json
from pathlib import Path

import pytest

from cookbook_npu.config import DataConfig
from cookbook_npu.data.conversations import (
    ConversationFormat,
    ConversationReader,
    conversation_messages,
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
TEMPLATES = ("qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen3_5_nothink")


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
    held_out = found.evaluated()
    dataset = found.training()
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
        ({"messages": [{"role": "user"}]}, "message 1 has the role 'user' and the content"),
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
        reader(prompt_data=str(file)).training()
    assert f"{file} line 2" in str(error.value)


ASKED = {"role": "user", "content": "q"}
THOUGHT = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALLS = PLAIN.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}",
)


def published(name: str) -> str:
    "A chat template of TRL's collection"
    trl = pytest.importorskip("trl", reason="trl is not installed")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def written(template: str, *messages: dict, tools: object = None, chat: bool = True):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    record = {"messages": list(messages), "tools": tools}
    config = DataConfig(apply_chat_template=chat)
    read = conversation_messages(record, "d.jsonl line 3", config)
    form = ConversationFormat(tokenizer, chat=chat)
    return form.conversation(read.messages, "d:3", "d.jsonl line 3", read.tools)


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "qwen3_5_think", "qwen3_6", "qwen3_8"]
)
def test_calls_and_schemas_as_json_text_are_the_same_tokens(name):
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}
    function = {"name": "add", "arguments": json.dumps(CALL["function"]["arguments"])}
    calls = [
        [{"id": "1", "type": "function", "function": function}],
        [CALL["function"]],
        json.dumps([CALL]),
    ]
    told = [{"role": "tool", "content": "42"}, CHAT[2]]
    wanted = written(published(name), ASKED, CALLING, *told, tools=[schema])
    assert '"a"' in wanted.text or "parameter=a" in wanted.text
    for given in calls:
        message = {"role": "assistant", "content": None, "tool_calls": given}
        found = written(published(name), ASKED, message, *told, tools=json.dumps([schema]))
        assert (found.text, found.loss_mask) == (wanted.text, wanted.loss_mask)


TOOL = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
REFUSED = {
    "thoughts": (PLAIN, [ASKED, THOUGHT], None, "leaves out .*, reasoning_content"),
    "earlier thoughts": (
        PLAIN,
        [ASKED, THOUGHT, ASKED, CHAT[2]],
        None,
        "reasoning_content",
    ),
    "thoughts in the content": (
        PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"),
        [ASKED, CHAT[-1]],
        None,
        "leaves out the thoughts of the last message",
    ),
    "calls": (PLAIN, [ASKED, CALLING], None, "tool_calls 1 function name"),
    "arguments": (CALLS, [ASKED, CALLING], None, "tool_calls 1 function arguments a"),
    "schemas": (PLAIN, [ASKED, CHAT[2]], TOOL, "leaves out the tool add"),
    "damaged arguments": (
        CALLS,
        [ASKED, {**CALLING, "tool_calls": [{"name": "add", "arguments": "{"}]}],
        None,
        "message 2: tool call 1, its arguments is not JSON",
    ),
    "two thoughts": (
        CALLS,
        [ASKED, {**THOUGHT, "thinking": "no"}],
        None,
        "different values",
    ),
    "half a weight": (CALLS, [ASKED, {**CHAT[2], "weight": 0.5}], None, "weight 0.5"),
    "weight of a user": (PLAIN, [{**ASKED, "train": True}, CHAT[2]], None, "has a weight"),
    "no weight": (
        PLAIN,
        [ASKED, {**CHAT[2], "loss": False}],
        None,
        "no message is learned",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_template_does_not_write_is_refused_with_file_and_line(case):
    template, messages, tools, why = REFUSED[case]
    with pytest.raises(DataError, match=f"d.jsonl line 3.*{why}"):
        written(template, *messages, tools=tools)


def test_plain_text_shows_no_tools():
    for message, tools in ((CHAT[2], TOOL), (CALLING, None), (THOUGHT, None)):
        with pytest.raises(DataError, match="d.jsonl line 3.*apply_chat_template"):
            written(PLAIN, ASKED, message, tools=tools, chat=False)


@pytest.mark.parametrize("key", ["weight", "loss", "train"])
def test_a_message_without_weight_is_not_learned(key):
    first = {"role": "assistant", "content": "no", key: 0, "extra": "x"}
    last = {"role": "assistant", "content": "yes", key: 1}
    one = written(PLAIN, ASKED, first, ASKED, last)
    learned = [i for i, mask in zip(one.ids, one.loss_mask, strict=True) if mask]
    assert build_tokenizer().decode(learned) == "yes<|im_end|>\n"


def test_thoughts_that_are_dropped_or_empty_are_counted_and_unread_keys_named(
    tmp_path, capsys
):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = published("qwen3")
    first = [{**ASKED, "content": f"{n}?"} for n in range(2)]
    chats = [[one, THOUGHT, {**ASKED, "stamp": 1}, CHAT[2]] for one in first]
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    config = DataConfig(apply_chat_template=True)
    _, line, _ = ConversationReader(config, ConversationFormat(tokenizer), 500).read(
        str(file)
    )
    assert "2 with earlier thoughts that the chat template leaves out" in line
    assert "2 with an empty <think> block that is learned" in line
    assert capsys.readouterr().out.count("not read: stamp") == 1
