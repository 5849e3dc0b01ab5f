"""One micro-batch of a tiny Qwen3: which fused kernels it calls, and what it brings back to the host."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

KERNELS = ("npu_rms_norm", "npu_swiglu", "npu_rotary_mul", "npu_fusion_attention")
# the second one is longer than the first, so that their borders matter
SAMPLES = [([2, 3, 4], [5, 6]), ([7], [8, 9, 10, 11, 3])]


def count_kernels() -> Counter:
    "Calls of each fused kernel from now on, and of attention in each layout"
    import torch_npu

    calls: Counter = Counter()

    def counted(name):
        kernel = getattr(torch_npu, name)

        def call(*args, **kwargs):
            calls[name] += 1
            if name == "npu_fusion_attention":
                calls[f"{name} {args[4]}"] += 1
            return kernel(*args, **kwargs)

        return call

    for name in KERNELS:
        setattr(torch_npu, name, counted(name))
    return calls


def micro_batch(
    rank: int, world_size: int, folder: str, fused: bool = True, recompute: str = "none"
) -> dict[str, object]:
    "Forward and backward pass of a packed row, and the same with its borders on the device"
    from host_reads import host_reads

    from cookbook_npu.config import ModelConfig, ParallelConfig
    from cookbook_npu.model.logprobs import packed_logprobs
    from cookbook_npu.model.megatron import init_parallel, load_model
    from cookbook_npu.model.packing import pack
    from cookbook_npu.npu.shims.mindspeed.adaptor import current

    parallel = ParallelConfig(tensor=world_size)
    init_parallel(parallel, seed=0, timeout_s=300)
    settings = ModelConfig(dtype="float32", fused_kernels=fused, recompute=recompute)
    model = load_model(Path(folder), settings, parallel)
    calls = count_kernels()
    samples = [SimpleNamespace(prompt_ids=p, response_ids=r) for p, r in SAMPLES]
    batch = pack(samples, model.layout.row_multiple).to(model.layout.device)
    model.zero_grad()
    with host_reads() as reads:
        logp, _ = packed_logprobs(model, batch, 1.0, 3)
        logp.sum().backward()
    result = {
        "adaptor": current().name,
        "calls": dict(calls),
        "reads": reads,
        "logp": logp.detach().cpu(),
        "grads": {n: p.main_grad.norm().item() for n, p in model.module.named_parameters()},
    }
    fetched = replace(batch, cu_seqlens=batch.cu_seqlens.to(model.layout.device))
    with host_reads() as reads:
        packed_logprobs(model, fetched, 1.0, 3)
    return result | {"reads of borders on the device": len(reads)}
