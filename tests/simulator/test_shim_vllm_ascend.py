"""The shims of `npu.shims.vllm_ascend` on classes with the same defects and signatures."""

from proof import each

FAKE = """
    import os, sys, types
    def fake(path, **names):
        "Put a module with these names where a package would be"
        parts = path.split(".")
        for n in range(1, len(parts) + 1):
            name = ".".join(parts[:n])
            module = sys.modules.setdefault(name, types.ModuleType(name))
            module.__path__ = []
            if n > 1:
                setattr(sys.modules[".".join(parts[:n-1])], parts[n-1], module)
        vars(module).update(names)
        return module
    from cookbook_npu.npu.shims import vllm_ascend as shims
"""


ARGS = (
    FAKE
    + """
    from dataclasses import dataclass
    @dataclass
    class EngineArgs:
        model: str
        logprobs_mode: str = "raw_logprobs"
        def __post_init__(self): self.seen = self.logprobs_mode
    fake("vllm.engine.arg_utils", EngineArgs=EngineArgs)
"""
)


CORE = (
    FAKE
    + """
    class Executor:
        def __init__(self): self.sleeping, self.dummies = {"weights", "kv_cache"}, 0
        @property
        def is_sleeping(self): return bool(self.sleeping)
        def wake_up(self, tags): self.sleeping -= set(tags or self.sleeping)
        def execute_dummy_batch(self): self.dummies += 1
    class EngineCore:
        def __init__(self): self.model_executor, self.paused = Executor(), True
        def resume_scheduler(self): self.paused = False
        def wake_up(self, tags=None):  # as up to vLLM 0.23
            tags = tags and [t for t in tags if t != "scheduling"]
            if tags is None or tags: self.model_executor.wake_up(tags)
            self.resume_scheduler()
        def execute_dummy_batch(self): self.model_executor.execute_dummy_batch()
    class DPEngineCoreProc(EngineCore):
        def run_busy_loop(self): self.execute_dummy_batch()
    fake("vllm.v1.engine.core", EngineCore=EngineCore, DPEngineCoreProc=DPEngineCoreProc)
"""
)


WORKER = (
    FAKE
    + """
    import torch, threading
    from types import SimpleNamespace
    class CaMemAllocator:
        held = 0
        @classmethod
        def get_instance(cls): return cls
        @classmethod
        def get_current_usage(cls): return cls.held
    def snapshot(free, others):
        memory = dict(cuda_memory=others, torch_memory=0, non_torch_memory=others)
        return SimpleNamespace(free_memory=free, total_memory=64, **memory)
    class NPUWorker:
        free = 10
        local_rank = 0
        def _init_device(self):
            self.local_rank += 1
            self.init_snapshot = snapshot(free=self.free, others=54)
            self.requested_memory = 0.5 * self.init_snapshot.total_memory
            if self.init_snapshot.free_memory < self.requested_memory:
                seen = f"Free memory on device ({self.free}/64 GiB) on startup"
                raise ValueError(f"{seen} is less than desired GPU memory utilization")
            return f"npu:{self.local_rank}"
        @torch.inference_mode()
        def determine_available_memory(self):
            now = self.profile()
            assert self.init_snapshot.free_memory > now.free_memory, (
                "Error in memory profiling. "
                f"Initial free memory {self.init_snapshot.free_memory} GiB, "
                f"current free memory {now.free_memory} GiB.")
            more = now.non_torch_memory - self.init_snapshot.non_torch_memory
            return int(self.requested_memory - more - 8)
        def sleep(self, level=1):
            assert self.freed >= 0, "Memory usage increased after sleeping."
    fake("vllm_ascend.worker.worker", NPUWorker=NPUWorker, CaMemAllocator=CaMemAllocator)
"""
)


