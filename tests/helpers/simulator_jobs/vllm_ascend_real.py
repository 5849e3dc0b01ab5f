"""The shims of vllm-ascend on its real code, which cannot be imported as a whole without CANN.

The class NPUWorker is compiled from the real file with the methods in question and nothing else. What those
methods call around the memory questions (profiler, configuration, allocator) are stubs; what they measure is
scripted. The engine for weights over IPC is the real module, with the base classes of the installed vLLM.
"""

import ast
import builtins
import contextlib
import inspect
import sys
import types
from pathlib import Path
from types import SimpleNamespace

METHODS = ("sleep", "wake_up", "_init_device", "determine_available_memory")
GIB = 2**30


class Anything:
    "Stands for what does not matter to the question: can be called and asked, does nothing, is false"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args, **kwargs):
        return Anything()

    def __bool__(self):
        return False


class Snapshot:
    "vLLM's MemorySnapshot with a scripted device"

    free = [0]  # GiB, one for each reading; the last one stays

    def __init__(self, device=None):
        free = Snapshot.free.pop(0) if len(Snapshot.free) > 1 else Snapshot.free[0]
        self.free_memory = free * GIB
        self.total_memory = 64 * GIB
        self.torch_memory = 0
        self.cuda_memory = self.non_torch_memory = self.total_memory - self.free_memory


@contextlib.contextmanager
def profiling(baseline, weights_memory):
    "vLLM's memory_profiling, as far as NPUWorker uses it"
    result = SimpleNamespace(
        before_profile=SimpleNamespace(torch_peak=0), weights_memory=weights_memory
    )
    yield result
    result.after_profile = Snapshot()
    result.non_torch_increase = (
        result.after_profile.non_torch_memory - baseline.non_torch_memory
    )
    result.non_kv_cache_memory = result.non_torch_increase + weights_memory


class Allocator:
    "CaMemAllocator that released everything it held"

    held = 0
    get_instance = classmethod(lambda cls: cls)
    get_current_usage = classmethod(lambda cls: cls.held)
    sleep = classmethod(lambda cls, offload_tags: None)


def fake(path: str, **names) -> types.ModuleType:
    "Put a module with these names where a package would be"
    parts = path.split(".")
    for n in range(1, len(parts) + 1):
        module = sys.modules.setdefault(
            ".".join(parts[:n]), types.ModuleType(".".join(parts[:n]))
        )
        module.__path__ = []
        if n > 1:
            setattr(sys.modules[".".join(parts[: n - 1])], parts[n - 1], module)
    vars(module).update(names)
    return module


def real_worker(checkout: Path):
    "NPUWorker of a checkout with METHODS, and the module that holds it"
    import gc

    import torch

    file = checkout / "vllm_ascend/worker/worker.py"
    tree = ast.parse(file.read_text())
    (worker,) = [
        n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "NPUWorker"
    ]
    worker.bases = []
    worker.body = [
        n for n in worker.body if isinstance(n, ast.FunctionDef) and n.name in METHODS
    ]
    assert {n.name for n in worker.body} == set(METHODS), f"{file} lacks one of {METHODS}"
    module = fake("vllm_ascend.worker.worker")
    names = {n.id for n in ast.walk(worker) if isinstance(n, ast.Name)} - set(dir(builtins))
    vars(module).update({name: Anything() for name in names})
    vars(module).update(
        torch=torch,
        gc=gc,
        GiB_bytes=GIB,
        MemorySnapshot=Snapshot,
        memory_profiling=profiling,
    )
    vars(module).update(
        CaMemAllocator=Allocator,
        get_gva_layerwise_config=lambda config: None,
        vllm_version_is=lambda version: True,
    )
    platform = SimpleNamespace(
        device_type="npu", logical_device_id_to_visible_device_id=lambda index: index
    )
    vars(module).update(current_platform=platform)
    exec(compile(ast.Module([worker], []), str(file), "exec"), vars(module))
    fake("vllm.triton_utils", HAS_TRITON=False)
    return module


def worker_of(module):
    "An instance ready for its start"
    made = object.__new__(module.NPUWorker)
    parallel = SimpleNamespace(
        distributed_executor_backend="mp",
        data_parallel_backend="mp",
        nnodes_within_dp=1,
        assigned_physical_gpu_ids=None,
        data_parallel_rank_local=1,
        data_parallel_index=1,
        pipeline_parallel_size=1,
        tensor_parallel_size=1,
        data_parallel_size=2,
        data_parallel_size_local=0,
        local_world_size=1,
    )
    made.local_rank = 0
    made.parallel_config = parallel
    made.cache_config = SimpleNamespace(
        gpu_memory_utilization=0.5, kv_cache_memory_bytes=None
    )
    made.vllm_config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=None)
    made.model_config = SimpleNamespace(seed=0)
    made.device = "npu:0"
    made._init_worker_distributed_environment = lambda: None
    made.update_available_memory_for_sparse_kv_offload = lambda planned: (
        planned
    )  # main only, off by default
    made.model_runner = SimpleNamespace(
        model_memory_usage=6 * GIB, profile_run=lambda: None
    )
    return made


