"""PPO: GAE of ragged rows against the sum it stands for, and one step against a flat page of PyTorch."""

import copy

import numpy as np
import pytest
import torch
from text_samples import token_sample

from cookbook_npu.config import AlgorithmConfig
from cookbook_npu.rl.algorithms import ALGORITHMS, compute_gae
from cookbook_npu.train.batch import (
    complete_batch,
    compute_loss,
    make_batch,
    make_micro_batch,
)
from cookbook_npu.train.critic import compute_value_loss

LENGTHS = (5, 1, 3, 4)
VALUE_CLIP = 0.2
WORDS = 11


def reference_gae(rewards, values, lam):
    "Each advantage as the whole sum over what comes after it (arXiv 1506.02438, eq. 16)"
    n = len(rewards)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + following[t] - values[t] for t in range(n)]
    advantages = []
    for t in range(n):
        terms = [lam ** (k - t) * deltas[k] for k in range(t, n)]
        advantages.append(sum(terms))
    return advantages


@pytest.mark.parametrize("lam", [1.0, 0.9, 0.0])
def test_gae_of_ragged_rows_is_its_sum(lam):
    "The second row has an observation inside: time passes at the policy's tokens only"
    generator = torch.Generator().manual_seed(0)
    masks = [torch.ones(5), torch.tensor([1.0, 0.0, 1.0]), torch.ones(1)]
    values = [torch.rand(len(m), generator=generator) for m in masks]
    kl = [torch.rand(len(m), generator=generator) for m in masks]
    rewards_B = torch.tensor([1.0, 0.25, 0.0])
    config = AlgorithmConfig(advantage_estimator="gae", gae_lambda=lam, kl_in_reward=0.1)
    found, returns = compute_gae(config, rewards_B, masks, values, kl)
    for row, mask_T in enumerate(masks):
        policy = mask_T != 0
        value_T = values[row][policy].double()
        reward_T = -0.1 * kl[row][policy].double()
        reward_T[-1] += rewards_B[row]
        want = reference_gae(reward_T.tolist(), value_T.tolist(), lam)
        want_T = torch.tensor(want, dtype=torch.float64)
        torch.testing.assert_close(found[row][policy].double(), want_T, rtol=0, atol=1e-6)
        want_T = want_T + value_T
        torch.testing.assert_close(returns[row][policy].double(), want_T, rtol=0, atol=1e-6)
        assert not found[row][~policy].any() and not returns[row][~policy].any()


class TinyActorCritic(torch.nn.Module):
    "Log-probs and values from the token before"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(WORDS, 6)
        self.policy = torch.nn.Linear(6, WORDS)
        self.value = torch.nn.Linear(6, 1)
        self.double()

    def forward(self, samples):
        "(logp_T, entropy_T, value_T) of the response tokens, one sample after another"
        before, targets = [], []
        for sample in samples:
            before += [sample.prompt_ids[-1], *sample.response_ids[:-1]]
            targets += sample.response_ids
        hidden_TH = self.words(torch.tensor(before)).tanh()
        logp_TV = self.policy(hidden_TH).log_softmax(-1)
        logp_T = logp_TV.gather(1, torch.tensor(targets)[:, None])[:, 0]
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        return logp_T, entropy_T, self.value(hidden_TH)[:, 0]


def graded():
    "Samples of two groups, with different rewards"
    chance = np.random.default_rng(0)
    samples = []
    for i, length in enumerate(LENGTHS):
        response = chance.integers(3, WORDS, length).tolist()
        samples.append(token_sample(i, [1, 2], response, reward=float(chance.random())))
    return samples


def rows_of(value_T):
    "Values of all tokens as float32 rows"
    flat = value_T.detach().float()
    return [row.numpy() for row in flat.split(list(LENGTHS))]


