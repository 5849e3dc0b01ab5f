"""Defect: the weight is never read as 1 + w, whatever the configuration says."""

import torch
import torch_npu


class RMSNorm(torch.nn.Module):
    def __init__(
        self, dim: int, eps: float = 1e-6, sequence_parallel: bool = False, config=None
    ):
        super().__init__()
        self.eps, self.config = eps, config
        self.weight = torch.nn.Parameter(torch.ones(dim))
        self.weight.sequence_parallel = sequence_parallel

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def unfused_rmsnorm(self, x):
        return self._norm(x.float()).type_as(x) * self.weight

    def fused_rmsnorm(self, x):
        return torch_npu.npu_rms_norm(x, self.weight, epsilon=self.eps)[0]

    def forward(self, x):
        return (
            self.fused_rmsnorm(x)
            if self.config.use_fused_rmsnorm
            else self.unfused_rmsnorm(x)
        )


class PTNorm:
    def __new__(cls, config, hidden_size: int, eps: float = 1e-5):
        config.use_fused_rmsnorm = True
        return RMSNorm(
            dim=hidden_size,
            eps=eps,
            sequence_parallel=config.sequence_parallel,
            config=config,
        )
