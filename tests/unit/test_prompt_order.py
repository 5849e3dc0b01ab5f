"""The order of prompts under crashes: none skipped, none repeated; the shares of a mixture."""

import json
import random
from collections import Counter
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from cookbook_npu.data.prompts import EpochOrder, MixedOrder, PromptDataset, RangeSet
from cookbook_npu.data.sample import Prompt


def prompts(n, name=""):
    return [
        Prompt(prompt_id=f"{name}{i}", ids=[1], text=f"{name}{i}", label=str(i))
        for i in range(n)
    ]


def single(seed):
    return PromptDataset(EpochOrder(prompts(7), seed=seed))


def mixed(seed):
    sizes = {"a": 3, "b": 9, "c": 4}
    parts = [EpochOrder(prompts(n, name), seed=seed) for name, n in sizes.items()]
    return PromptDataset(MixedOrder(parts, [2, 0.7, 1]))


@given(st.lists(st.integers(0, 60), max_size=80))
def test_ranges_are_a_set(numbers):
    ranges = RangeSet()
    want = set()
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
    assert RangeSet(ranges.as_list()).as_list() == ranges.as_list()
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
    """A run that gives out, marks done in any order, saves at times and dies at any time.

    What was done after the last save is lost with the weights that learned it. At the end, the
    draws done in all lives together are exactly the first draws of the uninterrupted order.
    """
    rng = random.Random(chance)
    whole = [p.prompt_id for p in make(seed).next_batch(goal)]
    dataset = make(seed)
    history = []
    saved = json.dumps(dataset.state()), 0
    most = 0
    for life in range(200):
        last = "crash" if life < 150 else "give"
        action = rng.choice(["give", "mark", "mark", "save", last])
        if action == "give" and dataset.done.next_missing(dataset.next_draw) < goal:
            dataset.next_batch(1)
            most = max(most, len(dataset.in_flight))
        elif action == "mark" and dataset.in_flight:
            number = rng.choice(list(dataset.in_flight))
            history.append(dataset.in_flight[number])
            dataset.end_draw(number, rng.choice(["trained", "dropped"]))
        elif action == "save":
            saved = json.dumps(dataset.state()), len(history)
            # One range more than gaps, and every gap has been in flight.
            assert len(dataset.state()["done"]) <= most + 1
        elif action == "crash":
            dataset = make(seed)
            dataset.load_state(json.loads(saved[0]))
            del history[saved[1] :]
    while len(dataset.done) < goal:
        if dataset.done.next_missing(dataset.next_draw) < goal:
            dataset.next_batch(1)
        else:
            number, name = next(iter(dataset.in_flight.items()))
            history.append(name)
            dataset.end_draw(number)
    assert Counter(history) == Counter(whole)
    assert dataset.state()["done"] == [[0, goal]]
    assert sum(dataset.counts.values()) == goal


@given(st.integers(1, 12), st.integers(0, 5), st.integers(1, 60))
def test_each_epoch_holds_each_prompt_once(size, seed, total):
    dataset = PromptDataset(EpochOrder(prompts(size), seed=seed))
    got = [p.prompt_id for p in dataset.next_batch(total)]
    for epoch in range(total // size):
        assert len(set(got[epoch * size : (epoch + 1) * size])) == size


@given(
    st.lists(st.floats(0.01, 100, allow_nan=False), min_size=1, max_size=6),
    st.integers(1, 120),
)
@settings(max_examples=80)
def test_a_mixture_never_strays_a_whole_draw_from_its_shares(weights, total):
    "Tijdeman's bound, 1 - 1 / (2K - 2), at every moment"
    parts = [EpochOrder(prompts(3, f"{k}.")) for k in range(len(weights))]
    order = MixedOrder(parts, weights)
    bound = 1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else 0
    counts = Counter()
    for n, p in enumerate(PromptDataset(order).next_batch(total), 1):
        counts[int(p.prompt_id.split(".")[0])] += 1
        strays = [abs(counts[k] - share * n) for k, share in enumerate(order.shares)]
        assert max(strays) <= bound
