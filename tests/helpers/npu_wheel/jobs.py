"""What runs in the lane's processes. Each function is one process: starting one costs seconds."""

import contextlib
import ctypes
import importlib
import io
import os
import pkgutil
import re
import sys
import types
import warnings
from unittest import mock

import torch
import torch.distributed as dist
import torch_npu

MIB = 1 << 20


def raised(function, *kinds):
    "(name of the exception, its text), or nothing"
    try:
        function()
    except kinds as error:
        return type(error).__name__, str(error)
    return None


# ---- the fake CANN


def stubs(rank, world_size, names, library):
    "Call each generated stub: {name: (answer, what aclGetRecentErrMsg says)}"
    cann = ctypes.CDLL(library)
    cann.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return {
        name: (getattr(cann, name)(), cann.aclGetRecentErrMsg().decode()) for name in names
    }


def compute_without_a_kernel(rank, world_size):
    x = torch.ones(2, 4, device="npu")
    return raised(lambda: torch_npu.npu_geglu(x), RuntimeError), raised(
        lambda: torch_npu.npu_silu(x), RuntimeError
    )


def own_collective(rank, world_size):
    "The process group of torch_npu itself, which lane.load() replaces"
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    group = torch_npu._C._distributed_c10d.ProcessGroupHCCL(dist.HashStore(), 0, 1, options)
    return raised(
        lambda: group.allreduce([torch.ones(1, device="npu")]).wait(), RuntimeError
    )


# ---- the runtime


def out_of_memory(rank, world_size):
    torch.npu.set_device(
        0
    )  # before its first use a process has no context, and mem_get_info raises
    free = torch.npu.mem_get_info()
    x = torch.empty(48 * MIB, dtype=torch.uint8, device="npu")
    held = torch.npu.mem_get_info()
    error = raised(
        lambda: torch.empty(32 * MIB, dtype=torch.uint8, device="npu"),
        torch.OutOfMemoryError,
    )
    del x
    cached = torch.npu.mem_get_info()
    torch.npu.empty_cache()
    return {
        "before": free,
        "held": held,
        "cached": cached,
        "emptied": torch.npu.mem_get_info(),
        "error": error,
    }


def host_memory(rank, world_size):
    x = torch.ones(4 * MIB, dtype=torch.uint8).pin_memory()
    pinned = x.is_pinned()
    del x
    kept = torch.npu.host_memory_stats()["allocated_bytes.current"]
    torch.npu.host_empty_cache()
    return pinned, kept, torch.npu.host_memory_stats()["allocated_bytes.current"]


def accelerator(rank, world_size):
    "What cookbook_npu.npu.device makes of this process"
    from cookbook_npu.npu.device import accelerator, probe

    found = accelerator()
    x = torch.ones(MIB, device=found.device(0))
    held, peak = found.memory_allocated(), found.max_memory_allocated()
    del x
    found.empty_cache(), found.synchronize(), found.reset_peak(), found.seed(3)
    after = found.memory_allocated(), found.max_memory_allocated()
    names = [p.state for p in probe()]
    return dict(
        name=found.name,
        count=found.count,
        simulated=found.simulated,
        held=held,
        peak=peak,
        after=after,
        states=names,
    )


def operators(rank, world_size, left_out):
    "The simulator's checks of operators, except those that may end the process"
    from simulator_jobs import names, operators, run_checks

    return run_checks(
        [
            getattr(operators, name)
            for name in names(vars(operators))
            if name not in left_out
        ]
    )


def facts(rank, world_size):
    "What the project says about torch_npu"
    torch.ones(1, device="npu")  # before its first use memory_stats() is empty
    names = """OutOfMemoryError reset_max_memory_reserved set_capacity host_empty_cache ipc_collect
    memory_snapshot""".split()
    return {
        "names": {name: hasattr(torch.npu, name) for name in names},
        "capability": torch.npu.get_device_capability(),
        "memory_stats": sorted(torch.npu.memory_stats()),
        "rng_bytes": torch.npu.get_rng_state().numel(),
        "properties": sorted(
            n for n in dir(torch.npu.get_device_properties(0)) if not n.startswith("_")
        ),
        "types": torch.ones(1, device="npu").type(),
        "batch_isend_irecv": dist.batch_isend_irecv.__module__,
        "name": torch.npu.get_device_name(),
        "task_queue": os.environ["TASK_QUEUE_ENABLE"],
    }