def cycle(name: str, check) -> dict:
    "Probe, apply, verify, use, undo, and what the defect looks like"
    from cookbook_npu.npu.shims.registry import registry

    shim = registry[name]
    needed, seen = shim.needed()
    if not needed:
        return {"state": "not needed", "seen": seen}
    state = registry.apply(name)
    assert state.state == "applied", state
    assert shim.verify() and check() is True
    assert registry.apply(name).state == "applied"
    assert registry.undo(name).state == "undone"
    try:
        failed = f"check() returned {check()!r}"
    except (AssertionError, ValueError) as error:
        failed = str(error)
    return {"state": "applied", "seen": seen, "without": failed}


def startup(module):
    "The trainer falls asleep while the engine starts"
    Snapshot.free = [10, 12, 60]
    worker = worker_of(module)
    where = worker._init_device()
    return where.type == "npu" and worker.local_rank in (0, 1)


def measuring(module):
    "The trainer gives memory back while the engine measures itself"
    worker = worker_of(module)
    worker.requested_memory = 32 * GIB
    Snapshot.free = [44]
    worker.init_snapshot = Snapshot()
    worker.model_runner.profile_run = lambda: setattr(Snapshot, "free", [50])
    planned = worker.determine_available_memory()
    return (
        planned == (32 - 6 - (64 - 50)) * GIB
    )  # everything in use outside of torch counts


def sleeping(module):
    "The trainer takes memory while the engine falls asleep"
    import torch

    readings = iter([(30 * GIB, 64 * GIB), (10 * GIB, 64 * GIB)])
    Allocator.held = 5 * GIB
    real = torch.npu.mem_get_info
    torch.npu.mem_get_info = lambda *args: next(readings)
    try:
        worker_of(module).sleep(level=1)
    finally:
        torch.npu.mem_get_info = real
    return True


def waking(module):
    "The weights of a mixture of experts wake; hidden size 6"
    import torch

    worker = worker_of(module)
    model = torch.nn.ModuleDict({"experts": torch.nn.Module()})
    weight = torch.nn.Parameter(torch.zeros(4, 8, 6), requires_grad=False)
    model["experts"].w2_weight = weight
    config = SimpleNamespace(hidden_size=6)
    worker.model_runner.model = model
    worker.vllm_config.model_config = SimpleNamespace(
        hf_config=config, hf_text_config=config
    )
    worker.vllm_config.quant_config = None
    worker._sleep_saved_buffers = {}
    Allocator.wake_up = classmethod(lambda cls, tags=None: None)
    settings = SimpleNamespace(weight_nz_mode=0, enable_sleep_mode_extra_cleanup=False)
    module.get_ascend_config = lambda: settings
    worker.wake_up(["weights"])
    return model["experts"].w2_weight is weight


def memory_records(rank, world_size, checkout):
    "The records of the worker's memory on one checkout"
    import warnings

    from cookbook_npu.npu.shims import vllm_ascend as vllm

    warnings.simplefilter("ignore")
    vllm.STARTUP_POLL = 0.05
    module = real_worker(Path(checkout))
    checks = {
        "startup_memory": startup,
        "profiling_memory": measuring,
        "sleep_memory": sleeping,
        "expert_layout": waking,
    }
    return {
        name: cycle(f"vllm_ascend.{name}", lambda check=check: check(module))
        for name, check in checks.items()
    }


def load_file(name: str, file: Path) -> types.ModuleType:
    "Import one real file under its name, its package being a stub"
    fake(name.rpartition(".")[0])
    module = types.ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module
    exec(compile(file.read_text(), str(file), "exec"), vars(module))
    setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    return module


def load_ipc_engine(folder: Path) -> types.ModuleType:
    "The real engine; names of its vLLM that the installed one does not have any more are made up"
    import vllm.distributed.weight_transfer.base as base
    import vllm.distributed.weight_transfer.ipc_engine as ipc

    from cookbook_npu.npu.shims.vllm_ascend import IPC_MODULE

    tree = ast.parse((folder / "npu_ipc_engine.py").read_text())
    for module in (base, ipc):
        imports = [
            n
            for n in tree.body
            if isinstance(n, ast.ImportFrom) and n.module == module.__name__
        ]
        for name in (alias.name for node in imports for alias in node.names):
            if not hasattr(module, name):
                setattr(module, name, type(name, (), {}))
    package = IPC_MODULE.rpartition(".")[0]
    load_file(f"{package}.packed_tensor", folder / "packed_tensor.py")
    return load_file(IPC_MODULE, folder / "npu_ipc_engine.py")


