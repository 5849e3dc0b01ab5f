"""float64 results of the rl functions against implementations in numpy that share only the formula."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cookbook_npu.errors import ConfigError, NumericsError
from cookbook_npu.rl.advantages import discounted_returns, gae, rloo, token_rewards, whiten
from cookbook_npu.rl.filters import DynamicSampling
from cookbook_npu.rl.losses import (
    cispo_loss,
    dppo_loss,
    gmpo_loss,
    gspo_loss,
    importance_weights,
    kl_estimate,
    mismatch_metrics,
    policy_loss,
    sapo_loss,
    value_loss,
)
from cookbook_npu.rl.sequences import sequences

CLOSE = dict(rtol=1e-9, atol=1e-9)


def close(found, expected):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), **CLOSE)


@st.composite
def step(draw):
    "Packed responses: lengths, mask, and random values with a drawn seed"
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = sum(lengths)
    draws = dict(
        logp=rng.normal(-1, 0.7, n),
        old=rng.normal(-1, 0.7, n),
        rollout=rng.normal(-1, 0.7, n),
        adv=rng.normal(0, 2, n),
        mask=rng.integers(0, 2, n).astype(float),
    )
    return lengths, {name: torch.from_numpy(x) for name, x in draws.items()}, draws


def parts(x, lengths):
    return np.split(x, np.cumsum(lengths)[:-1])


def masked(f, x, mask):
    "f of the values where the mask is 1; 0 when there are none"
    return f(x[mask == 1]) if (mask == 1).any() else 0.0


@given(st.integers(1, 4), st.integers(1, 12), st.floats(0.5, 1), st.integers(0, 2**32 - 1))
def test_rewards_on_tokens_and_returns(rows, tokens, gamma, seed):
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=rows)
    kl = rng.normal(size=(rows, tokens))
    mask = rng.integers(0, 2, (rows, tokens))
    expected = np.zeros((rows, tokens))
    for i in range(rows):
        at = np.flatnonzero(mask[i])
        for n, t in enumerate(at):
            later = -0.3 * kl[i, at[n:]] + np.eye(len(at))[-1][n:] * rewards[i]
            expected[i, t] = (later * gamma ** np.arange(len(later))).sum()
    mask_BT = torch.from_numpy(mask)
    reward_BT = token_rewards(torch.from_numpy(rewards), mask_BT, torch.from_numpy(kl), 0.3)
    close(discounted_returns(reward_BT, mask_BT, gamma), expected)


@given(step(), st.sampled_from(["tv", "kl"]), st.sampled_from([None, 1.2]))
def test_dppo(drawn, kind, clip_ratio_c):
    _, t, x = drawn
    new, old = np.minimum(x["logp"], -1e-3), np.minimum(x["old"], -1e-3)
    p, q = np.exp(new), np.exp(old)
    distance = (
        np.abs(p - q)
        if kind == "tv"
        else q * np.log(q / p) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
    )
    outside = ((x["adv"] > 0) & (p > q) & (distance > 0.1)) | (
        (x["adv"] < 0) & (p < q) & (distance > 0.05)
    )
    weight = np.minimum(p / q, clip_ratio_c or np.inf)
    leaf_T = torch.from_numpy(new).requires_grad_()
    loss_T, clipped_T = dppo_loss(
        leaf_T, torch.from_numpy(old), t["adv"], kind, 0.05, 0.1, clip_ratio_c
    )
    loss_T.sum().backward()
    close(loss_T.detach(), -weight * x["adv"] * ~outside)
    close(leaf_T.grad, -weight * x["adv"] * ~outside)
    close(clipped_T, outside)


LEVELS = {
    "token": lambda d, m: np.exp(d),
    "sequence": lambda d, m: np.full(len(d), np.exp(masked(np.sum, d, m))),
    "geometric": lambda d, m: np.full(len(d), np.exp(masked(np.mean, d, m))),
}
BOUNDS = {
    "truncate": lambda r: np.clip(r, 0.6, 1.9),
    "mask": lambda r: np.where((0.6 <= r) & (r <= 1.9), r, 0),
    "reject": lambda r: np.where((0.6 <= r) & (r <= 1.9), 1.0, 0),
}


@given(
    step(),
    st.sampled_from(sorted(LEVELS)),
    st.sampled_from(sorted(BOUNDS)),
    st.sampled_from([None, 0.3]),
)
def test_importance_weights(drawn, level, rollout_is, veto_threshold):
    lengths, t, x = drawn
    seqs = sequences(lengths, t["mask"])
    expected = []
    ratios = []
    log_ratios = parts(x["old"] - x["rollout"], lengths)
    for d, m in zip(log_ratios, parts(x["mask"], lengths), strict=True):
        ratios.append(LEVELS[level](d, m))
        vetoed = False
        if veto_threshold is not None:
            vetoed = (np.exp(d)[m == 1] < veto_threshold).any()
        bounded = BOUNDS[rollout_is](ratios[-1])
        expected.append(np.where((m == 1) & (not vetoed), bounded, 0.0))
    found = importance_weights(
        t["old"], t["rollout"], seqs, rollout_is, level, 0.6, 1.9, veto_threshold
    )
    close(found, np.concatenate(expected))
    kept = x["mask"] == 1
    w = np.concatenate(expected)
    r = np.concatenate(ratios)
    if not kept.any():
        return
    metrics = mismatch_metrics(t["old"], t["rollout"], seqs, found, rollout_is, level)
    token = np.exp(x["old"] - x["rollout"])[kept]
    close(metrics["tis"], r[kept].mean())
    close(metrics["mismatch_kl"], (x["rollout"] - x["old"])[kept].mean())
    if veto_threshold is None:
        close(metrics["tis_clipfrac"], ((r < 0.6) | (r > 1.9))[kept].mean())
    close(metrics["mismatch_k3"], (token - 1 - np.log(token)).mean())
    close(
        metrics["ess"],
        w[kept].sum() ** 2 / (kept.sum() * (w[kept] ** 2).sum()) if w[kept].any() else 0.0,
    )


class Graded:
    def __init__(self, group_id, reward):
        self.group_id = group_id
        self.reward = reward


@given(
    st.integers(1, 5), st.integers(1, 4), st.lists(st.booleans(), min_size=20, max_size=20)
)
def test_dynamic_sampling_ends_and_gives_a_full_step(wanted, attempts, solved):
    policy = DynamicSampling(wanted, attempts)
    number = 0
    while policy.missing:
        names = range(number, number + policy.missing)
        rollout = []
        for k in range(2):
            for n in names:
                rollout.append(Graded(f"p{n}", 1.0 if solved[n] else float(k)))
        policy.add(rollout)
        number += len(names)
    samples = policy.take()
    assert policy.tried <= attempts and len(samples) == 2 * wanted
    assert len({s.group_id for s in samples}) == wanted
    useful = [n for n in range(number) if not solved[n]]
    assert [s.group_id for s in samples[::2]][: len(useful)] == [
        f"p{n}" for n in useful[:wanted]
    ]
    assert policy.metrics()["dynamic/filled_groups"] == max(wanted - len(useful), 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_named(bad):
    fine, broken, seqs = torch.zeros(3), torch.tensor([0.0, bad, 0.0]), sequences([3])
    calls = [
        lambda: policy_loss(fine, broken, fine),
        lambda: sapo_loss(fine, broken, fine),
        lambda: gmpo_loss(fine, fine, broken, seqs),
        lambda: dppo_loss(broken, fine, fine),
        lambda: gspo_loss(broken, fine, fine, seqs),
        lambda: cispo_loss(fine, fine, broken),
        lambda: value_loss(fine, fine, broken),
        lambda: kl_estimate(fine, broken),
        lambda: importance_weights(fine, broken, seqs),
        lambda: gae(broken[None], fine[None], torch.ones(1, 3)),
        lambda: gae(fine[None], broken[None], torch.ones(1, 3)),
        lambda: whiten(broken, torch.ones(3)),
        lambda: rloo(broken, ["p"] * 3, 3),
    ]
    for call in calls:
        with pytest.raises(NumericsError):
            call()


def test_what_the_mask_leaves_out_may_be_anything():
    fine, mask = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1, 0, 1])
    odd = torch.tensor([0.1, float("nan"), 0.3])
    seqs = sequences([3], mask)
    calls = [
        lambda x: importance_weights(x, fine, seqs, level="sequence"),
        lambda x: whiten(x, mask),
        lambda x: gae(fine[None], x[None], mask[None])[0],
    ]
    for call in calls:
        assert call(odd).tolist() == call(fine).tolist()
    with pytest.raises(ConfigError):
        importance_weights(fine, fine, seqs, level="word")
