"""A stub of torch_memory_saver for the simulated NPU, with its Python interface.

It records the storages that are created in a region, copies them to the host at a pause, and empties them;
the native part, which calls CANN, is not tested. `SIMULATED_SAVER` reproduces reported failures: `frees
nothing` (a pause keeps the memory), `forgets` (zeros come back), `exit` (a pause ends the process).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageRecorder(TorchDispatchMode):
    "Records the device storages that operators create"

    def __init__(self, saver: Any, recorded: dict[int, StorageWeakRef]):
        super().__init__()
        self.saver = saver
        self.recorded = recorded

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        if self.saver.active:
            for t in tree_leaves(result):
                self._record(t)
        return result

    def _record(self, t: Any) -> None:
        if isinstance(t, torch.Tensor) and t.device.type == "npu":
            storage = t.untyped_storage()
            self.recorded[storage._cdata] = StorageWeakRef(storage)


def _content(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _TorchMemorySaverImpl:
    "Implementation of TorchMemorySaver"

    def __init__(self) -> None:
        self.recorded: dict[str, dict[int, StorageWeakRef]] = {}  # tag -> storages
        self.copies: list[tuple[torch.UntypedStorage, torch.Tensor]] = []  # of a pause
        self.active = False  # inside a region

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool) -> Iterator[None]:
        "Make allocations inside pausable"
        assert not self.active, "regions do not nest"
        self.active = True
        try:
            with StorageRecorder(self, self.recorded.setdefault(tag, {})):
                yield
        finally:
            self.active = False

    @contextmanager
    def disable(self) -> Iterator[None]:
        "Make allocations inside not pausable"
        if not self.active:
            raise RuntimeError("disable() should be called only when tms is active")
        self.active = False
        try:
            yield
        finally:
            self.active = True

    def _alive(self, tag: str | None) -> list[torch.UntypedStorage]:
        "Return the live storages of a tag"
        tags = self.recorded if tag is None else [tag]
        found = [r for name in tags for r in self.recorded.get(name, {}).values()]
        storages = [torch.UntypedStorage._new_with_weak_ptr(r.cdata) for r in found]
        return [s for s in storages if s is not None and s.nbytes()]

    def pause(self, tag: str | None) -> None:
        "Copy the storages to the host, then empty them"
        broken = os.environ.get("SIMULATED_SAVER")
        if broken == "exit":
            os._exit(1)
        self.copies = [(s, _content(s).cpu()) for s in self._alive(tag)]
        for storage, _ in self.copies:
            if broken != "frees nothing":
                storage.resize_(0)
        torch.get_device_module("npu").empty_cache()

    def resume(self, tag: str | None) -> None:
        "Restore the storages"
        forgets = os.environ.get("SIMULATED_SAVER") == "forgets"
        for storage, copy in self.copies:
            storage.resize_(copy.nbytes)
            _content(storage).copy_(torch.zeros_like(copy) if forgets else copy)
        self.copies = []


class TorchMemorySaver:
    "The interface of torch_memory_saver"

    def __init__(self) -> None:
        self._impl = _TorchMemorySaverImpl()

    @contextmanager
    def region(
        self, tag: str = "default", enable_cpu_backup: bool = False
    ) -> Iterator[None]:
        with self._impl.region(tag=tag, enable_cpu_backup=enable_cpu_backup):
            yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        with self._impl.disable():
            yield

    @property
    def hook_mode(self) -> str:
        return "torch"

    @hook_mode.setter
    def hook_mode(self, value: str) -> None:
        assert value == "torch", "the stub supports only hook mode 'torch'"

    def pause(self, tag: str | None = None) -> None:
        self._impl.pause(tag)

    def resume(self, tag: str | None = None) -> None:
        self._impl.resume(tag)


def write_saver_package(folder: Path) -> Path:
    "Write a package torch_memory_saver with this stub and an empty library"
    package = Path(folder) / "torch_memory_saver"
    package.mkdir(parents=True)
    (package / "entrypoint.py").write_text(
        "import torch_npu\n"
        "from simulated_saver import TorchMemorySaver, _TorchMemorySaverImpl\n"
    )
    (package / "__init__.py").write_text(
        "from .entrypoint import TorchMemorySaver\n"
        "torch_memory_saver = TorchMemorySaver()\n"
    )
    (Path(folder) / "torch_memory_saver_hook_mode_torch.abi3.so").touch()
    return package
