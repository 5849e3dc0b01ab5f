"""The same rollout gives the gradient of TRL's published loss (`GRPOTrainer._compute_loss`), within 1e-6."""

import ast
import inspect
import textwrap
import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from cookbook_npu.config import AlgorithmConfig
from cookbook_npu.rl.advantages import gdpo
from cookbook_npu.rl.algorithms import compute_advantages, compute_policy_loss
from cookbook_npu.rl.losses import kl_estimate, token_weights, weighted_sum
from cookbook_npu.rl.sequences import sequences

pytest.importorskip("trl", reason="trl is not installed: pip install -e '.[dev]'")

PROMPTS, GROUP, PROMPT, TOKENS, VOCAB = 3, 4, 2, 7, 11
BETA = 0.04


class Policy(torch.nn.Module):
    "A language model in three lines: the next token depends on the last one"

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB)

    def logprobs(self, ids, keep):
        "Log-probs of the last `keep` tokens of each row"
        logits = self.head(torch.tanh(self.embed(ids[:, :-1])))[:, -keep:]
        return logits.log_softmax(-1).gather(-1, ids[:, -keep:, None])[..., 0]


@pytest.fixture(scope="module")
def rollout():
    "Ragged responses, one observation, rewards (equal in one group), log-probs of three policies"
    g = torch.Generator().manual_seed(1)
    rows = PROMPTS * GROUP
    lengths = torch.randint(1, TOKENS + 1, (rows,), generator=g)
    written = (torch.arange(TOKENS) < lengths[:, None]).long()
    tool = torch.ones_like(written)
    tool[0, 1] = tool[5, 0] = 0
    prompts = torch.randint(VOCAB, (rows, PROMPT), generator=g)
    answers = torch.randint(VOCAB, (rows, TOKENS), generator=g) * written
    rewards = torch.randint(0, 2, (rows,), generator=g).float()
    rewards[:GROUP] = 1.0
    ids, old, ref = torch.cat([prompts, answers], 1), Policy(0), Policy(7)
    with torch.no_grad():
        # The old policy is near the one that is trained: some ratios are inside the clip, some outside.
        for p, q in zip(old.parameters(), Policy(0).parameters(), strict=True):
            p.copy_(q + 0.15 * torch.randn(p.shape, generator=g))
        ratio = (torch.randn(rows, TOKENS, generator=g) * 0.2).exp()
        logps = dict(
            old=old.logprobs(ids, TOKENS), ref=ref.logprobs(ids, TOKENS), engine_ratio=ratio
        )
    tensors = dict(
        written=written,
        tool=tool,
        prompts=prompts,
        answers=answers,
        rewards=rewards,
        ids=ids,
    )
    return SimpleNamespace(rows=rows, lengths=lengths.tolist(), **tensors, **logps)


def their_gradient(r, adv_B, loss_type, beta, level, correct, low, high, delta, unbiased):
    "One backward pass of TRL's loss with a stub for the trainer object"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.gmpo import GMPOTrainer
        from trl.trainer.grpo_trainer import GRPOTrainer

    policy = Policy(0).train()
    local = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda model, ids, mask, keep, **_: (
            model.logprobs(ids, keep),
            torch.zeros(len(ids), keep),
            None,
        ),
        args=SimpleNamespace(
            delta=delta,
            use_bias_correction_kl=unbiased,
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
        accelerator=local,
        _metrics={"train": defaultdict(list)},
        model=policy,
        loss_type=loss_type,
        beta=beta,
        importance_sampling_level=level,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm=correct,
        vllm_importance_sampling_correction=correct,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        current_gradient_accumulation_steps=1,
        max_completion_length=TOKENS,
        _entropy_bonus_enabled=False,
    )
    inputs = {
        "prompt_ids": r.prompts,
        "prompt_mask": torch.ones_like(r.prompts),
        "completion_ids": r.answers,
        "completion_mask": r.written,
        "tool_mask": r.tool,
        "advantages": adv_B,
        "old_per_token_logps": r.old,
        "ref_per_token_logps": r.ref,
        "importance_sampling_ratio": r.engine_ratio,
        "num_items_in_batch": (r.written * r.tool).sum().float(),
    }
    with_loss = GMPOTrainer if loss_type == "gmpo" else GRPOTrainer
    loss = with_loss._compute_loss(trainer, policy, inputs)
    loss.backward()
    return policy, loss.item()


def our_gradient(r, algorithm, beta, correct):
    "One backward pass of ours, on the response tokens alone, packed"
    policy, inside = Policy(0), r.written.bool()
    masks = [(r.written * r.tool)[i, :n].float() for i, n in enumerate(r.lengths)]
    ids = [f"p{i // GROUP}" for i in range(r.rows)]
    adv_T = torch.cat(compute_advantages(algorithm, r.rewards, ids, GROUP, masks))
    seqs = sequences(r.lengths, torch.cat(masks))
    logp_T = policy.logprobs(r.ids, TOKENS)[inside]
    loss_T, clipped_T = compute_policy_loss(algorithm, logp_T, r.old[inside], adv_T, seqs)
    if correct:
        loss_T = loss_T * r.engine_ratio[inside]
    kl_T = kl_estimate(
        logp_T,
        r.ref[inside],
        algorithm.kl_loss_type,
        r.old[inside] if algorithm.kl_loss_type == "k3_unbiased" else None,
    )
    loss = weighted_sum(
        loss_T + beta * kl_T,
        torch.cat(token_weights(masks, algorithm.loss_agg_mode, TOKENS, ids)),
    )
    loss.backward()
    return policy, loss.item(), clipped_T