# fmt: off
test_shim = each(
    ("vllm.environment", "check() returned False", """
        import os, subprocess, sys
        os.environ.update(TMS_INIT_ENABLE="1", TMS_HOOK_MODE="preload")
        from cookbook_npu.npu.shims import vllm_ascend
        assert registry.apply("vllm.environment").state == "applied"
        def check():
            code = "import os; print([n for n in os.environ if n.startswith('TMS_')])"
            child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            return child.stdout.strip() == "[]"
    """),
    # as vllm-ascend up to 0.23 reads it, and a later release, which does not
    ("vllm_ascend.nz_weights", "check() returned False", """
    import importlib, os, sys, tempfile
    from pathlib import Path
    from cookbook_npu.npu.shims import vllm_ascend as shims
    package = Path(tempfile.mkdtemp(), "vllm_ascend")
    package.mkdir()
    (package / "__init__.py").touch()
    envs = package / "envs.py"
    sys.path.insert(0, str(package.parent))
    envs.write_text("OTHER = 1")
    assert registry.apply("vllm_ascend.nz_weights").state == "not needed"
    read = "os.getenv('VLLM_ASCEND_ENABLE_NZ', 1)"
    envs.write_text(f"import os\\ndef __getattr__(name):\\n    return int({read})")
    assert registry.apply("vllm_ascend.nz_weights").state == "applied"
    def check():
        return importlib.import_module("vllm_ascend.envs").VLLM_ASCEND_ENABLE_NZ == 0
    """),
    ("vllm.processed_logprobs", "check() returned False", ARGS + """
    assert registry.apply("vllm.processed_logprobs").state == "applied"
    def check():
        raw = EngineArgs("m", logprobs_mode="raw_logprobs")
        return {EngineArgs("m").seen, raw.seen} == {"processed_logprobs"}
    """),
    ("vllm_ascend.sampler_logprobs", "check() returned False", FAKE + """
    class AscendSampler:
        def __init__(self, logprobs_mode="raw_logprobs"):
            self.logprobs_mode = logprobs_mode
            self.topk_topp_sampler = types.SimpleNamespace(logprobs_mode="raw_logprobs")
    fake("vllm_ascend.sample.sampler", AscendSampler=AscendSampler)
    assert registry.apply("vllm_ascend.sampler_logprobs").state == "applied"
    def check():
        sampler = AscendSampler()
        modes = {sampler.logprobs_mode, sampler.topk_topp_sampler.logprobs_mode}
        return modes == {"processed_logprobs"}
    """),
    ("vllm.partial_wake", "resumed while the cache is away", CORE + """
    assert registry.apply("vllm.partial_wake").state == "applied"
    def check():
        core = EngineCore()
        core.wake_up(["weights"])
        assert core.paused, "resumed while the cache is away"
        core.wake_up(["kv_cache"])
        assert not core.paused
        level_0 = EngineCore()
        level_0.model_executor.sleeping = set()
        level_0.wake_up(["scheduling"])
        whole = EngineCore()
        whole.wake_up()
        return not level_0.paused and not whole.paused
    """),
    ("vllm.dummy_batch", "worked while asleep", CORE + """
    assert registry.apply("vllm.dummy_batch").state == "applied"
    def check():
        core = EngineCore()
        core.execute_dummy_batch()
        assert core.model_executor.dummies == 0, "worked while asleep"
        core.model_executor.sleeping = set()
        core.execute_dummy_batch()
        return core.model_executor.dummies == 1
    """),
    ("vllm.tied_head", "check() returned False", FAKE + """
    import torch
    def dispatch(layer, remove_weight):
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x, weight, bias: x @ packed.T
    class Method:
        def process_weights_after_loading(self, layer): dispatch(layer, False)
    class GPUModelRunner:
        def __init__(self):
            self.model = head = torch.nn.Linear(4, 4, bias=False)
            head.quant_method = Method()
            dispatch(head, False)
        def reload_weights(self, weights_iterator=None, weights_path=None, is_checkpoint_format=True):
            for name, value in weights_iterator:
                self.model.get_parameter(name).data.copy_(value)
    fake("vllm.model_executor.layers.utils", dispatch_cpu_unquantized_gemm=dispatch)
    fake("vllm.platforms", current_platform=types.SimpleNamespace(is_cpu=lambda: True))
    fake("vllm.v1.worker.gpu_model_runner", GPUModelRunner=GPUModelRunner)
    assert registry.apply("vllm.tied_head").state == "applied"
    def check():
        runner = GPUModelRunner()
        runner.reload_weights(weights_iterator=iter([("weight", torch.eye(4))]))
        return torch.equal(runner.model.cpu_linear(torch.eye(4), None, None), torch.eye(4))
    """),
    ("vllm_ascend.startup_memory", "Free memory on device (10/64 GiB)", WORKER + """
    shims.STARTUP_POLL = 0.05
    assert registry.apply("vllm_ascend.startup_memory").state == "applied"
    def check():
        worker = NPUWorker()
        worker.local_rank = 0
        later = threading.Timer(0.3, lambda: setattr(worker, "free", 60))  # the trainer falls asleep
        later.start()
        return worker._init_device() == "npu:1"
    """),
    ("vllm_ascend.profiling_memory", "Error in memory profiling", WORKER + """
    assert registry.apply("vllm_ascend.profiling_memory").state == "applied"
    def check():
        worker = NPUWorker()
        worker.requested_memory = 32
        begin = snapshot(free=44, others=20)
        worker.init_snapshot = begin
        worker.profile = lambda: SimpleNamespace(free_memory=48, non_torch_memory=8)
        assert worker.determine_available_memory() == 32 - 8 - 8
        assert worker.init_snapshot is begin
        # no other process interfered: as measured
        worker.profile = lambda: SimpleNamespace(free_memory=33, non_torch_memory=23)
        return worker.determine_available_memory() == 32 - 8 - 3
    """),
    # What a worker plans while a trainer takes 15 GiB
    ("vllm_ascend.kv_cache_bytes", "check() returned False", WORKER + """
    assert registry.apply("vllm_ascend.kv_cache_bytes").state == "applied"
    def measured(given):
        "What a worker plans while a trainer takes 15 GiB"
        worker = NPUWorker()
        worker.requested_memory = 32
        worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=given)
        worker.model_runner = SimpleNamespace(profile_run=lambda: None)
        worker.init_snapshot = snapshot(free=60, others=4)
        worker.profile = lambda: snapshot(free=60 - 3 - 15, others=4 + 3 + 15)
        return worker.determine_available_memory()
    def check():
        assert measured(None) == 32 - 8 - 3 - 15
        return measured(21) == 21
    """),
    ("vllm_ascend.sleep_memory", "Memory usage increased after sleeping", WORKER + """
    import warnings
    warnings.simplefilter("ignore")
    assert registry.apply("vllm_ascend.sleep_memory").state == "applied"
    def check():
        worker = NPUWorker()
        worker.freed = -5
        CaMemAllocator.held = 0
        try:
            worker.sleep()
        except AssertionError:
            pass
        else:
            return False
        CaMemAllocator.held = 3 << 30
        worker.sleep(level=2)
        return True
    """),
    ("vllm_ascend.sleep_waits", "check() returned False", FAKE + """
    order = []
    class CaMemAllocator:
        def sleep(self, offload_tags=None): order.append(offload_tags)
    fake("vllm_ascend.device_allocator.camem", CaMemAllocator=CaMemAllocator)
    shims.accelerator = lambda: types.SimpleNamespace(synchronize=lambda: order.append("waited"))
    assert registry.apply("vllm_ascend.sleep_waits").state == "applied"
    def check():
        order.clear()
        CaMemAllocator().sleep(("weights",))
        return order == ["waited", ("weights",)]
    """),
    ("vllm_ascend.expert_layout", "check() returned False", FAKE + """
    import torch
    class CaMemAllocator:
        @classmethod
        def get_instance(cls): return cls()
        def wake_up(self, tags=None): pass
    class NPUWorker:
        def __init__(self, model, hidden):
            config = types.SimpleNamespace(hidden_size=hidden)
            config = types.SimpleNamespace(hf_text_config=config)
            self.vllm_config = types.SimpleNamespace(model_config=config, quant_config=None)
            self.model_runner = types.SimpleNamespace(model=model)
        def wake_up(self, tags=None):
            module.CaMemAllocator.get_instance().wake_up(tags)
            hidden = self.vllm_config.model_config.hf_text_config.hidden_size
            for name, weight in self.model_runner.model.named_parameters():
                if "w2_weight" in name and weight.shape[2] == hidden:
                    turned = torch.nn.Parameter(weight.transpose(1, 2), requires_grad=False)
                    parent = self.model_runner.model.get_submodule(name.rpartition(".")[0])
                    parent.w2_weight = turned
    module = fake("vllm_ascend.worker.worker", NPUWorker=NPUWorker, CaMemAllocator=CaMemAllocator)
    state = registry.apply("vllm_ascend.expert_layout")
    assert state.state == "applied", state
    def check():
        model = torch.nn.ModuleDict({"experts": torch.nn.Module()})
        weight = torch.nn.Parameter(torch.zeros(4, 8, 6), requires_grad=False)
        model["experts"].w2_weight = weight
        NPUWorker(model, 6).wake_up(["weights"])
        return model["experts"].w2_weight is weight
    """),
    bootstrap=None,
)
# fmt: on
