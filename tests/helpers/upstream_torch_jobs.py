"""What the ranks of test_upstream_torch.py run: code of the real projects, read from their checkouts."""

import importlib.util
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from proof import SIMULATED_CUDA
from ranks import import_target

from cookbook_npu.npu.device import free_port
from cookbook_npu.npu.shims.registry import registry


def bootstrap_core():
    """The device, its shims, a stub for TE, Megatron; only the checkpoint records after it."""
    import_target(SIMULATED_CUDA)()
    from cookbook_npu.npu.shims.transformer_engine import package as transformer_engine

    assert (
        transformer_engine and registry.apply("transformer_engine.stub").state != "refused"
    )
    import megatron.core  # noqa: F401


def load(path):
    spec = importlib.util.spec_from_file_location("foreign", path)
    module = sys.modules["foreign"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def slime_private_group(rank, world_size, checkout):
    from cookbook_npu.npu.shims.torch import distributed

    assert registry.apply(distributed.NewGroupShim.name).state == "applied"
    foreign = load(f"{checkout}/slime/utils/distributed_utils.py")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    ports = [free_port()]
    dist.broadcast_object_list(ports)
    group = foreign.init_process_group(
        backend="nccl",
        init_method=f"tcp://127.0.0.1:{ports[0]}",
        timeout=timedelta(seconds=60),
        world_size=world_size,
        rank=rank,
        group_name="actor_critic",
    )
    one = torch.ones(1, device="cuda")
    group.allreduce([one]).wait()
    return one.item(), dist.get_backend(group)


def slime_fingerprints(rank, world_size, checkout):
    source = open(f"{checkout}/slime/utils/tensor_backper.py").read()
    names = {"torch": torch}
    exec(source[source.index("def _compute_hash_tensor") :], names)
    a = torch.full((4, 4), 1.5, device="cuda")
    same = names["_compute_hash_tensor"](a) == names["_compute_hash_tensor"](a.clone())
    a[0, 0] = 2.5
    return same, names["_compute_hash_tensor"](a) != names["_compute_hash_tensor"](
        torch.full((4, 4), 1.5, device="cuda")
    )


def slime_clear_memory(rank, world_size, checkout):
    foreign = load(f"{checkout}/slime/utils/memory_utils.py")
    torch.empty(8 << 20, dtype=torch.uint8).pin_memory("cuda")
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    foreign.clear_memory(clear_host_memory=True)
    return before, torch.cuda.host_memory_stats()["allocated_bytes.current"]


def checkpoint_records(rank, world_size):
    """Probe, apply, verify and undo the shims of checkpoints."""
    import megatron.core
    from checkpoint_jobs import SAFE

    states = {name: registry.apply(name) for name in SAFE}
    first = {name: (state.state, state.detail) for name, state in states.items()}
    verified = all(registry[name].verify() for name in SAFE)
    undone = {name: registry.undo(name).state for name in reversed(SAFE)}
    return megatron.core.__file__, first, verified, undone