def flat_page(model, samples, old, ref, values, a):
    "PPO on one page: GAE backwards, whitening, two clipped losses, all in float64"
    advantages, returns = [], []
    for sample, old_T, ref_T, value_T in zip(samples, old, ref, values, strict=True):
        n = len(sample.response_ids)
        rewards = [-a.kl_in_reward * float(old_T[t] - ref_T[t]) for t in range(n)]
        rewards[-1] += sample.reward
        running = following = 0.0
        backwards = []
        for t in reversed(range(n)):
            delta = rewards[t] + following - float(value_T[t])
            running = delta + a.gae_lambda * running
            following = float(value_T[t])
            backwards.append(running)
        advantages += backwards[::-1]
        returns += [x + float(v) for x, v in zip(backwards[::-1], value_T, strict=True)]
    adv_T = torch.tensor(advantages, dtype=torch.float64)
    adv_T = (adv_T - adv_T.mean()) / (adv_T.var() + 1e-8).sqrt()
    return_T = torch.tensor(returns, dtype=torch.float64)
    old_T = torch.from_numpy(np.concatenate(old)).double()
    old_value_T = torch.from_numpy(np.concatenate(values)).double()
    logp_T, entropy_T, value_T = model(samples)
    ratio_T = (logp_T - old_T).exp()
    limited_T = ratio_T.clamp(1 - a.clip_ratio_low, 1 + a.clip_ratio_high)
    policy_loss = -torch.minimum(ratio_T * adv_T, limited_T * adv_T).mean()
    policy_loss = policy_loss - a.entropy_coef * entropy_T.mean()
    moved_T = (value_T - old_value_T).clamp(-VALUE_CLIP, VALUE_CLIP)
    errors = ((value_T - return_T) ** 2, (old_value_T + moved_T - return_T) ** 2)
    return policy_loss, torch.maximum(*errors).mean()


def our_step(model, samples, old, ref, values, a):
    "The same from the parts of a run, in two micro-batches"
    batch = make_batch(samples, 2, a, global_batch_size=4, max_tokens=8)
    batch.old_logprobs, batch.ref_logprobs, batch.values = old, ref, values
    complete_batch(batch, samples, 2, a, 8)
    losses = [torch.zeros(()), torch.zeros(())]
    clipped = [0.0, 0.0]
    for rows in ([0, 3], [1, 2]):
        logp_T, entropy_T, value_T = model([samples[i] for i in rows])
        micro = make_micro_batch(batch, rows, torch.device("cpu"))
        loss, metrics = compute_loss(logp_T, entropy_T, micro, a)
        losses[0] = losses[0] + loss
        clipped[0] += float(metrics["pg_clipfrac"])
        loss, metrics = compute_value_loss(value_T, batch, rows, VALUE_CLIP)
        losses[1] = losses[1] + loss
        clipped[1] += float(metrics["clip_fraction"])
    assert min(clipped) > 0, (
        "the clips are not reached: the comparison would say nothing of them"
    )
    return losses


def gradients(model, loss):
    "The gradient of every parameter, in one vector"
    found = torch.autograd.grad(
        loss, list(model.parameters()), allow_unused=True, retain_graph=True
    )
    flat = []
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        flat.append(
            (torch.zeros_like(parameter) if gradient is None else gradient).flatten()
        )
    return torch.cat(flat)


def test_one_step_of_ppo_equals_a_flat_page():
    "Losses and gradients of policy and critic, away from the weights that sampled"
    a = AlgorithmConfig(
        **ALGORITHMS["ppo"].overrides, gae_lambda=0.9, kl_in_reward=0.05, entropy_coef=0.01
    )
    samples = graded()
    model = TinyActorCritic()
    logp_T, _, value_T = model(samples)
    old, values = rows_of(logp_T), rows_of(value_T)
    ref = rows_of(logp_T - 0.3 * torch.rand(len(logp_T)))
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, dtype=parameter.dtype)
        moved.value.bias += 1.0  # towards the returns, further than the clip
    wanted = flat_page(moved, samples, old, ref, values, a)
    found = our_step(moved, samples, old, ref, values, a)
    for ours, flat in zip(found, wanted, strict=True):
        assert abs(float(ours) / float(flat) - 1) < 1e-6
        flat_gradient = gradients(moved, flat)
        difference = gradients(moved, ours) - flat_gradient
        assert difference.norm() < 1e-6 * flat_gradient.norm()
