"""What an environment says has no part in the loss, whichever algorithm is chosen."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from text_samples import token_sample

from cookbook_npu.config import AlgorithmConfig
from cookbook_npu.data.messages import with_observation
from cookbook_npu.data.sample import Sample, Turn, check_sample
from cookbook_npu.errors import DataError
from cookbook_npu.rl.algorithms import ALGORITHMS
from cookbook_npu.rollout.engine import Request, RequestState, SamplingParams, make_sample
from cookbook_npu.train.batch import (
    complete_batch,
    compute_loss,
    loss_masks,
    make_batch,
    make_micro_batch,
    rollout_mismatch,
)
from cookbook_npu.train.critic import compute_value_loss

MASKS = ([1, 1, 0, 0, 1], [1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 0, 1, 1])
REWARDS = (1.0, 0.0, 0.25, 0.75)
VALUE_CLIP = 0.2


def episodes() -> list[Sample]:
    "Two groups of two; the third sample has no observation"
    samples = []
    for i, (mask, reward) in enumerate(zip(MASKS, REWARDS, strict=True)):
        more = {"loss_mask": mask, "logprobs": [-float(m) for m in mask], "reward": reward}
        more["scores"] = {"exact": (1.0, reward), "length": (0.5, -(reward**2))}  # for gdpo
        samples.append(token_sample(i, [1, 2], list(range(3, 3 + len(mask))), **more))
    return samples


def random_rows(seed: int, told: float) -> list[np.ndarray]:
    "A number below 0 for each token of the policy; `told` at each token of an observation"
    chance = np.random.default_rng(seed)
    rows = []
    for mask in MASKS:
        own = -0.2 - chance.random(len(mask))
        rows.append(np.where(np.array(mask) == 1, own, told).astype(np.float32))
    return rows


def one_step(algorithm: AlgorithmConfig, told: float):
    "Loss, metric sums and gradient of a step whose observation tokens have these log-probs"
    samples = episodes()
    batch = make_batch(samples, 2, algorithm, global_batch_size=4, max_tokens=8)
    batch.old_logprobs = random_rows(0, told)
    batch.rollout_logprobs = random_rows(1, told / 2)
    if algorithm.use_reference:
        batch.ref_logprobs = random_rows(2, told / 3)
    if algorithm.advantage_estimator == "gae":
        batch.values = random_rows(3, told)
    complete_batch(batch, samples, 2, algorithm, 8)
    mismatch = rollout_mismatch(batch, algorithm)
    micro = make_micro_batch(batch, range(4), torch.device("cpu"))
    logp_T = torch.from_numpy(np.concatenate(random_rows(4, 2 * told))).requires_grad_()
    entropy_T = torch.from_numpy(np.concatenate(random_rows(5, told))).abs()
    loss, sums = compute_loss(logp_T, entropy_T, micro, algorithm)
    (gradient_T,) = torch.autograd.grad(loss, logp_T)
    numbers = {"loss": loss.detach(), **mismatch, **sums}
    if batch.values:
        value_T = torch.from_numpy(np.concatenate(random_rows(6, told))).requires_grad_()
        loss, sums = compute_value_loss(value_T, batch, range(4), VALUE_CLIP)
        (of_values_T,) = torch.autograd.grad(loss, value_T)
        numbers |= {"critic": loss.detach(), **sums}
        gradient_T = torch.cat([gradient_T, of_values_T])
    return {name: float(value) for name, value in numbers.items()}, gradient_T


@pytest.mark.parametrize("name", ALGORITHMS)
def test_observations_have_no_part_in_the_loss(name):
    "Whatever their log-probs and values are: the same loss, metrics and gradient, and none of it theirs"
    common = {"use_reference": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01}
    algorithm = AlgorithmConfig(**{**common, **ALGORITHMS[name].overrides})
    numbers, gradient_T = one_step(algorithm, told=0.0)
    others, of_others_T = one_step(algorithm, told=-7.0)
    assert numbers == pytest.approx(others, abs=1e-6)
    torch.testing.assert_close(gradient_T, of_others_T, rtol=0, atol=1e-6)
    own_T = torch.tensor(sum(MASKS, []), dtype=torch.bool)
    for part_T in gradient_T.split(len(own_T)):
        assert not part_T[~own_T].any()
        assert part_T[own_T].any()


def test_the_mask_of_a_batch_is_that_of_its_samples():
    for mask_T, mask in zip(loss_masks(episodes(), AlgorithmConfig()), MASKS, strict=True):
        assert mask_T.tolist() == mask


def test_an_observation_is_marked_and_stays_so_when_the_policy_goes_on():
    "From the turn of the environment to the sample of the engine, which continues it"
    first = replace(episodes()[2], finish_reason="abort")  # four tokens of the policy
    told = with_observation(first, [7, 8, 9], version=3)
    assert told.loss_mask == [1, 1, 1, 1, 0, 0, 0]
    assert told.logprobs[4:] == [0.0, 0.0, 0.0]
    check_sample(told)
    request = Request(group_id="g1", index=0, prompt_ids=[1, 2], seed=0, partial=told)
    state = RequestState(request, SamplingParams(max_response_tokens=16), number=0)
    state.add(5, -0.5, 4)
    sample = make_sample(state)
    assert sample.loss_mask == [1, 1, 1, 1, 0, 0, 0, 1]
    assert [turn.role for turn in sample.turns] == ["policy", "observation", "policy"]
    check_sample(sample)


def test_an_observation_that_carries_loss_is_refused():
    sample = episodes()[2]
    sample.turns = [
        Turn(start=0, end=3, role="policy"),
        Turn(start=3, end=4, role="observation"),
    ]
    with pytest.raises(DataError, match="the observation of tokens 3 to 4 carries loss"):
        check_sample(sample)
