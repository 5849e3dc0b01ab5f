"""The gated delta rule in Triton kernels."""

from mindspeed.ops.triton.l2norm import l2norm  # noqa: F401


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None):
    raise NotImplementedError
