"""Put in place what CANN would do, in every process of the lane, right after the library that asks for it has
been imported. Acts only where `COOKBOOK_REAL_STACK` is set.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any


def _torch_npu(_: ModuleType) -> None:
    from npu_wheel import lane

    lane.load()
    from torch_npu.op_plugin.atb._atb_ops import _register_atb_extensions

    _register_atb_extensions()
    import operators
    import torchair_names

    operators.install(("npu", "atb"))
    torchair_names.install()


def _triton(_: ModuleType) -> None:
    import triton_on_host

    triton_on_host.activate()


def _triton_extensions(module: ModuleType) -> None:
    import triton_on_host

    triton_on_host.extend(module)


def _vllm_ascend_ops(_: ModuleType) -> None:
    import operators

    operators.install(("_C_ascend",))


def _device_nodes(module: ModuleType) -> None:
    "The driver's device files, in the lane's folder instead of /dev"
    folder = os.environ["COOKBOOK_REAL_STACK"]
    for i in range(int(os.environ.get("COOKBOOK_NPU_SIM_DEVICES", "8"))):
        open(f"{folder}/davinci{i}", "a").close()
    object.__setattr__(module.NPU, "nodes", f"{folder}/davinci[0-9]*")


AFTER = {
    "cookbook_npu.npu.device": _device_nodes,
    "torch_npu": _torch_npu,
    "triton": _triton,
    "vllm_ascend.vllm_ascend_C": _vllm_ascend_ops,
    "vllm_ascend.ops.triton.triton_utils": _triton_extensions,
}


class Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, then: Any) -> None:
        self.loader, self.then = loader, then

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader, AFTER[name])
        return spec


if os.environ.get("COOKBOOK_REAL_STACK"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.meta_path.insert(0, Finder())
