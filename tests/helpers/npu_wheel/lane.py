"""Entering the lane in a fresh process: `load()` gives it the real torch_npu, `trainer()` bootstraps a
trainer on it.
"""

import inspect

# first: the bridge, built perhaps for another environment of this user, finds torch's libraries loaded
import torch

# isort: split
import npu_wheel_bridge
import torch.distributed as dist
import torch_npu

from cookbook_npu.npu.simulator import fused

FUSED = (
    "npu_rms_norm",
    "npu_swiglu",
    "npu_rotary_mul",
    "npu_apply_rotary_pos_emb",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
)
_npu = torch.library.Library("npu", "IMPL")


def load() -> None:
    "Put CPU kernels under torch_npu, the simulator's formulas under its fused operators, gloo under hccl"
    npu_wheel_bridge.install()
    for name in FUSED:
        # With autograd: the formulas are made of differentiable operators, and torch_npu's own backward
        # kernels need an NPU.
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            _npu.impl(name, known_arguments(getattr(fused, name)), key, allow_override=True)
    npu_wheel_bridge.add_process_group()
    dist.Backend._plugins["HCCL"] = dist.Backend._BackendPlugin(process_group, True)


def known_arguments(formula):
    "The formula under the operator's schema: arguments that it does not know must be at their defaults"
    known = inspect.signature(formula).parameters

    def kernel(*args, **kwargs):
        schema = getattr(torch.ops.npu, formula.__name__).default._schema.arguments
        given = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
        defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
        unknown = [
            name
            for name, value in given.items()
            if name not in known and value != defaults[name]
        ]
        if unknown:
            raise NotImplementedError(
                f"npu::{formula.__name__}: the simulator has no {', '.join(unknown)}"
            )
        return formula(**{name: value for name, value in given.items() if name in known})

    return kernel


def process_group(
    options: dist.distributed_c10d._DistributedBackendOptions, _: object
) -> dist.Backend:
    "What torch_npu's own creator is called with; the collectives are the simulator's"
    rank, size = options.group_rank, options.group_size

    def join(generation: int) -> dist.Backend:
        return dist.ProcessGroupGloo(
            dist.PrefixStore(f"fake_hccl_{generation}", options.store),
            rank,
            size,
            options.timeout,
        )

    return npu_wheel_bridge.ProcessGroupHCCL(
        join, rank, size, options.timeout.total_seconds(), 0
    )  # 0: no buffers to charge


def trainer() -> None:
    "A trainer process, as workers have it on a real NPU"
    from cookbook_npu.npu.shims.bootstrap import bootstrap

    load()
    bootstrap("trainer")
    assert not getattr(torch_npu, "__simulated__", False)
