"""The real software stack of a 910B over a CANN of host memory: torch_npu, vllm-ascend, Triton-Ascend.

`environment` installs and compiles it into the user's cache; `host/` lies on PYTHONPATH of every process of
the lane and stands in for what CANN and its kernels do; `jobs` is what tests run there.
"""
