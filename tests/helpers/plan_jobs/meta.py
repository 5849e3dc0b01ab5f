"""Megatron at the real dimensions and the true TP, on PyTorch's meta device.

Process groups are PyTorch's fake ones, so one process is one rank of any world. Weights are made on the
meta device; everything small (rotary tables) is real.
"""

import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from cookbook_npu.config import ModelConfig, ParallelConfig
from cookbook_npu.model.megatron import megatron_config
from cookbook_npu.plan.dimensions import PUBLISHED

FACTORIES = {"empty", "zeros", "ones", "rand", "randn", "full"}


class OnMeta(TorchFunctionMode):
    "New tensors have no memory, and stay where they are when they are moved"

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        if name in FACTORIES:
            kwargs["device"] = "meta"
        if (
            name in ("to", "cuda", "npu", "cpu")
            and isinstance(args[0], torch.Tensor)
            and args[0].is_meta
        ):
            dtypes = [
                a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.dtype)
            ]
            return args[0].type(dtypes[0]) if dtypes else args[0]
        return function(*args, **kwargs)


def hf_names(folder: Path) -> dict[str, list[int]]:
    "Names and shapes of Hugging Face's own model"
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = type(config).__name__.removesuffix("Config")
    cls = getattr(
        transformers,
        f"{kind}ForCausalLM" if kind == "Qwen3" else f"{kind}ForConditionalGeneration",
    )
    with torch.device("meta"):
        model = cls(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {name: list(p.shape) for name, p in model.named_parameters() if name not in tied}


def rank_of_a_model(
    rank: int, world_size: int, name: str, tensor: int, at: int, of: int
) -> dict:
    "What rank `at` of `of` holds, what it exports, and its groups"
    folder = Path(tempfile.mkdtemp())
    values = PUBLISHED[name]
    (folder / "config.json").write_text(json.dumps(values))
    names = hf_names(folder)
    dist.init_process_group("fake", store=FakeStore(), rank=at, world_size=of)
    parallel_state.initialize_model_parallel(tensor, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    from mcore_bridge import get_mcore_model

    config = megatron_config(
        folder,
        ModelConfig(dtype="bfloat16", recompute="full"),
        ParallelConfig(tensor=tensor),
    )

    def whole(t, dim, *_):
        return t if t is None or dim is None else torch.cat([t] * tensor, dim)

    with OnMeta():
        model = get_mcore_model(config)[0]
        config.bridge._all_gather_tp = whole
        exported = {n: list(t.shape) for n, t in config.bridge.export_weights([model])}
    tp, dp = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
    )
    keys = (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
    )
    shown = {
        k: getattr(config, k)
        for k in (
            *keys,
            "sequence_parallel",
            "recompute_granularity",
            "tensor_model_parallel_size",
        )
    }
    return dict(
        parameters=sum(p.numel() for p in model.parameters()),
        devices=sorted({p.device.type for p in model.parameters()}),
        exported=exported,
        hf=names,
        tp=dist.get_process_group_ranks(tp),
        dp=dist.get_process_group_ranks(dp),
        config=shown,
    )
