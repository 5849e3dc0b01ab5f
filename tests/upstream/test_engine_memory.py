"""How large the key/value cache of a real vllm-ascend comes out while another process takes memory.

The functions are those of the wheels of every runnable stack: NPUWorker.determine_available_memory of
vllm-ascend, MemorySnapshot and memory_profiling of its vLLM. Only the numbers of the device are scripted.
"""

import ast
import gc
import sys
import types
from types import SimpleNamespace

import package_index
import pytest
import torch

from cookbook_npu.npu.shims import vllm_ascend as shims
from cookbook_npu.npu.shims.registry import registry
from cookbook_npu.npu.stack.stacks import KNOWN_STACKS, RECOMMENDED_STACK, RUNNABLE_STACKS

pytestmark = pytest.mark.lane("upstream")

GIB = 2**30
TOTAL = 61 * GIB
SHARE = 0.35
WEIGHTS = 4 * GIB
WORKER = "vllm_ascend/worker/worker.py"
MEMORY = "vllm/utils/mem_utils.py"
METHOD = "determine_available_memory"


class Device:
    "An NPU whose free memory falls: what torch and the platform say of it"

    device_type = "npu"

    def __init__(self, taken: int):
        self.taken = taken  # by another process, while the engine starts
        self.readings = 0

    def mem_get_info(self, device=None):
        "Free and total; weights are loaded and the other process has come after the first reading"
        self.readings += 1
        others = GIB if self.readings == 1 else GIB + self.taken + WEIGHTS
        return TOTAL - others, TOTAL

    def memory_stats(self, device=None):
        held = WEIGHTS if self.readings else 0
        return {"allocated_bytes.all.peak": held, "allocated_bytes.all.current": held}

    def memory_reserved(self, device=None):
        return WEIGHTS if self.readings > 1 else 0

    def current_device(self):
        return "cpu"

    def _nothing(self, *args, **kwargs):
        return None

    is_cuda = is_integrated_gpu = empty_cache = reset_peak_memory_stats = _nothing
    info = debug = info_once = _nothing  # as a logger


def memory_questions(stack: str, names: dict) -> types.ModuleType:
    "vLLM's module of memory questions; `names` replace what it imports"
    module = types.ModuleType("mem_utils")
    text = package_index.wheel_file("vllm", KNOWN_STACKS[stack].versions["vllm"], MEMORY)
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if not _imports_vllm(node)]
    sys.modules[module.__name__] = module  # where dataclasses look
    vars(module).update(names, MiB_bytes=2**20)
    exec(compile(tree, MEMORY, "exec"), vars(module))
    vars(module).update(names)
    return module


def _imports_vllm(node: ast.stmt) -> bool:
    "Whether a statement imports from vLLM, which is not installed in this version"
    if not isinstance(node, ast.ImportFrom):
        return False
    return node.level > 0 or (node.module or "").startswith("vllm")


def real_worker(stack: str, device: Device):
    "NPUWorker of the release with nothing but the method in question, and with what its start measured"
    fake_torch = SimpleNamespace(
        **dict.fromkeys(("accelerator", "cuda", "npu"), device),
        device=torch.device,
        types=torch.types,
        inference_mode=torch.inference_mode,
    )
    names = dict(torch=fake_torch, current_platform=device, GiB_bytes=GIB)
    version = KNOWN_STACKS[stack].versions["vllm-ascend"]
    tree = ast.parse(package_index.wheel_file("vllm-ascend", version, WORKER))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    (kept,) = [node for node in classes if node.name == "NPUWorker"]
    kept.bases = []
    kept.body = [node for node in kept.body if getattr(node, "name", "") == METHOD]
    assert len(kept.body) == 1, f"{stack} has no {METHOD}"
    names |= dict(gc=gc, logger=device, torch_npu=fake_torch)
    start = {"init_npu_memory": device.mem_get_info()[0]}
    if "memory_profiling" in ast.unparse(kept):
        device.readings = 0
        memory = memory_questions(stack, names)
        names["memory_profiling"] = memory.memory_profiling
        start = {"init_snapshot": memory.MemorySnapshot()}
    exec(compile(ast.Module([kept], []), WORKER, "exec"), names)
    worker = names["NPUWorker"]()
    vars(worker).update(start, device="cpu", requested_memory=SHARE * TOTAL)
    return worker


def cache(stack: str, given: int | None, taken: int, monkeypatch) -> int:
    "The cache that the release plans, with the shims that a run has"
    worker = real_worker(stack, Device(taken))
    module = SimpleNamespace(NPUWorker=type(worker))
    monkeypatch.setitem(sys.modules, "vllm_ascend.worker.worker", module)
    monkeypatch.setattr(shims, "installed", lambda package: True)
    worker.cache_config = SimpleNamespace(
        kv_cache_memory_bytes=given, gpu_memory_utilization=SHARE
    )
    runs = []
    worker.model_runner = SimpleNamespace(
        model_memory_usage=WEIGHTS, profile_run=lambda: runs.append(True)
    )
    state = registry.apply("vllm_ascend.kv_cache_bytes").state
    try:
        planned = worker.determine_available_memory()
    finally:
        registry.undo("vllm_ascend.kv_cache_bytes")
    # 0.23.0 is the first that reads the setting
    assert state == ("not needed" if stack == RECOMMENDED_STACK else "applied")
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