CASES = {
    "grpo": ("grpo", dict(loss_agg_mode="seq-mean-token-mean"), {}),
    "grpo with KL": (
        "grpo",
        dict(loss_agg_mode="seq-mean-token-mean", kl_loss_type="k3"),
        dict(beta=BETA),
    ),
    "grpo with unbiased KL": ("grpo", dict(kl_loss_type="k3_unbiased"), dict(beta=BETA)),
    "dr_grpo": (
        "dr_grpo",
        dict(normalize_std=False, loss_agg_mode="seq-mean-token-sum-norm"),
        {},
    ),
    "dapo": ("dapo", dict(loss_agg_mode="token-mean"), {}),
    "bnpo": ("bnpo", dict(loss_agg_mode="token-mean"), {}),
    "gspo": (
        "grpo",
        dict(loss="gspo", clip_ratio_low=0.02, clip_ratio_high=0.03),
        dict(level="sequence", low=0.02, high=0.03),
    ),
    "cispo": (
        "cispo",
        dict(
            loss="cispo",
            clip_ratio_low=1.0,
            clip_ratio_high=0.28,
            loss_agg_mode="token-mean",
        ),
        dict(high=1.28),
    ),
    "gmpo": (
        "gmpo",
        dict(loss="gmpo", clip_ratio_low=0.1, clip_ratio_high=0.15),
        dict(low=0.1, high=0.15),
    ),
    "sapo": ("sapo", dict(loss="sapo"), {}),
    "sapo with KL": ("sapo", dict(loss="sapo", kl_loss_type="k3"), dict(beta=BETA)),
    "dual clip": (
        "dapo",
        dict(clip_ratio_c=1.3, loss_agg_mode="token-mean"),
        dict(delta=1.3),
    ),
    "rollout importance sampling": (
        "dapo",
        dict(loss_agg_mode="token-mean"),
        dict(correct=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_trl(rollout, name):
    loss_type, knobs, how = CASES[name]
    how = dict(beta=0.0, level="token", correct=False, low=0.2, high=0.28, delta=None) | how
    algorithm = AlgorithmConfig(**knobs)
    ids = [f"p{i // GROUP}" for i in range(rollout.rows)]
    rows = compute_advantages(
        algorithm, rollout.rewards, ids, GROUP, [torch.ones(1)] * rollout.rows
    )
    unbiased = algorithm.kl_loss_type == "k3_unbiased"
    theirs, their_loss = their_gradient(
        rollout, torch.cat(rows), loss_type, unbiased=unbiased, **how
    )
    ours, our_loss, clipped_T = our_gradient(
        rollout, algorithm, how["beta"], how["correct"]
    )
    assert abs(our_loss - their_loss) < 1e-6
    seen = clipped_T.sum()
    assert seen == 0 if algorithm.loss == "sapo" else 0 < seen < len(clipped_T), (
        "the comparison should see clipped and unclipped tokens"
    )
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert other.grad.abs().max() > 1e-3
        assert (mine.grad - other.grad).abs().max() < 1e-6
    # The step itself, too.
    for model in (ours, theirs):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(
        (a - b).abs().max() < 1e-6
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


def test_gdpo_equals_trl():
    "TRL computes these advantages inside a long method: its branch is run alone"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.trainer import grpo_trainer

    method = grpo_trainer.GRPOTrainer._generate_and_score_completions
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    condition = "self.multi_objective_aggregation == 'normalize_then_sum'"
    [branch] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == condition
    ]
    g = torch.Generator().manual_seed(5)
    rewards_BN = torch.rand(PROMPTS * GROUP, 3, generator=g) * torch.tensor([1.0, 9, 0.1])
    rewards_BN[:GROUP, 1] = 4.0  # equal in one group
    weights_N = torch.tensor([1.0, 0.5, -2.0])
    names = dict(
        torch=torch,
        nanstd=grpo_trainer.nanstd,
        self=SimpleNamespace(reward_funcs=[None] * 3, reward_weights=weights_N),
        rewards_per_func=rewards_BN,
        num_generations=GROUP,
        device="cpu",
        unscorable_mask=torch.zeros(len(rewards_BN), dtype=torch.bool),
    )
    exec(compile(ast.Module(branch.body, []), "trl", "exec"), names)
    ids = [f"p{i // GROUP}" for i in range(len(rewards_BN))]
    ours_B = gdpo(rewards_BN, weights_N.expand(len(ids), 3), ids, GROUP, eps=1e-4)
    assert names["advantages"].abs().max() > 1
    assert torch.allclose(ours_B, names["advantages"], atol=1e-5)
