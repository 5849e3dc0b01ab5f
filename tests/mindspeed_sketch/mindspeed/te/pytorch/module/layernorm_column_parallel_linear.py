"""Norm and linear layer in one. Defect: the weight of the norm is never read as 1 + w."""

import torch
import torch_npu


class MindSpeedTELayerNormColumnParallelLinear(torch.nn.Module):
    def __init__(self, input_size: int, output_size: int, *, config, **kwargs):
        super().__init__()
        self.config = config
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, device="npu"))
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, device="npu"))

    def _rmsnorm(self, inp):
        if self.config.use_fused_rmsnorm:
            return torch_npu.npu_rms_norm(
                inp, self.layer_norm_weight, epsilon=self.config.layernorm_epsilon
            )[0]
        return (
            inp
            * torch.rsqrt(inp.pow(2).mean(-1, keepdim=True) + self.config.layernorm_epsilon)
            * self.layer_norm_weight
        )

    def forward(self, inp):
        return torch.nn.functional.linear(self._rmsnorm(inp), self.weight), None
