"""Fused operators on npu tensors, forward and backward, against plain PyTorch on the CPU."""

import torch
import torch.nn.functional as F
import torch_npu
from simulator_jobs import names, run_checks


def check_close(fused, plain, *shapes):
    "Outputs and gradients of `fused` on the NPU are those of `plain` on the CPU"
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    found = []
    for function, device in ((fused, "npu"), (plain, "cpu")):
        inputs = [value.to(device).requires_grad_() for value in values]
        output = function(*inputs)
        assert output.device.type == device
        output.square().sum().backward()
        found.append([output.detach().cpu(), *(x.grad.cpu() for x in inputs)])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def check_rms_norm():
    check_close(
        lambda x, g: torch_npu.npu_rms_norm(x, g, 1e-5)[0],
        lambda x, g: F.rms_norm(x, (8,), g, 1e-5),
        (3, 4, 8),
        (8,),
    )


def check_swiglu():
    check_close(torch_npu.npu_swiglu, lambda x: F.silu(x[..., :4]) * x[..., 4:], (3, 8))


def check_rotary_mul():
    def plain(x, cos, sin):
        return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin

    check_close(torch_npu.npu_rotary_mul, plain, (2, 3, 5, 8), (1, 1, 5, 8), (1, 1, 5, 8))


def check_attention():
    def fused(q, k, v):
        mask = torch.ones(2048, 2048, dtype=torch.bool, device="npu").triu(1)
        return torch_npu.npu_fusion_attention(
            q, k, v, 4, "BNSD", atten_mask=mask, scale=8**-0.5, sparse_mode=2
        )[0]

    def plain(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    check_close(fused, plain, (2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))


def check_unknown_arguments_are_refused():
    q = torch.ones(1, 1, 2, 8, device="npu")
    try:
        torch_npu.npu_fusion_attention(q, q, q, 1, "BNSD", sink=torch.ones(1, device="npu"))
    except NotImplementedError as error:
        assert "sink" in str(error)
    else:
        raise AssertionError("an argument that the formula does not know was ignored")


def everything(rank, world_size):
    return run_checks([globals()[name] for name in names(globals())])