def names(rank, world_size, wanted):
    "Those of the dotted names that do not lead anywhere"
    return [
        name
        for name in wanted
        if raised(lambda name=name: pkgutil.resolve_name(name), AttributeError, ImportError)
    ]


# ---- the redirection


def snapshot():
    "Every attribute of torch's modules and classes"
    found = {}
    for name, module in list(sys.modules.items()):
        if (name == "torch" or name.startswith("torch.")) and isinstance(
            module, types.ModuleType
        ):
            for key, value in list(vars(module).items()):
                found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    found.update(
                        {f"{name}.{key}.{k}": v for k, v in list(vars(value).items())}
                    )
    return found


def redirection_without_shims(rank, world_size):
    "The bare transfer_to_npu"
    rules = list(warnings.filters)
    with contextlib.redirect_stderr(io.StringIO()):
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
    dist.init_process_group("nccl")
    x = torch.ones(2, device="cuda")
    return {
        "backend": dist.get_backend(),
        "device": x.device.type,
        "type": x.type(),
        "capability": torch.cuda.get_device_capability(),
        "broadcast": raised(lambda: dist.broadcast(x, 0), TypeError),
        "double": torch.cuda.DoubleTensor is torch.npu.FloatTensor,
        "scripts": torch.jit.script(raised) is raised,
        "warns_once": [
            rule[0]
            for rule in warnings.filters
            if rule not in rules and rule[1:4] == (None, Warning, None)
        ],
    }


def undo(rank, world_size):
    "Apply the redirection shim and take it back: what stays changed"
    for name in (
        "_inductor.compile_fx",
        "_inductor.autotune_process",
        "utils.cpp_extension",
        "distributed.pipelining",
        "onnx.symbolic_helper",
    ):
        importlib.import_module(f"torch.{name}")
    from cookbook_npu.npu.shims.registry import registry
    from cookbook_npu.npu.shims.torch import device_api as _  # noqa: F401 registers the records

    torch.ones(1, device="npu")
    before = snapshot()
    state = registry.apply("torch.cuda_to_npu").state
    redirected = torch.empty(0, device="cuda").device.type
    registry.undo("torch.cuda_to_npu")
    after = snapshot()
    left = {
        name for name, value in before.items() if name in after and after[name] is not value
    }
    left = sorted(
        name
        for name in left
        if not re.search(
            r"^torch\.npu\.|\.__(name|package|loader|spec|file|cached|doc)__$", name
        )
    )
    cuda = raised(lambda: torch.empty(0, device="cuda"), AssertionError)
    return {"state": state, "redirected": redirected, "left": left, "cuda": cuda}


# ---- shims


def report(rank, world_size):
    "The table of a trainer, and again after each shim that is easily undone was undone and applied"
    from cookbook_npu.npu.shims.registry import registry

    first = registry.report()
    again = {}
    for name in ("torch.tensor_type_names", "torch.device_capability", "torch.compile"):
        shim = registry[name]
        undone = registry.undo(name).state, shim.verify()
        again[name] = (*undone, registry.apply(name).state, shim.verify())
    return first, again


def broadcast_with_shims(rank, world_size):
    dist.init_process_group("nccl")
    x = torch.full((2,), float(rank), device="cuda")
    dist.broadcast(x, world_size - 1)
    return x.tolist(), x.type()


# ---- Megatron


def checkpointed(rank, world_size, folder):
    "Train, save with dist_checkpointing, change every weight, load, and compare"
    import shims_targets
    from megatron.core import dist_checkpointing

    models, make = [], shims_targets._model
    with mock.patch.object(
        shims_targets, "_model", lambda *args: models.append(make(*args)) or models[-1]
    ):
        history, _ = shims_targets.train(
            rank, world_size, tensor=2, layers="local", sequence=True
        )
    (model,) = models
    kept = {name: p.detach().cpu() for name, p in model.named_parameters()}
    dist_checkpointing.save({"model": model.sharded_state_dict()}, folder)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.load_state_dict(
        dist_checkpointing.load({"model": model.sharded_state_dict()}, folder)["model"]
    )
    return history, [
        name
        for name, p in model.named_parameters()
        if not torch.equal(p.detach().cpu(), kept[name])
    ]


def first_question(rank, world_size):
    "A process asks for memory before it has used a device: torch_npu, then our accelerator"
    from cookbook_npu.npu.device import NPU, Accelerator

    error = raised(lambda: torch.npu.mem_get_info(0), RuntimeError)
    acc = Accelerator(NPU, torch.npu.device_count(), False)
    return error, acc.mem_get_info(0), torch.npu.current_device()
