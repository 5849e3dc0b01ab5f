"""A kernel for a Triton that knows the NPU. Defect: without one it cannot be imported."""

from triton.backends.ascend import driver  # noqa: F401


def l2norm(x, eps=1e-6):
    raise NotImplementedError
