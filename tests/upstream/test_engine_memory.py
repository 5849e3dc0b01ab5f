"""How large the key/value cache of a real vllm-ascend comes out while another process takes memory.

The functions are those of the released wheels of both runnable stacks: NPUWorker.determine_available_memory
of vllm-ascend, MemorySnapshot and memory_profiling of its vLLM. Only the numbers of the device are scripted.
"""

import ast
import sys
import types
from types import SimpleNamespace

import package_index
import pytest
import torch

from cookbook_npu.npu.shims import vllm_ascend as shims
from cookbook_npu.npu.shims.registry import registry
from cookbook_npu.npu.stack.stacks import KNOWN_STACKS, RUNNABLE_STACKS

GIB = 2**30
TOTAL = 61 * GIB
SHARE = 0.35
WEIGHTS = 4 * GIB
WORKER = "vllm_ascend/worker/worker.py"
MEMORY = "vllm/utils/mem_utils.py"


class Device:
    "An NPU whose free memory falls: what torch and the driver say of it"

    def __init__(self, taken: int):
        self.taken = taken  # by another process, while this one starts
        self.readings = 0
        self.device_type = "npu"

    def mem_get_info(self, device=None):
        "Free and total; the other process arrives after the first reading"
        self.readings += 1
        others = 1 * GIB if self.readings == 1 else 1 * GIB + self.taken + WEIGHTS
        return TOTAL - others, TOTAL

    def memory_stats(self, device=None):
        return {"allocated_bytes.all.peak": WEIGHTS if self.readings else 0}

    def memory_reserved(self, device=None):
        return WEIGHTS if self.readings > 1 else 0

    def current_device(self):
        return "cpu"

    def nothing(self, *args):
        return None

    is_cuda = is_integrated_gpu = empty_cache = reset_peak_memory_stats = nothing


def real_functions(stack: str, device: Device) -> tuple[type, types.ModuleType]:
    "NPUWorker with nothing but the method in question, and vLLM's module of memory questions"
    versions = KNOWN_STACKS[stack].versions
    fake = types.ModuleType("mem_utils")
    accelerator = SimpleNamespace(
        memory_stats=device.memory_stats,
        memory_reserved=device.memory_reserved,
        empty_cache=device.empty_cache,
        reset_peak_memory_stats=device.reset_peak_memory_stats,
    )
    fake_torch = SimpleNamespace(
        accelerator=accelerator,
        device=torch.device,
        types=torch.types,
        npu=SimpleNamespace(memory_stats=device.memory_stats),
    )
    tree = ast.parse(package_index.wheel_file("vllm", versions["vllm"], MEMORY))
    imports = (ast.Import, ast.ImportFrom)
    kept = [n for n in tree.body if not (isinstance(n, imports) and _of_vllm(n))]
    tree.body = kept
    sys.modules[fake.__name__] = fake  # where dataclasses look
    vars(fake).update(current_platform=device, GiB_bytes=GIB, MiB_bytes=2**20)
    exec(compile(tree, MEMORY, "exec"), vars(fake))
    fake.torch = fake_torch
    text = package_index.wheel_file("vllm-ascend", versions["vllm-ascend"], WORKER)
    worker = next(
        n
        for n in ast.parse(text).body
        if isinstance(n, ast.ClassDef) and n.name == "NPUWorker"
    )
    worker.bases = []
    method = "determine_available_memory"
    worker.body = [n for n in worker.body if getattr(n, "name", "") == method]
    assert len(worker.body) == 1, f"{stack} has no {method}"
    log = SimpleNamespace(info=device.nothing, debug=device.nothing)
    log.info_once = lambda *args, **kwargs: None
    names = dict(
        torch=SimpleNamespace(npu=fake_torch.npu, inference_mode=torch.inference_mode),
        memory_profiling=fake.memory_profiling,
        GiB_bytes=GIB,
        logger=log,
    )
    exec(compile(ast.Module([worker], []), WORKER, "exec"), names)
    return names["NPUWorker"], fake


def _of_vllm(node: ast.Import | ast.ImportFrom) -> bool:
    "An import of vLLM itself, which is not installed in this version"
    module = getattr(node, "module", None) or ""
    return module.startswith("vllm") or getattr(node, "level", 0) > 0


def cache(stack: str, given: int | None, taken: int, monkeypatch) -> int:
    "The cache that the release plans"
    device = Device(taken)
    worker_class, memory = real_functions(stack, device)
    module = SimpleNamespace(NPUWorker=worker_class)
    monkeypatch.setattr(shims, "_npu_worker_module", lambda: module)
    monkeypatch.setattr(shims, "installed", lambda package: True)
    worker = worker_class()
    worker.device = "cpu"
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=given)
    runs = []
    worker.model_runner = SimpleNamespace(
        model_memory_usage=WEIGHTS, profile_run=lambda: runs.append(True)
    )
    worker.init_snapshot = memory.MemorySnapshot()
    worker.requested_memory = SHARE * TOTAL
    state = registry.apply("vllm_ascend.kv_cache_bytes").state
    try:
        planned = worker.determine_available_memory()
    finally:
        registry.undo("vllm_ascend.kv_cache_bytes")
    assert state == ("applied" if "0.18" in stack else "not needed")
    assert runs == [True]  # the engine is warm in any case
    return planned


@pytest.fixture(scope="module", autouse=True)
def _index():
    reason = package_index.offline_reason()
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("stack", RUNNABLE_STACKS)
def test_a_decided_cache_does_not_depend_on_others(stack, monkeypatch):
    "Free memory falls by 15 GiB between the snapshots: what is given is what comes out"
    given = 15 * GIB + 7
    for taken in (0, 15 * GIB):
        assert cache(stack, given, taken, monkeypatch) == given


@pytest.mark.parametrize("stack", RUNNABLE_STACKS)
def test_a_measured_cache_is_charged_what_others_take(stack, monkeypatch):
    "Why it is decided: the same launch beside a trainer that loads"
    alone, beside = (cache(stack, None, taken, monkeypatch) for taken in (0, 15 * GIB))
    assert alone - beside == 15 * GIB
    assert 0 < beside < alone < SHARE * TOTAL
