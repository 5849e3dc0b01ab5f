"""Lane B: the real `torch_npu` wheel on a CANN of host memory, with the simulator's CPU kernels under
it.

The simulated NPU (lane A) stands in for `torch_npu`; these tests hold it, and the shims, against the
Python code and the C++ runtime of the real one: its `transfer_to_npu`, its allocator, its generators,
its patches of `torch.distributed`. build.py makes the lane, lane.py enters it in a fresh process,
jobs.py is what runs there. No test process imports `torch_npu` itself.
"""
