"""What the processes of test_upstream_megatron.py run, with checkouts on their PYTHONPATH."""

import importlib
import importlib.util
import sys
from pathlib import Path

import torch

from cookbook_npu.npu.shims.registry import registry

DECORATED = (  # modules with decorated functions that `import megatron.core` may not import
    "fusions.fused_bias_dropout",
    "fusions.fused_bias_swiglu",
    "fusions.fused_cross_entropy",
    "ssm.gated_delta_net",
    "transformer.moe.experts",
    "transformer.moe.router",
    "transformer.torch_norm",
)


def held_compiled() -> int:
    "Compiled functions that Megatron's modules, classes and closures hold"
    from cookbook_npu.npu.shims.megatron_core.imports import held_values, is_compiled

    return sum(is_compiled(value) for _, _, value in held_values("megatron"))


def fuser(rank, world_size):
    """Megatron imported before anybody replaced torch.compile: what is compiled before the shim, with it
    and without it
    """
    from cookbook_npu.npu.shims.megatron_core import imports as megatron
    from cookbook_npu.npu.shims.transformer_engine import package as transformer_engine

    registry.undo("torch.compile")
    registry.apply(transformer_engine.TeShim.name)
    core = Path(importlib.import_module("megatron.core").__file__).parent
    for name in DECORATED:
        if core.joinpath(*name.split(".")).with_suffix(".py").is_file():
            importlib.import_module(f"megatron.core.{name}")
    answer = {
        "before": held_compiled(),
        "state": registry.apply(megatron.FuserShim.name).state,
        "with": held_compiled(),
    }
    swiglu = importlib.import_module("megatron.core.fusions.fused_bias_swiglu").swiglu
    answer["shape"] = tuple(swiglu(torch.ones(2, 8, device="npu")).shape)
    answer["closures"] = sys.modules[
        "megatron.core.transformer.moe.experts"
    ].jit_fuser.__name__
    registry.undo(megatron.FuserShim.name)
    return answer | {
        "needed_again": registry[megatron.FuserShim.name].needed()[0],
        "without": held_compiled(),
    }
