"""Names of torchair, the graph compiler inside torch_npu, whose C++ part needs CANN's graph engine.

MindSpeed imports them to register converters that eager training never calls.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


def _no_dunder(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)


class Placeholder:
    "Any class, decorator or constant of torchair"

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else Placeholder()

    def __getattr__(self, name: str) -> Any:
        _no_dunder(name)
        return Placeholder()


class PlaceholderModule(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        _no_dunder(name)
        return Placeholder


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        inside = name.startswith("torch_npu.dynamo.torchair")
        if inside or name.partition(".")[0] == "torchair":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "torchair.npu_fx_compiler":  # as torchair does
            importlib.import_module("torchair.fx_summary")


def install() -> None:
    sys.meta_path.insert(0, Finder())
    for name in [n for n in sys.modules if n.partition(".")[0] == "torchair"]:
        del sys.modules[name]
