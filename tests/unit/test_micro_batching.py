"""The promises of micro-batching, over random lengths: every sample once, the budget, equal counts,
balance.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from cookbook_npu.model.packing import micro_batch_tokens, plan_micro_batches, sequence_cost

lengths_st = st.lists(st.integers(1, 60), max_size=40)


@settings(max_examples=200)
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


@settings(max_examples=200)
@given(lengths_st, st.integers(1, 90), st.integers(1, 5), st.integers(1, 100))
def test_loads_differ_by_less_than_one_micro_batch(lengths, budget, ranks, hidden):
    costs = [sequence_cost(n, hidden) for n in lengths]
    plan = plan_micro_batches(lengths, budget, ranks, costs)
    weights = [sum(costs[i] for i in b) for rank in plan for b in rank]
    loads = [sum(costs[i] for b in rank for i in b) for rank in plan]
    assert max(loads) - min(loads) <= max(weights) - min(weights) + 1e-9
