"""A CPU tensor over the memory of an NPU tensor: memory of the fake CANN is host memory."""

import ctypes

import torch
from torch import Tensor


def host(x: Tensor) -> Tensor:
    "The same memory, sizes and strides on the CPU"
    if x.device.type == "cpu":
        return x
    if x.numel() == 0:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    storage = x.untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=x.dtype, count=storage.nbytes() // x.itemsize)
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


def device(x: Tensor) -> Tensor:
    "A copy on the current NPU"
    result = torch.empty(x.shape, dtype=x.dtype, device="npu")
    if x.numel():
        host(result).copy_(x)
    return result
