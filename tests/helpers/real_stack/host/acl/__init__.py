"""pyACL, which CANN brings: the few functions that vllm-ascend and Ray call, over the fake CANN."""

from . import rt  # noqa: F401


def get_soc_name() -> str:
    return "Ascend910B1"
