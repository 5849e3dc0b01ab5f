"""The order of prompts under crashes: none skipped, none repeated, whatever is in flight or settled; the shares of a mixture."""

import json
import random
from collections import Counter
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from cookbook_npu.data.prompts import Mixture, PromptDataset, Ranges
from cookbook_npu.data.sample import Prompt

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("repeatable")


def prompts(n, name=""):
    return [
        Prompt(prompt_id=f"{name}{i}", ids=[1], text=f"{name}{i}", label=str(i))
        for i in range(n)
    ]


def single(seed):
    return PromptDataset(prompts(7), seed=seed)


def mixed(seed):
    return Mixture(
        [
            PromptDataset(prompts(n, name), seed=seed)
            for n, name in zip((3, 9, 4), "abc", strict=True)
        ],
        [2, 0.7, 1],
    )


@given(st.lists(st.integers(0, 60), max_size=80))
def test_ranges_are_a_set(numbers):
    ranges, want = Ranges(), set()
    for n in numbers:
        assert (n in ranges) == (n in want)
        if n not in want:
            ranges.add(n)
            want.add(n)
    assert len(ranges) == len(want)
    assert [n for a, b in ranges.as_list() for n in range(a, b)] == sorted(want)
    # No two ranges touch: the representation is the shortest there is.
    assert all(
        b < a
        for (_, b), (a, _) in zip(ranges.as_list(), ranges.as_list()[1:], strict=False)
    )
    assert Ranges(map(tuple, ranges.as_list())).as_list() == ranges.as_list()
    for n in range(62):
        assert ranges.next_missing(n) == next(m for m in range(n, 99) if m not in want)


@given(
    st.sampled_from([single, mixed]),
    st.integers(0, 3),
    st.integers(1, 40),
    st.integers(0, 10**6),
)
@settings(max_examples=150)
def test_random_crashes_skip_nothing_and_repeat_nothing(make, seed, goal, chance):
    """A run that gives out, settles in any order, saves at times and dies at any time.

    What was settled after the last save is lost with the weights that learned it. At the end, the settled draws of all lives
    together are exactly the first draws of the uninterrupted order, each once.
    """
    rng = random.Random(chance)
    whole = [p.prompt_id for p in make(seed).next_batch(goal)]
    feed, history, saved, most = make(seed), [], (json.dumps(make(seed).state()), 0), 0
    for life in range(200):
        action = rng.choice(
            ["give", "settle", "settle", "save", "crash" if life < 150 else "give"]
        )
        if action == "give" and feed.settled.next_missing(feed.next_draw) < goal:
            feed.next_batch(1)
            most = max(most, len(feed.in_flight))
        elif action == "settle" and feed.in_flight:
            name = rng.choice(sorted(feed.in_flight.values()))
            feed.resolve([name], rng.choice(["trained", "dropped", "filtered"]))
            history.append(name)
        elif action == "save":
            saved = json.dumps(feed.state()), len(history)
            # One range more than gaps, and every gap has been in flight.
            assert len(feed.state()["settled"]) <= most + 1
        elif action == "crash":
            feed = make(seed)
            feed.load_state(json.loads(saved[0]))
            del history[saved[1] :]
    while len(feed.settled) < goal:
        if feed.settled.next_missing(feed.next_draw) < goal:
            feed.next_batch(1)
        else:
            history.append(next(iter(feed.in_flight.values())))
            feed.resolve([history[-1]])
    assert Counter(history) == Counter(whole)
    assert feed.state()["settled"] == [[0, goal]]
    assert sum(feed.counts.values()) == goal


@given(st.integers(1, 12), st.integers(0, 5), st.integers(1, 60))
def test_each_epoch_holds_each_prompt_once(size, seed, total):
    got = [p.prompt_id for p in PromptDataset(prompts(size), seed=seed).next_batch(total)]
    for epoch in range(total // size):
        assert len(set(got[epoch * size : (epoch + 1) * size])) == size


@given(
    st.lists(st.floats(0.01, 100, allow_nan=False), min_size=1, max_size=6),
    st.integers(1, 120),
)
@settings(max_examples=80)
def test_a_mixture_never_strays_a_whole_draw_from_its_shares(weights, total):
    "Tijdeman's bound, 1 - 1 / (2K - 2), at every moment"
    feed = Mixture(
        [PromptDataset(prompts(3, f"{k}.")) for k in range(len(weights))], weights
    )
    bound = 1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else 0
    counts = Counter()
    for n, p in enumerate(feed.next_batch(total), 1):
        counts[int(p.prompt_id.split(".")[0])] += 1
        assert (
            max(abs(counts[k] - share * n) for k, share in enumerate(feed.shares)) <= bound
        )
