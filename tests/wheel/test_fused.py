"""The fused operators under torch_npu's own names and schemas, computed by the simulator's formulas."""

import pytest


@pytest.fixture(scope="module")
def fused(lane):
    return lane("npu_wheel.fused_jobs:everything")[0]


@pytest.mark.parametrize(
    "name",
    ["rms_norm", "swiglu", "rotary_mul", "attention", "unknown_arguments_are_refused"],
)
def test_operator(fused, name):
    assert fused[f"check_{name}"] == ""
