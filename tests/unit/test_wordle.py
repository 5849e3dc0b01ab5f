"""The game wordle: marks and rewards by other rules; marks without loss; ended games free their slots."""

import itertools
import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from cookbook_npu.data.environments import Wordle, find_environment, game_record, marks
from cookbook_npu.data.messages import TurnFormat
from cookbook_npu.data.sample import Prompt, Sample
from cookbook_npu.data.tasks import generated_task
from cookbook_npu.data.tokenizer import read_tokenizer
from cookbook_npu.model.tiny import first_weights
from cookbook_npu.recipes import wordle_grpo
from cookbook_npu.rollout.engine import SamplingParams
from cookbook_npu.rollout.episodes import EpisodeRunner
from cookbook_npu.rollout.transformers import TransformersEngine
from cookbook_npu.runs.answers import coloured
from cookbook_npu.train.sampling import make_requests, sample_prompts

SLOTS = 16


def independent_marks(guess: str, secret: str) -> str:
    "Position by position: yellow if fewer such letters are marked before than the secret has elsewhere"
    said = ""
    for i, letter in enumerate(guess):
        green = [g == s == letter for g, s in zip(guess, secret, strict=True)]
        yellow = sum(guess[j] == letter and said[j] == "Y" for j in range(i))
        if green[i]:
            said += "G"
        else:
            said += "Y" if yellow < secret.count(letter) - sum(green) else "X"
    return said


def pairs() -> Iterator[tuple[str, str]]:
    "All pairs of words of four of three letters, then longer ones"
    words = ["".join(w) for w in itertools.product("abc", repeat=4)]
    yield from itertools.product(words, words)
    rng = random.Random(0)
    for _ in range(3000):
        size = rng.randint(1, 8)
        yield tuple("".join(rng.choices("abcde", k=size)) for _ in range(2))  # pyright: ignore


def test_marks_follow_the_rule_for_repeated_letters():
    for guess, secret in pairs():
        assert marks(guess, secret) == independent_marks(guess, secret), (guess, secret)
    assert marks("speed", "erase") == "YXYYX" and marks("llama", "hello") == "YYXXX"


def play(secret: str, *turns: str, compact: bool = True):
    "The observations of a game"
    game = Wordle(compact)
    game.reset(Prompt(prompt_id="w", ids=[1], text="?", label=secret), seed=0)
    return [game.step(turn) for turn in turns]


@pytest.mark.parametrize("length", [1, 3, 5, 9])
def test_only_a_won_game_brings_a_reward_of_one(length):
    "The reward of a game is that of its best guess, whatever came after it"
    rng = random.Random(length)
    for _ in range(200):
        secret, *guesses = ("".join(rng.choices("abc", k=length)) for _ in range(7))
        seen = play(secret, *guesses[:6])
        ended = next((t for t, one in enumerate(seen) if one.done), None)
        total = sum(one.reward for one in seen[: None if ended is None else ended + 1])
        assert (total >= 1) == (secret in guesses[:6])
        if ended is not None:
            assert total == pytest.approx(1 + 1 / (ended + 1))
            continue
        found = [independent_marks(guess, secret) for guess in guesses[:6]]
        best = max(2 * m.count("G") + m.count("Y") for m in found) / (2 * length)
        assert total == pytest.approx(best)


def test_a_turn_without_a_guess_is_lost_and_named():
    (one, two, three) = play(
        "crane", "I say crane", "<guess>cran</guess>", "", compact=False
    )
    assert one.messages == two.messages == three.messages and one.reward == 0
    assert "5 letters" in one.messages[0]["content"]
    texts = (
        "<think>\n<guess>[slate]</guess>\n</think>\n\n<guess> [CRANE] </guess>",
        "Crane",
    )
    assert all(play("crane", text, compact=False)[0].done for text in texts)
    assert game_record("crane")["label"] == "crane"


@pytest.fixture(scope="module")
def games() -> tuple[list[Sample], list[tuple[int, int]]]:
    "48 games of the tiny model in 16 slots, and (busy, waiting) of each decode step"
    config = wordle_grpo()
    folder = first_weights(config)
    tokenizer = read_tokenizer(folder)
    cpu = torch.device("cpu")
    engine = TransformersEngine(folder, dtype="float32", device=cpu, batch_size=SLOTS)
    words = generated_task("wordle", config.data.task).train[:6]
    prompts = [
        Prompt(
            prompt_id=w.name,
            ids=tokenizer(w.prompt)["input_ids"],
            text=w.prompt,
            label=w.label,
        )
        for w in words
    ]
    make = partial(find_environment("wordle", {"compact": True}))
    runner = EpisodeRunner(
        make, TurnFormat(tokenizer, chat=False), config.rollout.max_turns
    )
    steps: list[tuple[int, int]] = []
    decode = engine.decoder.step

    def step(version: int):
        ended = decode(version)
        waiting = len(engine.decoder.queue.states)  # pyright: ignore
        steps.append((len(engine.decoder.running) + len(ended), waiting))  # pyright: ignore
        return ended

    engine.decoder.step = step  # pyright: ignore
    limit = config.sampling.max_response_tokens
    sampling = SamplingParams.of(config.sampling)
    generate = partial(engine.generate, sampling=sampling)
    samples, failures = sample_prompts(
        prompts, make_requests(prompts, 8, seed=0, step=0), generate, runner, limit
    )
    runner.close()
    engine.close()
    assert not failures
    return samples, steps


def test_marks_have_no_loss_and_guesses_have(games):
    tokenizer = read_tokenizer(first_weights(wordle_grpo()))
    for sample in games[0]:
        told = [
            i for i, m in zip(sample.response_ids, sample.loss_mask, strict=True) if not m
        ]
        game = play(str(sample.label), *sample.metadata["turn_texts"][::2])
        lines = [one.messages[0]["content"] for one in game]
        shown = len(sample.metadata["turn_texts"]) // 2
        assert tokenizer.decode(told) == "".join(lines[:shown])
        assert sample.metadata["environment"]["board"] == [o.board for o in game if o.board]


def test_an_ended_game_frees_its_slot(games):
    "A slot is empty only while no game waits, or while fewer than an eighth of them would begin"
    samples, steps = games
    turns = [sample.metadata["environment"]["turns"] for sample in samples]
    assert min(turns) < max(turns) == 6
    tokens = sum(sum(sample.loss_mask) for sample in samples)
    assert sum(busy for busy, _ in steps) == tokens  # no step for a game that is over
    for busy, waiting in steps:
        assert not waiting or busy > SLOTS - SLOTS // 8
    print(
        f"{tokens / len(steps) / SLOTS:.2f} of the slots busy in {len(steps)} decode steps"
    )


def test_letters_are_shown_in_their_colours():
    (one,) = play("bad", "dab")
    assert one.board == "d🟨a🟩b🟨"
    page = coloured(f"<{one.board}>")
    assert page.startswith("&lt;<code") and page.count("#8a6500") == 2 and "🟩" not in page
