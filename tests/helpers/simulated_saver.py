"""A stub of the NPU build of torch_memory_saver: what its shims replace, without a pause."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class _TorchMemorySaverImpl:
    "Implementation of TorchMemorySaver"

    active = False  # inside a region

    @contextmanager
    def region(self) -> Iterator[None]:
        self.active = True
        yield
        self.active = False

    @contextmanager
    def disable(self) -> Iterator[None]:
        assert self.active, "disable() should be called only when tms is active"
        self.active = False
        yield
        self.active = True


class TorchMemorySaver:
    "The interface of torch_memory_saver"

    def __init__(self) -> None:
        self._impl = _TorchMemorySaverImpl()

    @contextmanager
    def region(self, tag: str = "default") -> Iterator[None]:
        with self._impl.region():
            yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        with self._impl.disable():
            yield


def write_saver_package(folder: Path) -> None:
    "Write a package torch_memory_saver with this stub"
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
