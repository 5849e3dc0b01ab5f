"""What the ranks of test_process_groups.py run."""

from datetime import timedelta

import shims_targets
import torch
import torch.distributed as dist
from simulator_jobs import collectives, run_checks

from cookbook_npu.shims import process_groups


def cycle():
    names = process_groups.destroy()
    assert names and all(process_groups.state(group) == "destroyed" for group in process_groups.device_groups())
    return process_groups.reload()


def train(rank, world_size, tensor, cycles):
    """As `shims_targets.train`, with a sleep of the process groups after every optimizer step."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    slept = []
    step = ChainedOptimizer.step

    def step_then_sleep(self):
        result = step(self)
        slept.append(cycle())
        return result

    if cycles:
        ChainedOptimizer.step = step_then_sleep
    history, _ = shims_targets.train(rank, world_size, tensor=tensor, sequence=tensor > 1)
    return history, len(slept), sorted({len(names) for names in slept})


def everything(rank, world_size):
    """Every check of the simulator's collectives, on groups that were destroyed and reloaded."""
    from cookbook_npu.shims import registry

    assert registry.apply("torch.process_groups").state == "applied"
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1, device="npu"))
    cycle()
    results = run_checks([getattr(collectives, name) for name in dir(collectives) if name.startswith("check_")])
    cycle()
    dist.destroy_process_group()
    return results
