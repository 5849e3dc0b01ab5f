"""What `kernel_jobs.micro_batch` has to say where MindSpeed, or the sketch of it, adapts Megatron."""

import pytest

LAYERS = 2
# of each layer: at its input, of queries, of keys, before the MLP; and one at the end
NORMS = 4 * LAYERS + 1


def check_kernels(found: dict, passes: int = 1) -> None:
    "Every norm, gate and attention is the fused kernel, and nothing comes back to the host"
    assert found["adaptor"] == "mindspeed"
    assert found["calls"] == {
        "npu_rms_norm": NORMS * passes - (passes - 1),  # the last norm is not recomputed
        "npu_swiglu": LAYERS * passes,
        "npu_rotary_mul": 2 * LAYERS * passes,  # queries and keys
        "npu_fusion_attention": LAYERS * passes,
        "npu_fusion_attention TND": LAYERS * passes,
    }
    assert found["reads"] == []
    # what the count would show: two lists for each attention
    assert found["reads of borders on the device"] >= 2 * LAYERS


def check_same(found: dict, want: dict) -> None:
    "The log-probs and gradients of another way to compute them"
    assert (found["logp"] - want["logp"]).abs().max() <= 1e-5
    assert found["grads"] == pytest.approx(want["grads"], rel=1e-3, abs=1e-5)
