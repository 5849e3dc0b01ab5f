"""Count how often the host waits for the device: every read of a value blocks (`item`, `cpu`, a mask).

The simulated NPU is synchronous: it cannot show what such a read costs, but it can count the reads.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class HostRead:
    "One value that was read from the device"

    operator: str  # of torch
    place: str  # "file:line function" of the caller, outside torch


# operators whose result shape depends on values
_BY_VALUE = "nonzero masked_select _unique2 unique_dim repeat_interleave equal".split()


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type not in ("cpu", "meta")


def _reads(operator: str, args: tuple[Any, ...], result: Any) -> bool:
    "Whether a call waits for a value of the device"
    if not any(_on_device(value) for value in tree_leaves(args)):
        return False
    if operator in _BY_VALUE or operator == "_local_scalar_dense":
        return True
    if operator in ("index", "index_put_", "index_put"):
        masks = (torch.bool, torch.uint8)
        return any(_on_device(i) and i.dtype in masks for i in tree_leaves(args[1]))
    copies = operator in ("_to_copy", "copy_")
    return copies and isinstance(result, Tensor) and result.device.type == "cpu"


def _caller() -> str:
    "Return the innermost frame outside torch and this module"
    skipped = ("_caller", "__torch_dispatch__")
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and frame.name not in skipped:
            return f"{frame.filename}:{frame.lineno} {frame.name}"
    return "a thread of torch"


class _Recorder(TorchDispatchMode):
    "Records reads of all operators, backward pass included"

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[HostRead] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operator = func.overloadpacket.__name__
        if _reads(operator, args, result):
            self.reads.append(HostRead(operator, _caller()))
        return result


@contextmanager
def host_reads() -> Iterator[list[HostRead]]:
    "Record every value that the block reads from a device"
    with _Recorder() as recorder:
        yield recorder.reads
