"""Environments of the real package `verifiers`, of both generations, in our episodes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trl
from text_samples import token_sample
from verifiers_package import Unavailable, interpreter, variables

from cookbook_npu.config import DataConfig
from cookbook_npu.contrib.prime_verifiers import (
    VerifiersEnvironment,
    write_verifiers_prompts,
)
from cookbook_npu.data.environments import find_environment
from cookbook_npu.data.messages import TurnFormat
from cookbook_npu.data.prompts import load_prompts
from cookbook_npu.data.sample import Sample, Turn
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.errors import ConfigError
from cookbook_npu.rollout.engine import Request
from cookbook_npu.rollout.episodes import EpisodeRunner, InitialPromptLength

NAME = "cookbook_npu.contrib.prime_verifiers:VerifiersEnvironment"
CLASSIC, NEWEST = "0.3.1", "0.4.0"
# version -> kind -> name of the environment and its arguments
KINDS: dict[str, dict[str, tuple[str, dict]]] = {
    CLASSIC: {
        "single": ("sums", {}),
        "turns": ("sums", {"kind": "guess"}),
        "tools": ("sums", {"kind": "tools"}),
    },
    NEWEST: {
        "single": ("sums_taskset", {}),
        "turns": ("sums_turns", {}),
        "tools": ("sums_taskset", {"taskset": {"task": {"with_tool": True}}}),
    },
}
QUESTIONS = ["2+3=", "4+4=", "9-2="]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
Answers = dict[str, list[str]]  # question -> the turns of the policy


@pytest.fixture(scope="module")
def python() -> Callable[[str], str]:
    "A Python with a version of verifiers"

    def found(version: str) -> str:
        try:
            return interpreter(version)
        except Unavailable as reason:
            pytest.skip(str(reason))

    return found


@pytest.fixture(autouse=True)
def path(monkeypatch):
    "The environments of the tests can be imported"
    for name, value in variables().items():
        monkeypatch.setenv(name, value)


def written(request: Request, turns: TurnFormat, text: str) -> Sample:
    "A turn of the policy, as an engine returns it"
    ids = [*turns.ids(text), turns.tokenizer.eos_token_id]
    place = {"group_id": request.group_id, "index": request.index}
    new = token_sample(0, request.prompt_ids, ids, -0.5, **place)
    before = request.partial
    if before is None:
        return new
    start = len(before.response_ids)
    own = Turn(start=start, end=start + len(ids), role="policy")
    return replace(
        new,
        response_ids=[*before.response_ids, *ids],
        logprobs=[*before.logprobs, *new.logprobs],
        loss_mask=[*before.loss_mask, *new.loss_mask],
        versions=[*before.versions, *new.versions],
        turns=[*before.turns, own],
    )


class Played:
    "Episodes of an environment with a policy that is scripted"

    def __init__(self, python: str, name: str, arguments: dict, folder: Path, **limits):
        given = {"environment": name, "arguments": arguments, "python": python}
        tokenizer = build_tokenizer()
        templates = Path(trl.__file__).parent / "chat_templates"
        tokenizer.chat_template = (templates / "qwen2_5.jinja").read_text()
        self.turns = TurnFormat(tokenizer, chat=True)
        make = find_environment(NAME, given)
        self.runner = EpisodeRunner(make, self.turns, max_turns=4, **limits)
        assert not self.runner.environments.oracle  # starts the process
        file = folder / "prompts.jsonl"
        write_verifiers_prompts(file, name, arguments, python)
        read = {"prompt_data": str(file), "record_format": "plain"}
        config = DataConfig(**read, apply_chat_template=True)
        self.prompts = load_prompts(config, tokenizer).prompts

    def play(self, answers: Answers) -> tuple[dict[str, Sample], dict[str, str]]:
        "Samples, and failures, by question"
        asked = {p.content[-1]["content"]: p for p in self.prompts}
        prompts = {question: asked[question] for question in answers}
        requests = [
            Request(group_id=q, index=0, prompt_ids=p.ids, seed=0)
            for q, p in prompts.items()
        ]
        batch = self.runner.begin(requests, prompts, 500)
        waiting = {question: iter(turns) for question, turns in answers.items()}
        while batch.requests:
            batch.take(
                [written(r, self.turns, next(waiting[r.group_id])) for r in batch.requests]
            )
        failures = {group: f.reason for group, f in batch.failures.items()}
        return {s.group_id: s for s in batch.samples}, failures

    def text(self, sample: Sample) -> str:
        "All of an episode"
        return self.turns.tokenizer.decode([*sample.prompt_ids, *sample.response_ids])


@pytest.fixture
def start(python, tmp_path):
    "Starts an environment; everything ends with the test"
    open_ones: list[Played] = []

    def play(version: str, name: str, arguments: dict, **limits) -> Played:
        played = Played(python(version), name, arguments, tmp_path, **limits)
        open_ones.append(played)
        return played

    yield play
    for played in open_ones:
        played.runner.close()


def reward(sample: Sample) -> float:
    return sample.metadata["environment"]["reward"]


versions = pytest.mark.parametrize("version", [CLASSIC, NEWEST])


@versions
def test_one_turn_and_the_reward_of_the_rubric(version, start):
    played = start(version, *KINDS[version]["single"])
    samples, failures = played.play({"2+3=": ["5"], "4+4=": ["9"]})
    assert not failures
    assert {q: reward(s) for q, s in samples.items()} == {"2+3=": 1.0, "4+4=": 0.0}
    asked = [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": "2+3="},
        {"role": "assistant", "content": "5"},
    ]
    render = played.turns.tokenizer.apply_chat_template
    assert played.text(samples["2+3="]) + "\n" == render(asked, tokenize=False)


@versions
def test_several_turns_are_carried_forward_without_loss(version, start):
    "Three turns, one that ends right, one that never does; what was said stands between the turns, masked"
    played = start(version, *KINDS[version]["turns"])
    samples, failures = played.play({"2+3=": ["9", "1", "5"], "4+4=": ["1", "2", "3", "4"]})
    assert not failures
    sample = samples["2+3="]
    assert (reward(sample), reward(samples["4+4="])) == (1.0, 0.0)
    said = [("user", "2+3="), ("assistant", "9"), ("user", "lower"), ("assistant", "1")]
    said += [("user", "higher"), ("assistant", "5")]
    messages = [{"role": role, "content": text} for role, text in said]
    messages.insert(0, {"role": "system", "content": "Answer with a number."})
    whole = played.turns.tokenizer.apply_chat_template(messages, tokenize=False)
    assert played.text(sample) + "\n" == whole
    pairs = zip(sample.response_ids, sample.loss_mask, strict=True)
    own = played.turns.decode([token for token, mask in pairs if mask])
    assert own == "915"


@versions
def test_tools_are_shown_called_and_answered(version, start):
    "A broken call stays text, and is counted"
    played = start(version, *KINDS[version]["tools"])
    samples, failures = played.play({"2+3=": [CALL, "5"], "4+4=": ["<tool_call>{"]})
    assert not failures
    text = played.text(samples["2+3="])
    assert '"name": "add"' in text.split("<|im_start|>user")[0], "the schema is in front"
    assert "<tool_response>\n5\n</tool_response>" in text
    facts = {q: s.metadata["environment"] for q, s in samples.items()}
    assert (facts["2+3="]["tool_calls"], facts["2+3="]["tool_errors"]) == (1, 0)
    assert (facts["4+4="]["tool_calls"], facts["4+4="]["tool_errors"]) == (1, 1)
    assert [facts[q]["reward"] for q in ("2+3=", "4+4=")] == [1.0, 0.0]


def test_an_environment_that_fails_or_forgets_costs_its_group(start):
    for kind, words in (("fail", "the board fell"), ("forget", "changed the conversation")):
        played = start(CLASSIC, "sums", {"kind": kind})
        samples, failures = played.play({"2+3=": ["9"]})
        assert not samples and words in failures["2+3="], failures


def test_the_filter_counts_the_tools_of_verifiers(start):
    "The questions as a file say nothing of the tool; the environment does"
    played = start(CLASSIC, "sums", {"kind": "tools"}, max_prompt_tokens=4000)
    length = InitialPromptLength(played.runner)
    prompt = played.prompts[0]
    shown = length(prompt)
    (sample,) = played.play({"2+3=": ["5"]})[0].values()
    assert shown == len(sample.prompt_ids) > len(prompt.ids) + 100


def test_what_cannot_be_played_is_refused(python):
    "Rewards of a group, and a name that nobody has installed"
    for arguments, name, words in (
        ({"kind": "group"}, "sums", "rubric compares the rollouts of a group"),
        ({}, "no_such_environment", "no_such_environment"),
    ):
        with pytest.raises(ConfigError, match=words):
            VerifiersEnvironment(name, arguments, python(CLASSIC))


def test_the_prompt_file_has_every_question_once(python, tmp_path):
    file = tmp_path / "p.jsonl"
    assert write_verifiers_prompts(file, "sums", {"rows": 2}, python(CLASSIC)) == 2
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["prompt"][-1]["content"] for r in records] == QUESTIONS[:2]
    assert [r["label"] for r in records] == ["5", "8"]