def ipc_record(rank, world_size, checkout):
    "packed_npu_ipc on the real engine of one checkout; what it needs of other vLLM versions is made up"
    from cookbook_npu.npu.shims import vllm_ascend as vllm
    from cookbook_npu.npu.shims import vllm_weights

    folder = Path(checkout) / "vllm_ascend/distributed/weight_transfer"
    if not (folder / "npu_ipc_engine.py").is_file():
        fake("vllm_ascend")
        return {
            "state": "not needed",
            "seen": vllm.PackedNpuIpcShim().needed()[1],
            "paths": {},
        }
    module = load_ipc_engine(folder)

    def check():
        engine = object.__new__(module.NPUIPCWeightTransferEngine)
        engine.packed = True
        engine.device = SimpleNamespace(index=0)
        module.packed_npu_ipc_consumer = lambda **buffer: [("w", 0)]
        module.npu_generate_uuid = lambda: "here"
        fields = dict(
            tensor_sizes=[1],
            ipc_handles={},
            names=["w"],
            shapes=[[1]],
            dtype_names=["float32"],
        )
        try:
            engine.receive_weights(SimpleNamespace(**fields))
        except vllm.ShimError as error:
            return "never loads them" in str(error)
        return False  # it came back as if all were well

    worker = built_with_npu_ipc(module)
    opened = open_handles(module, worker)
    return cycle("vllm_ascend.packed_npu_ipc", check) | {
        "paths": vllm_weights.weight_update_methods(worker, ["npu_ipc"]),
        "opened": opened,
    }


def built_with_npu_ipc(module):
    "A worker that hands everything to the real engine, as the worker of vllm-ascend does"
    module.NPUIPCWeightTransferEngine.__abstractmethods__ = (
        frozenset()
    )  # of the installed vLLM, which is newer
    engine = object.__new__(module.NPUIPCWeightTransferEngine)
    engine.packed = False
    engine.device = SimpleNamespace(index=0)
    engine.model = SimpleNamespace()
    loaded = []
    engine.model.load_weights = loaded.extend
    direct = (
        [loaded.extend]
        if "load_weights" in inspect.signature(engine.receive_weights).parameters
        else []
    )

    def init_engine(info):
        engine.init_transfer_engine(engine.init_info_cls(**info))

    def update_weights(info):
        engine.receive_weights(unpacked(engine.parse_update_info(info)), *direct)

    transfer = SimpleNamespace(backend="npu_ipc")
    return SimpleNamespace(
        weight_transfer_engine=engine,
        loaded=loaded,
        model_runner=SimpleNamespace(),
        vllm_config=SimpleNamespace(weight_transfer_config=transfer),
        init_weight_transfer_engine=init_engine,
        start_weight_update=lambda: None,
        finish_weight_update=lambda: None,
        update_weights=update_weights,
    )


def unpacked(info):
    "Update info with the field that the base class of older versions has, at its default"
    info.packed = False
    return info


class HostStorage:
    "What the driver does with a handle, for memory of the host: it names shared memory, and opening maps it"

    @staticmethod
    def _new_shared_cuda(device, handle, nbytes, offset, *counters):
        from cookbook_npu.weights.transport import open_shared

        assert (device, offset) == (0, 0)
        return open_shared(handle.decode()).untyped_storage()


def open_handles(module, worker):
    """Whether the real engine opens the handle of one tensor and loads it.

    torch_npu cannot be imported here. Its rebuild function is a copy of PyTorch's for CUDA, which stands
    in for it."""
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    from cookbook_npu.npu.shims import vllm_weights
    from cookbook_npu.weights.transport import SharedMemory

    torch.cuda._lazy_init = lambda: None
    module.npu_generate_uuid = lambda: "here"
    reductions = fake("torch_npu.multiprocessing.reductions")
    reductions.rebuild_npu_tensor = rebuild_cuda_tensor
    sent = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    sender = SharedMemory()
    block = sender.allocate(0, 64)
    block[32:44] = sent.flatten().view(torch.uint8)  # 16 elements into the block
    (name,) = sender.share(0, 1).values()
    layout = (torch.Size([2, 3]), (3, 1), 16)
    memory = (HostStorage, torch.bfloat16, 7, name.encode(), 64, 0)
    counters = (False, b"", 0, b"", False)
    args = (torch.Tensor, *layout, *memory, *counters)
    vllm_weights.ipc_update_function(worker)([("w", args)])
    sender.release()
    ((name, opened),) = worker.loaded
    return name == "w" and torch.equal(opened, sent)


def real_vllm(rank, world_size):
    "What the records say about the installed vLLM, and that each can be applied to it and undone"
    import vllm.engine.arg_utils as arguments

    from cookbook_npu.npu.shims import vllm_ascend as vllm
    from cookbook_npu.npu.shims import vllm_weights
    from cookbook_npu.npu.shims.registry import registry

    vllm.enter_rollout()
    before = arguments.EngineArgs(model="m").logprobs_mode
    report = {row["name"]: (row["state"], row["detail"]) for row in vllm.enter_engine()}
    during = arguments.EngineArgs(model="m").logprobs_mode
    registry.undo_all()
    half = vllm.HalfAwakeCore()
    registry["vllm.partial_wake"].function(half, ["weights"])
    return (
        report,
        (before, during, arguments.EngineArgs(model="m").logprobs_mode),
        half.resumed,
        vllm_weights.transfer_engines(),
    )
