"""The promises of micro-batching, over random lengths: every sample once, the budget, equal counts,
balance.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cookbook_npu.errors import DataError
from cookbook_npu.model.micro_batching import (
    check_lengths,
    first_fit,
    karmarkar_karp,
    micro_batch_tokens,
    plan_micro_batches,
    round_up,
    sequence_cost,
)

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=200)
settings.load_profile("repeatable")

lengths_st = st.lists(st.integers(1, 60), max_size=40)


@given(lengths_st, st.integers(1, 90), st.integers(1, 5), st.booleans())
def test_every_sample_once_within_the_budget_and_equally_many_everywhere(
    lengths, budget, ranks, padded
):
    plan = plan_micro_batches(lengths, budget, ranks, padded=padded)
    flat = [b for rank in plan for b in rank]
    assert len(plan) == ranks and len({len(rank) for rank in plan}) == 1 and plan[0]
    assert sorted(i for b in flat for i in b) == list(range(len(lengths)))
    assert all(b == sorted(b) for b in flat)
    for b in flat:
        assert len(b) <= 1 or micro_batch_tokens(b, lengths, padded) <= budget
    # Ranks run padding only when there are fewer samples than places.
    if any(not b for b in flat):
        assert all(len(b) <= 1 for b in flat)


@given(lengths_st, st.integers(1, 90), st.integers(1, 5), st.integers(1, 100))
def test_loads_differ_by_less_than_one_micro_batch(lengths, budget, ranks, hidden):
    costs = [sequence_cost(n, hidden) for n in lengths]
    plan = plan_micro_batches(lengths, budget, ranks, costs)
    weights = [sum(costs[i] for i in b) for rank in plan for b in rank]
    loads = [sum(costs[i] for b in rank for i in b) for rank in plan]
    assert max(loads) - min(loads) <= max(weights) - min(weights) + 1e-9


@given(st.integers(1, 6), st.data())
def test_karmarkar_karp_keeps_its_bound(parts, data):
    size = data.draw(st.integers(0, 8)) * parts
    weights = data.draw(st.lists(st.integers(0, 1000), min_size=size, max_size=size))
    ranks = karmarkar_karp(weights, parts)
    assert len(ranks) == parts and {len(r) for r in ranks} == {size // parts}
    assert sorted(i for r in ranks for i in r) == list(range(size))
    down = sorted(weights, reverse=True)
    bound = max((down[c] - down[c + parts - 1] for c in range(0, size, parts)), default=0)
    loads = [sum(weights[i] for i in r) for r in ranks]
    assert max(loads) - min(loads) <= bound


@given(lengths_st, st.integers(1, 90))
def test_first_fit_needs_less_than_twice_the_least_possible(lengths, budget):
    bins = first_fit(lengths, budget)
    shared = [n for n in lengths if n <= budget]
    # Two micro-batches that are both at most half full would have been one.
    assert len(bins) - (len(lengths) - len(shared)) <= max(2 * sum(shared) / budget, 1) + 1


@given(lengths_st, st.integers(1, 90), st.integers(1, 5))
def test_no_more_micro_batches_than_the_ranks_ask_for(lengths, budget, ranks):
    needed = len(first_fit(lengths, budget))
    count = len(round_up(first_fit(lengths, budget), lengths, ranks))
    assert count == max(needed + -needed % ranks, ranks)


@given(lengths_st, st.integers(1, 90), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_plan_depends_on_nothing_but_its_arguments(lengths, budget, ranks, rng):
    plan = plan_micro_batches(lengths, budget, ranks)
    rng.random()
    assert plan == plan_micro_batches(tuple(lengths), budget, ranks)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 70))
def test_the_longest_sample_above_the_limit_is_named(lengths, limit):
    names = [f"0.{i}:p/0" for i in range(len(lengths))]
    if max(lengths) <= limit:
        return check_lengths(lengths, limit, names)
    with pytest.raises(
        DataError,
        match=f"sample {names[lengths.index(max(lengths))]} has {max(lengths)} tokens",
    ):
        check_lengths(lengths, limit, names)
