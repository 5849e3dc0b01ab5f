"""A whole checkpoint of Megatron loads with weights_only everywhere, by allow-lists of what it contains."""

import os

import pytest
import torch
from places import FIXTURES, HELPERS, ROOT
from ranks import run_ranks

from cookbook_npu.config import TinyConfig
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.model.tiny import build_tiny
from cookbook_npu.npu.shims.megatron_core import built_model as checkpoints

pytestmark = pytest.mark.lane("devices")

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


def test_norms_of_mindspeed_have_the_type_of_the_model(tmp_path):
    """MindSpeed makes them in float32. In a bfloat16 model Megatron's distributed optimizer then takes the
    state of one parameter for that of another, and no checkpoint can be saved
    """
    path = str(build_tiny(TinyConfig(), build_tokenizer(), str(tmp_path / "model"), 0))
    paths = os.pathsep.join(map(str, (FIXTURES / "mindspeed_sketch", ROOT, HELPERS)))
    kwargs = dict(hf_path=path, dtype="bfloat16", steps=1)
    found = run_ranks(
        "real_stack.jobs:train",
        1,
        kwargs,
        env={"PYTHONPATH": paths},
        bootstrap="trainer",
        timeout=300,
    )[0]
    assert found["adaptor"] == "mindspeed" and found["types"] == ["torch.bfloat16"]
