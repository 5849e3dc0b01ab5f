"""Runtime functions of pyACL."""

import ctypes

_cann = ctypes.CDLL("libascendcl.so")
_pointer = ctypes.c_void_p


def memcpy(target: int, room: int, source: int, size: int, kind: int) -> int:
    return _cann.aclrtMemcpy(
        _pointer(target),
        ctypes.c_size_t(room),
        _pointer(source),
        ctypes.c_size_t(size),
        kind,
    )


def get_device_count() -> tuple[int, int]:
    count = ctypes.c_uint32()
    code = _cann.aclrtGetDeviceCount(ctypes.byref(count))
    return count.value, code
