"""A whole checkpoint of Megatron loads with weights_only everywhere, by allow-lists of what it contains."""

import pytest
import torch

from cookbook_npu.npu.shims.megatron_core import dist_checkpointing as checkpoints
from cookbook_npu.testing.ranks import run_ranks

# what the weights-only unpickler of PyTorch knows without a list
KNOWN = {
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "_codecs.encode",
    "torch.Size",
    "torch.device",
}


def strangers(names, allowed):
    dtypes = {
        f"torch.{name}"
        for name in dir(torch)
        if isinstance(getattr(torch, name), torch.dtype) or name.endswith("Storage")
    }
    return (
        set(names)
        - KNOWN
        - dtypes
        - {name.replace("numpy.core", "numpy._core") for name in allowed}
    )


@pytest.mark.slow
def test_a_whole_checkpoint_loads_by_the_allow_lists():
    seen, states = run_ranks(
        "checkpoint_jobs:whole_checkpoint", 1, bootstrap="trainer", timeout=300
    )[0]
    for name in ("megatron.safe_objects", "megatron.safe_metadata"):
        assert dict(states)[name] == "applied"
    expected = {
        "argparse.Namespace",
        "signal.Signals",
        "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    }
    assert expected <= set(seen["common"])
    resolved = {
        f"{c.__module__}.{c.__qualname__}" for c in checkpoints.allowed_classes()
    } | set(checkpoints.ALLOWED_CLASSES)
    assert strangers(seen["common"], resolved) == set()
    assert strangers(seen["objects"], resolved) == set()
    assert "numpy._core.multiarray._reconstruct" in seen["objects"]
    assert seen["metadata"]
    assert strangers(seen["metadata"], checkpoints.METADATA_CLASSES) == set()
