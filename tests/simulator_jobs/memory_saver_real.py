"""The records of shims.memory_saver on the real Python code of sgl-kernel-npu's torch_memory_saver, on the simulated NPU.

The C++ library is a stand-in that keeps the flags the Python side sets. Pools are a stand-in too:
the simulated NPU has one allocator.
"""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace


class Library:
    "The flags of the C++ library"

    def __init__(self):
        self.region, self.calls = False, []

    def tms_set_interesting_region(self, value):
        self.region = value

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
    torch.npu.memory.NPUPluggableAllocator = lambda *args: SimpleNamespace(allocator=lambda: None)
    torch_npu._C = SimpleNamespace(_npu_releasePool=lambda device, pool: None)
    sys.modules.setdefault("torch.npu.memory", torch.npu.memory)
    import torch_memory_saver.entrypoint as entrypoint

    library = Library()

    def set_config(*, tag, interesting_region, enable_cpu_backup):
        library.tms_set_interesting_region(interesting_region)

    entrypoint.BinaryWrapper = lambda path_binary: SimpleNamespace(cdll=library, set_config=set_config)
    entrypoint.HookUtilBase = SimpleNamespace(
        create=lambda hook_mode: SimpleNamespace(get_path_binary=lambda: "", get_allocator=lambda: None)
    )
    return entrypoint.TorchMemorySaver()


def records(rank, world_size, python):
    "Probe, apply, verify, use, undo"
    import torch

    from cookbook_npu.shims import memory_saver, registry

    saver, results = real_saver(Path(python)), {"build": memory_saver.build(memory_saver.package_folder())}

    def free():
        return torch.npu.mem_get_info()[0] >> 20

    def publish():
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

    for name, use in (("tms.disable_empties_cache", publish), ("tms.margin", margin)):
        torch.npu.empty_cache()
        states = [registry.apply(name).state]
        assert registry.registry[name].shim.verify()
        used = [use()]
        states.append(registry.undo(name).state)
        results[name] = (states, used + [use()])
    return results
