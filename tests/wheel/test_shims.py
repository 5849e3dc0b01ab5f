"""The shims of a trainer against the real torch_npu and its real transfer_to_npu."""

import pytest

# What each shim of torch and Megatron finds: "not needed" where the real redirection does what the
# simulated one leaves to it.
STATES = {
    "torch.cuda_to_npu": "applied",
    "torch.tensor_type_names": "applied",
    "torch.device_capability": "applied",
    "torch.custom_fwd": "not needed",
    "torch.compile": "applied",
    "megatron.float_types": "not needed",
    "megatron.rng_state": "not needed",
    "megatron.torch_norm": "applied",
    "megatron.swiglu": "applied",
    "megatron.weighted_swiglu": "applied",
}


@pytest.fixture(scope="module")
def bare(lane):
    return lane("redirection_without_shims")[0]


@pytest.fixture(scope="module")
def report(lane):
    return lane("report", enter="trainer")[0]


def test_no_shim_is_refused(report):
    table, _ = report
    assert len(table) >= len(STATES)
    assert not [row for row in table if row["state"] == "refused"]


@pytest.mark.parametrize("name", STATES)
def test_state(report, name):
    (row,) = [row for row in report[0] if row["name"] == name]
    assert row["state"] == STATES[name], row["detail"]


def test_shims_can_be_undone_and_applied_again(report):
    for name, seen in report[1].items():
        assert seen == ("undone", False, "applied", True), name


def test_the_bare_redirection(bare):
    """What the shims rely on, and what they are there for."""
    assert (bare["backend"], bare["device"]) == ("hccl", "npu")
    assert bare["type"] == "torch.npu.FloatTensor"  # torch.tensor_type_names
    assert (
        bare["capability"] is None and bare["broadcast"][0] == "TypeError"
    )  # torch.device_capability
    assert bare["double"] and bare["scripts"]
    assert bare["warns_once"] == ["once"], (
        "it changes the warning rules of the whole process"
    )


def test_broadcast_works_with_the_shims(lane):
    assert (
        lane("broadcast_with_shims", ranks=2, enter="trainer")
        == [([1.0, 1.0], "torch.cuda.FloatTensor")] * 2
    )


# Written by the real transfer_to_npu outside the modules and classes that the shim watches: `undo` cannot
# put it back.
LEFT_BEHIND = """
torch._C._profiler.ProfilerActivity.CPU
torch._C._profiler.ProfilerActivity.CUDA
torch._dynamo.utils.has_triton
torch._inductor.autotune_process.get_gpu_type
torch._inductor.compile_fx.has_triton
torch._inductor.fx_passes.joint_graph.get_gpu_type
torch._inductor.fx_passes.post_grad.get_gpu_type
torch._inductor.runtime.autotune_cache.has_triton
torch._inductor.utils.get_gpu_type
torch._utils._get_available_device_type
torch.autograd.profiler_util.Kernel.__new__
torch.cuda.amp.autocast_mode.autocast
torch.cuda.amp.autocast_mode.custom_bwd
torch.cuda.amp.autocast_mode.custom_fwd
torch.cuda.amp.common.amp_definitely_not_available
torch.cuda.amp.grad_scaler.GradScaler
torch.distributed.checkpoint.filesystem._OverlappingCpuLoader.__init__
torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel.__init__
torch.distributed.pipelining.stage.PipelineStage.__init__
torch.distributed.pipelining.stage.build_stage
torch.fft.fftfreq
torch.fft.rfftfreq
torch.nn.parallel.distributed.DistributedDataParallel.__init__
torch.storage.TypedStorage.is_cuda
torch.utils._device.DeviceContext.__init__
torch.utils._triton.has_triton
torch.utils.cpp_extension.include_paths
""".split()


def test_undoing_the_redirection(lane):
    (seen,) = lane("undo")
    assert (seen["state"], seen["redirected"]) == ("applied", "npu")
    assert seen["cuda"] is not None, "cuda still leads to the NPU"
    assert set(seen["left"]) - set(LEFT_BEHIND) == set()
