"""Triton-Ascend without a compiler: the kernels of vllm-ascend and MindSpeed run in Triton's interpreter, on
the memory of NPU tensors as it is.
"""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import launches
import numpy as np
from host_memory import host
from ml_dtypes import bfloat16


class DeviceProperties:
    "What the driver says of a 910B1"

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"num_aicore": 24, "num_vectorcore": 48, "max_shared_mem": 196608}

    def get_arch(self) -> str:
        return "Ascend910B1"

    def get_aicore_num(self) -> int:
        return 24


def activate() -> None:
    "An active driver, and an interpreter that runs device kernels; before vLLM or MindSpeed are imported"
    os.environ["TRITON_INTERPRET"] = "1"
    _activate_driver()
    _interpret_in_place()
    _name_libdevice()


def _name_libdevice() -> None:
    "Releases after 3.2.0, none of which is on PyPI, call the folder of the device library cann"
    import triton.language.extra as extra

    if importlib.util.find_spec("triton.language.extra.cann") is None:
        import triton.language.extra.ascend.libdevice  # noqa: F401

        extra.cann = extra.ascend  # an attribute only: its module `extension` is not there


def _activate_driver() -> None:
    from triton.backends import backends
    from triton.backends.ascend.driver import NPUDriver
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class HostDriver(NPUDriver):
        def __init__(self) -> None:
            self.utils = DeviceProperties()
            self.launcher_cls = None

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("npu", "Ascend910B1", 0)

        def get_benchmarker(self) -> Any:
            def once(
                call: Any, *args: Any, quantiles: Any = None, **kwargs: Any
            ) -> list[float]:
                call()
                return [1.0] * len(quantiles or [1])

            return once

    backend = backends["ascend"]
    backends["ascend"] = type(backend)(backend.compiler, HostDriver)
    NPUDriver.is_active = HostDriver.is_active
    driver.set_active(HostDriver())


def _interpret_in_place() -> None:
    import triton.language as tl
    from triton.language.core import is_builtin
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction
    from triton.runtime.jit import JITFunction

    def in_place(
        self: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list, dict]:
        "Strides are arguments of a kernel, so a tensor must keep its own"

        def alias(value: Any) -> Any:
            return host(value) if hasattr(value, "data_ptr") else value

        return [alias(a) for a in args], {k: alias(v) for k, v in kwargs.items()}

    launch = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        "Options of the compiler are no arguments of the kernel"
        known = {k: v for k, v in kwargs.items() if k in self.arg_names or k == "warmup"}
        tensors = [x for x in (*args, *known.values()) if hasattr(x, "data_ptr")]
        args, known = in_place(self, args, known)
        name = getattr(self.fn, "__name__", "a Triton kernel")
        inputs = [
            (x, True) for x in tensors if x.device.type == "npu"
        ]  # a kernel names no outputs
        launches.launch(name, lambda: launch(self, *args, **known), inputs)

    def call_nested(self: Any, *args: Any, **kwargs: Any) -> Any:
        "A function that was decorated before the interpreter was switched on"
        if not hasattr(self, "interpreted"):
            self.interpreted = InterpretedFunction(self.fn)
        return self.interpreted(*args, **kwargs)

    patch_language = interpreter._patch_lang
    patched: set[int] = set()  # modules, by the id of their globals

    def patch_names(function: Any) -> None:
        "A kernel's module may have imported single functions of the language by name"
        names = function.__globals__
        if id(names) in patched:
            return  # nothing undoes it, and a nested call is frequent
        patched.add(id(names))
        patch_language(function)
        for name, value in list(names.items()):
            if callable(value) and is_builtin(value):
                interpreter._patch_attr(
                    _Names(names), name, value, interpreter.interpreter_builder
                )

    numpy_type = interpreter._get_np_dtype

    def with_bfloat16(kind: Any) -> np.dtype:
        "Bits of bfloat16 are no integers: a sum of two would be one of their bits"
        scalar = getattr(kind, "element_ty", kind) if kind.is_block() else kind
        return np.dtype(bfloat16) if scalar == tl.bfloat16 else numpy_type(kind)

    interpreter._get_np_dtype = with_bfloat16
    interpreter._patch_lang = patch_names
    GridExecutor._init_args_hst = in_place
    GridExecutor._restore_args_dev = lambda *_: None
    GridExecutor.__call__ = call
    JITFunction.__call__ = call_nested


class _Names:
    "A dictionary whose items are set as attributes"

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


# ---- extensions of Triton-Ascend that its interpreter lacks


def _number(x: Any) -> int:
    x = getattr(x, "value", x)
    handle = getattr(x, "handle", None)
    return int(x if handle is None else np.asarray(handle.data).reshape(-1)[0])


def _slices(offsets: Any, sizes: Any, strides: Any) -> tuple[slice, ...]:
    rows = zip(offsets, sizes, strides, strict=True)
    numbers = [tuple(map(_number, row)) for row in rows]
    return tuple(slice(o, o + n * s, s) for o, n, s in numbers)


def _block(data: np.ndarray, like: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    kind = tl.core.block_type(like.type.scalar, list(data.shape))
    return tl.core.tensor(TensorHandle(data, like.handle.dtype), kind)


def extract_slice(ful: Any, offsets: Any, sizes: Any, strides: Any, **_: Any) -> Any:
    return _block(ful.handle.data[_slices(offsets, sizes, strides)].copy(), ful)


def insert_slice(
    ful: Any, sub: Any, offsets: Any, sizes: Any, strides: Any, **_: Any
) -> Any:
    data = ful.handle.data.copy()
    data[_slices(offsets, sizes, strides)] = sub.handle.data
    return _block(data, ful)


def get_element(src: Any, indice: Any, **_: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    data = np.array([src.handle.data[tuple(_number(i) for i in indice)]])
    return tl.core.tensor(TensorHandle(data, src.handle.dtype), src.type.scalar)


def create_gather(self: Any, src: Any, indices: Any, axis: int) -> Any:
    from triton.runtime.interpreter import TensorHandle

    places = indices.data.astype(np.int64)
    return TensorHandle(np.take_along_axis(src.data, places, axis), src.dtype)


def extend(module: Any) -> None:
    """Give vllm-ascend's helper module the functions, and the interpreter the type of one bit and
    the builder of `tl.gather`
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    module.extract_slice = extract_slice
    module.insert_slice = insert_slice
    module.get_element = get_element
    all_ones = InterpreterBuilder.get_all_ones_value

    def ones(self: Any, kind: Any) -> Any:
        return (
            TensorHandle(np.ones(1, bool), tl.int1)
            if kind == tl.int1
            else all_ones(self, kind)
        )

    if not hasattr(InterpreterBuilder, "create_gather"):
        InterpreterBuilder.create_gather = create_gather
    InterpreterBuilder.get_int1_ty = lambda self: tl.int1
    InterpreterBuilder.get_all_ones_value = ones
