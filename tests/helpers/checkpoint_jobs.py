"""What the ranks of test_checkpoints.py run."""

import argparse
import io
import pickle
import random
import signal
import tempfile
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist

from cookbook_npu.npu.shims.megatron_core import built_model as checkpoints
from cookbook_npu.npu.shims.registry import registry

SAFE = ("megatron.safe_globals", "megatron.safe_objects", "megatron.safe_metadata")


class Names(pickle.Unpickler):
    """Reads a pickle of `torch.save` and notes which classes it names."""

    def __init__(self, data):
        super().__init__(io.BytesIO(data))
        self.seen = set()

    def find_class(self, module, name):
        self.seen.add(f"{module}.{name}")
        return super().find_class(module, name)

    def persistent_load(self, key):
        return torch.storage.TypedStorage(dtype=torch.uint8)


def names_in(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        reader = Names(
            archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))
        )
    try:
        reader.load()
    except (AttributeError, RuntimeError):
        pass  # tensors without their storages cannot be rebuilt; their classes are noted by then
    return reader.seen


def random_states():
    import numpy as np
    from megatron.core import tensor_parallel

    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def arguments():
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    return argparse.Namespace(
        params_dtype=torch.bfloat16,
        attention_backend=AttnBackend.auto,
        model_type=ModelType.encoder_or_decoder,
        exit_signal=signal.SIGTERM,
        save=Path("/runs"),
    )


def whole_checkpoint(rank, world_size):
    """Train one step, save all that Megatron's own training saves, load it; which classes the files name."""
    import shims_targets
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    shims_targets.init(1)
    config = shims_targets._config(1, False, False, torch.float32, 0.0, False)
    model = shims_targets._model(config, "transformer_engine")
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=0.0,
        use_distributed_optimizer=True,
        params_dtype=torch.float32,
    )
    optimizer = get_megatron_optimizer(settings, [ddp])
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, 1e-2, 0.0, 1, 10, "cosine", 0.0, 0.0, 0, "constant"
    )
    for parameter in ddp.parameters():
        parameter.main_grad.fill_(0.01)
    optimizer.step()
    scheduler.step(1)

    def state():
        model_state = ddp.sharded_state_dict()
        return {
            "model": model_state,
            "optimizer": optimizer.sharded_state_dict(
                model_state, metadata={"distrib_optim_sharding_type": "fully_reshardable"}
            ),
            "rng_state": ShardedObject(
                "rng_state", random_states(), (1,), (0,), replica_id=0
            ),
        }

    folder = Path(tempfile.mkdtemp())
    common = {
        "args": arguments(),
        "config": settings,
        "iteration": 3,
        "opt_param_scheduler": scheduler.state_dict(),
    }
    dist_checkpointing.save({**state(), **common}, folder)
    seen = {
        "common": names_in((folder / "common.pt").read_bytes()),
        "metadata": set(),
        "objects": set(),
    }
    note(seen)
    loaded = dist_checkpointing.load(state(), folder)
    assert loaded["iteration"] == 3
    assert loaded["args"].exit_signal == signal.SIGTERM
    assert loaded["config"].lr == 1e-2
    assert torch.equal(loaded["rng_state"]["torch_rng_state"], torch.get_rng_state())
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    dist.destroy_process_group()
    return {kind: sorted(names) for kind, names in seen.items()}, [
        (n, registry[n].state.state) for n in SAFE
    ]


def note(seen):
    """Note which classes the safe readers meet."""
    from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner

    find_class = checkpoints.MetadataUnpickler.find_class
    load_bytes = MCoreLoadPlanner.load_bytes

    def noting_class(self, module, name):
        seen["metadata"].add(f"{module}.{name}")
        return find_class(self, module, name)

    def noting_bytes(self, item, value):
        seen["objects"] |= names_in(
            value.getvalue() if hasattr(value, "getvalue") else value.read()
        )
        value.seek(0)
        return load_bytes(self, item, value)

    checkpoints.MetadataUnpickler.find_class = noting_class
    MCoreLoadPlanner.load_bytes = noting_bytes
