"""What tests/unit/test_rl_ranks.py compares: functions on one process, and on several in a group."""

import torch
import torch.distributed as dist

from cookbook_npu.rl.loss_aggregation import LOSS_AGG_MODES, token_weights, weighted_sum
from cookbook_npu.rl.losses import gspo_loss
from cookbook_npu.rl.sequences import sequences

LENGTHS, IDS = [5, 1, 8, 3, 2, 6], ["a", "b", "a", "b", "c", "c"]
# Micro-batches of each rank, for each number of ranks; two of four have nothing to do in their second one.
SPLITS = {
    1: [[range(6)]],
    2: [[[0, 3], [5]], [[1], [2, 4]]],
    4: [[[0], [1]], [[2], [3]], [[4], []], [[5], []]],
}


def data():
    "The same step on every rank: features, masks, advantages, old log-probs, in float64"
    g = torch.Generator().manual_seed(3)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    x = [rand(n, 4) for n in LENGTHS]
    masks = [(torch.arange(n) % 3 != 1).double() for n in LENGTHS]
    return (
        x,
        masks,
        rand(len(LENGTHS)),
        [0.3 * rand(n) - 1 for n in LENGTHS],
    )


def policy(x, theta):
    return torch.nn.functional.logsigmoid(x @ theta)


def add_up(value, group):
    if group is not None:
        dist.all_reduce(value, group=group)
    return value.tolist()


def data_parallel(rank, world_size, group):
    "Gradient of the whole step with each loss aggregation, summed over micro-batches and ranks"
    x, masks, adv_B, old = data()
    found = {}
    for loss_agg_mode in LOSS_AGG_MODES:
        weights = token_weights(masks, loss_agg_mode, 8, IDS)
        theta = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
        for rows in SPLITS[world_size][rank]:
            if not rows:
                continue

            def cat(parts, rows=rows):
                return torch.cat([parts[i] for i in rows])

            seqs = sequences([LENGTHS[i] for i in rows], cat(masks))
            loss_T, _ = gspo_loss(
                policy(cat(x), theta),
                cat(old),
                seqs.expand_to_tokens(adv_B[list(rows)]),
                seqs,
                0.2,
                0.28,
            )
            weighted_sum(loss_T, cat(weights)).backward()
        grad = theta.grad if theta.grad is not None else torch.zeros_like(theta)
        found[loss_agg_mode] = add_up(grad, group)
    return found


def gradients(rank, world_size):
    "`data_parallel` on several ranks"
    dist.init_process_group("gloo")
    return data_parallel(rank, world_size, dist.group.WORLD)
