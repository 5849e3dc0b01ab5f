"""What the processes of test_upstream_megatron.py run, with checkouts on their PYTHONPATH."""

import importlib
import importlib.util
import os
import sys
import types
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


def mindspeed_grouped(folder: Path):
    "MindSpeed's module of grouped linears; what it imports from MindSpeed is empty"
    empty = {
        "mindspeed.args_utils": ("get_full_args",),
        "mindspeed.core.transformer.moe.grouped_gemm_util": ("Ops",),
    }
    for module, names in empty.items():
        found = sys.modules[module] = types.ModuleType(module)
        for name in names:
            setattr(found, name, type(name, (), {}))
    file = folder / "mindspeed" / "te" / "pytorch" / "module" / "grouped_linear.py"
    spec = importlib.util.spec_from_file_location("grouped_linear", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grouped(rank, world_size, folder):
    "Axes of real grouped linears over two expert-tensor-parallel ranks: as built, fixed, undone"
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer import TransformerConfig

    from cookbook_npu.npu.shims.bootstrap import model_ready

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(2, expert_tensor_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    module = mindspeed_grouped(Path(folder))
    kind = next(
        v
        for n, v in vars(module).items()
        if n in ("MindSpeedTEGroupedLinear", "TEGroupedLinear")
    )
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        add_bias_linear=False,
    )
    rest = dict(
        config=config,
        init_method=torch.nn.init.ones_,
        bias=False,
        skip_bias_add=False,
        is_expert=True,
    )
    model = torch.nn.ModuleList(
        [
            kind(2, *sizes, parallel_mode=m, **rest)
            for m, sizes in (("column", (4, 8)), ("row", (8, 4)))
        ]
    )
    shapes = [tuple(layer.weight0.shape) for layer in model]
    built = [layer.weight0.partition_dim for layer in model]
    states = {row["name"]: row["state"] for row in model_ready(model)}
    fixed = [layer.weight0.partition_dim for layer in model]
    registry.undo("megatron.grouped_partition")
    undone = [layer.weight0.partition_dim for layer in model]
    return {
        "shapes": shapes,
        "axes": (built, fixed, undone),
        "state": states["megatron.grouped_partition"],
    }
