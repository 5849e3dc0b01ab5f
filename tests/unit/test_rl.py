"""Properties of the rl functions for arbitrary inputs; the notebooks hold the hand-computed examples."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cookbook_npu.errors import DataError
from cookbook_npu.rl.advantages import grpo
from cookbook_npu.rl.kl import kl_estimate
from cookbook_npu.rl.loss_aggregation import LOSS_AGG_MODES, token_weights, weighted_sum
from cookbook_npu.rl.losses import policy_loss

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("repeatable")

rewards = st.floats(-100, 100, width=32)
log_probs = st.lists(st.floats(-30, 0, width=32), min_size=1, max_size=20)


@st.composite
def groups(draw):
    "Rewards of some groups, in a drawn order of samples"
    size = draw(st.integers(2, 8))
    count = draw(st.integers(1, 5))
    order = draw(st.permutations(range(size * count)))
    values = draw(st.lists(rewards, min_size=size * count, max_size=size * count))
    return (
        torch.tensor(values),
        [f"p{i // size}" for i in range(size * count)],
        size,
        list(order),
    )


@given(groups())
def test_advantages_follow_the_sample_not_its_position(drawn):
    rewards_B, ids, size, order = drawn
    adv_B = grpo(rewards_B, ids, size)
    moved_B = grpo(rewards_B[order], [ids[i] for i in order], size)
    # A group's mean may round differently in another order: compare with the largest advantage possible.
    assert torch.allclose(moved_B, adv_B[order], atol=1e-3)


@given(groups(), st.booleans())
def test_each_group_is_centred_and_ordered_like_its_rewards(drawn, normalize):
    rewards_B, ids, size, _ = drawn
    adv_B = grpo(rewards_B, ids, size, normalize_std=normalize)
    assert torch.isfinite(adv_B).all()
    for name in set(ids):
        rows = [i for i, other in enumerate(ids) if other == name]
        r, a = rewards_B[rows], adv_B[rows]
        assert abs(a.double().sum().item()) <= 1e-3 * max(1, r.abs().max().item()) * size
        assert (a[r.argmax()] >= a - 1e-6).all()
        if (r == r[0]).all():
            assert (a == 0).all()


@given(groups())
def test_an_incomplete_group_is_refused(drawn):
    rewards_B, ids, size, _ = drawn
    with pytest.raises(DataError, match=f"expected {size}"):
        grpo(rewards_B[1:], ids[1:], size)


@given(log_probs, st.floats(-3, 3), st.floats(-5, 5))
def test_the_clip_is_pessimistic_and_stops_the_gradient(old, shift, advantage):
    old_T = torch.tensor(old)
    logp_T = (old_T + shift).requires_grad_()
    loss_T, clipped_T = policy_loss(
        logp_T, old_T, torch.full_like(old_T, advantage), 0.2, 0.28
    )
    unclipped_T = -(logp_T - old_T).exp() * advantage
    assert (loss_T >= unclipped_T - 1e-5 * unclipped_T.abs()).all()
    loss_T.sum().backward()
    assert (logp_T.grad[clipped_T == 1] == 0).all()
    # At ratio 1 nothing is clipped, whatever the advantage.
    if shift == 0:
        assert (clipped_T == 0).all()


@given(log_probs, st.floats(-25, 25), st.sampled_from(["k2", "k3", "low_var_kl"]))
def test_kl_estimates_are_finite_and_not_negative(logp, gap, estimator):
    logp_T = torch.tensor(logp)
    kl_T = kl_estimate(logp_T, logp_T - gap, estimator)
    assert torch.isfinite(kl_T).all() and (kl_T >= -1e-5).all()
    if estimator == "low_var_kl":
        assert (kl_T <= 10).all()


@st.composite
def steps(draw):
    "Masks of a step and a way to split it into ranks and micro-batches"
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=12))
    masks = [
        torch.tensor(
            draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), dtype=torch.long
        )
        for n in lengths
    ]
    masks.append(torch.ones(1, dtype=torch.long))
    piece_of = draw(st.lists(st.integers(0, 4), min_size=len(masks), max_size=len(masks)))
    pieces = [[i for i, p in enumerate(piece_of) if p == k] for k in range(5)]
    return masks, [piece for piece in pieces if piece]


def names(masks):
    "Groups of three responses, interleaved"
    return [f"p{i % max(1, len(masks) // 3)}" for i in range(len(masks))]


def summed_gradient(pieces, features, masks, loss_agg_mode):
    "Gradient of a toy policy, added up over the pieces"
    theta = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    weights = token_weights(masks, loss_agg_mode, max_tokens=16, group_ids=names(masks))
    for piece in pieces:
        value_T = torch.tanh(torch.cat([features[i] for i in piece]) @ theta)
        weight_T = torch.cat([weights[i] for i in piece]).double()
        # In double precision so that only the split, not the rounding, could make a difference.
        (value_T * weight_T).sum().backward()
    return theta.grad


@given(steps(), st.sampled_from(LOSS_AGG_MODES))
def test_the_gradient_does_not_depend_on_the_split(step, loss_agg_mode):
    masks, pieces = step
    generator = torch.Generator().manual_seed(len(masks))
    features = [
        torch.randn(len(m), 4, generator=generator, dtype=torch.float64) for m in masks
    ]
    whole = summed_gradient([range(len(masks))], features, masks, loss_agg_mode)
    assert torch.allclose(
        summed_gradient(pieces, features, masks, loss_agg_mode),
        whole,
        atol=1e-12,
        rtol=1e-10,
    )


@given(steps(), st.sampled_from(LOSS_AGG_MODES))
def test_the_weights_of_a_step_sum_to_what_the_mode_says(step, loss_agg_mode):
    masks, pieces = step
    weights = token_weights(masks, loss_agg_mode, max_tokens=16, group_ids=names(masks))
    total = sum(weighted_sum(torch.ones(len(w)), w).item() for w in weights)
    carry = sum(bool(m.sum()) for m in masks)
    of_group = dict.fromkeys(names(masks), 0)
    for name, m in zip(names(masks), masks, strict=True):
        of_group[name] += m.sum().item()
    expected = {
        "token-mean": 1.0,
        "seq-mean-token-mean": carry / len(masks),
        "seq-mean-token-sum-norm": sum(m.sum().item() for m in masks) / 16 / len(masks),
        "group-mean": sum(bool(n) for n in of_group.values()) / len(of_group),
    }
    assert total == pytest.approx(expected[loss_agg_mode], abs=1e-5)
    assert all((w[m == 0] == 0).all() for w, m in zip(weights, masks, strict=True))
