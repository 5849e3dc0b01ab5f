"""Replacements of torch functions, with their defects."""

from functools import wraps

import torch


def version_wrapper(fn):
    @wraps(fn)
    def wrapper(name, *args, **kwargs):
        return "2.2.0" if name == "transformer-engine" else fn(name, *args, **kwargs)

    return wrapper


def ensure_contiguous_wrapper(fn):
    """Defect: the view of a tensor that is not contiguous is a view of a copy."""

    @wraps(fn)
    def wrapper(tensor, *args, **kwargs):
        return fn(
            tensor if tensor.is_contiguous() else tensor.contiguous(), *args, **kwargs
        )

    return wrapper


def torch_all_reduce_double_dtype_bypass_wrapper(fn):
    """Defects: reduces a copy of a float64 tensor and drops it; fails for a tensor passed by name."""

    @wraps(fn)
    def wrapper(*args, **kwargs):
        if torch.is_tensor(args[0]) and args[0].dtype == torch.double:
            copy = args[0].float()
            fn(copy, *args[1:], **kwargs)
            return None
        return fn(*args, **kwargs)

    return wrapper


def dummy_compile(*args, **kwargs):
    """Defect: the result of compiling a module is a plain function without parameters, and a function loses its name."""
    if args and callable(args[0]):
        return lambda *a, **k: args[0](*a, **k)
    return lambda fn: lambda *a, **k: fn(*a, **k)
