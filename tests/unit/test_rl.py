"""Properties of the rl functions for arbitrary inputs; the notebooks hold the hand-computed examples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cookbook_npu.rl.losses import LOSS_AGG_MODES, policy_loss, token_weights, weighted_sum

log_probs = st.lists(st.floats(-30, 0, width=32), min_size=1, max_size=20)


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


def test_a_loss_waits_for_the_device_once():
    "A read of a tensor's value waits for all work queued on the device"

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **kwargs or {})

    logp_T = torch.full((3,), -1.0, requires_grad=True)
    with Reads() as reads:
        policy_loss(logp_T, logp_T.detach(), torch.ones(3))
    assert reads.count == 1
