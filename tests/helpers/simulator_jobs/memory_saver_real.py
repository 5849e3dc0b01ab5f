"""The shims of the memory saver on the real Python code of sgl-kernel-npu's torch_memory_saver.

It runs on the simulated NPU. The C++ library is a stub that keeps the flags the Python side sets, and pauses
storages as simulated_saver does. Pools are a stub too: the simulated NPU has one allocator. The third job
lets a trainer sleep by it.
"""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace


class Library:
    "The flags of the C++ library; what it pauses are the storages made in a region"

    def __init__(self):
        from simulated_saver import StorageRecorder, _TorchMemorySaverImpl

        self.region = False
        self.calls = []
        self.native = _TorchMemorySaverImpl()
        self.native.recorded["all"] = {}
        self.recorder = StorageRecorder(self.native, self.native.recorded["all"])
        self.recorder.__enter__()

    def tms_pause(self, tag):
        self.native.pause(None)

    def tms_resume(self, tag):
        self.native.resume(None)

    def tms_set_interesting_region(self, value):
        self.region = self.native.active = value

    def tms_get_interesting_region(self):
        return self.region

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, args))


def real_saver(python: Path):
    "The real module of a checkout, without its C++ half"
    import torch
    import torch_npu

    sys.path.insert(0, str(python))
    torch.npu.MemPool = lambda allocator=None: SimpleNamespace(id=0)
    torch.npu.use_mem_pool = lambda pool: contextlib.nullcontext()
    torch.npu.memory.NPUPluggableAllocator = lambda *args: SimpleNamespace(
        allocator=lambda: None
    )
    vars(torch_npu).setdefault("_C", SimpleNamespace())._npu_releasePool = (
        lambda device, pool: None
    )
    sys.modules.setdefault("torch.npu.memory", torch.npu.memory)
    import torch_memory_saver.entrypoint as entrypoint

    library = Library()

    def set_config(*, tag, interesting_region, enable_cpu_backup):
        library.tms_set_interesting_region(interesting_region)

    entrypoint.BinaryWrapper = lambda path_binary: SimpleNamespace(
        cdll=library, set_config=set_config
    )
    entrypoint.HookUtilBase = SimpleNamespace(
        create=lambda hook_mode: SimpleNamespace(
            get_path_binary=lambda: "", get_allocator=lambda: None
        )
    )
    return entrypoint.TorchMemorySaver()


def records(rank, world_size, python):
    "Probe, apply, verify, use, undo"
    import torch

    from cookbook_npu.npu.shims import memory_saver
    from cookbook_npu.npu.shims.registry import registry

    torch.npu.set_device(0)  # before memory is asked for
    saver = real_saver(Path(python))
    results = {"build": memory_saver.saver_build(memory_saver.package_folder())}

    def free():
        return torch.npu.mem_get_info()[0] >> 20

    def update_weights():
        before = free()
        with saver.region("training"), saver.disable():
            bucket = torch.zeros(16 << 18, device="npu")
            del bucket
        return before - free()

    def margin():
        try:
            saver.memory_margin_bytes = 1 << 30
        except memory_saver.ShimError:
            return "refused"
        del saver.memory_margin_bytes
        return "an attribute"

    for name, use in (
        ("memory_saver.disable_empties_cache", update_weights),
        ("memory_saver.margin", margin),
    ):
        torch.npu.empty_cache()
        states = [registry.apply(name).state]
        assert registry[name].verify()
        used = [use()]
        states.append(registry.undo(name).state)
        results[name] = (states, used + [use()])
    return results


def sleeps(rank, world_size, python, hf_path):
    "A trainer that sleeps by the real Python code learns the same as one that sleeps by copies"
    from unittest.mock import patch

    from cookbook_npu.npu.shims.bootstrap import bootstrap

    bootstrap("trainer")
    from plan_jobs.measure import config_of
    from process_group_jobs import train_steps

    from cookbook_npu.train import offload as memory

    copied, *_ = train_steps(
        rank, world_size, config_of({"parallel.tensor": 1}, 1), hf_path
    )
    saver = real_saver(Path(python))
    with patch.object(memory, "open_memory_saver", lambda: (saver, "region")):
        config = config_of(
            {"parallel.tensor": 1, "placement.sleep": "torch_memory_saver"}, 1
        )
        paused, asleep, _ = train_steps(rank, world_size, config, hf_path)
    return copied == paused, asleep["memory/free_after_sleep"] - asleep[
        "memory/free_before_sleep"
    ]
