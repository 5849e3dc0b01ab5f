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
from cookbook_npu.model.tiny import TEXT_ONLY
from cookbook_npu.plan.dimensions import PUBLISHED
from cookbook_npu.rollout.engine import STACKED_EXPERTS

FACTORIES = {"empty", "zeros", "ones", "rand", "randn", "full"}


class OnMeta(TorchFunctionMode):
    "New tensors have no memory, and stay where they are when they are moved"

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        if name == "all_reduce":  # of flags; the group is a fake one
            return None
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
        f"{kind}ForCausalLM" if kind in TEXT_ONLY else f"{kind}ForConditionalGeneration",
    )
    with torch.device("meta"):
        model = cls(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    shapes: dict[str, list[int]] = {}
    for name, p in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        if path.endswith(".experts") and leaf in STACKED_EXPERTS:
            parts = STACKED_EXPERTS[leaf]
            shape = [p.shape[1] // len(parts), p.shape[2]]
            for e in range(len(p)):
                shapes |= {f"{path}.{e}.{part}.weight": shape for part in parts}
        elif name not in tied:
            shapes[name] = list(p.shape)
    return shapes


def rank_of_a_model(
    rank: int, world_size: int, name: str, tensor: int, expert: int, at: int, of: int
) -> dict:
    "What rank `at` of `of` holds, what it exports, and its groups"
    folder = Path(tempfile.mkdtemp())
    values = PUBLISHED[name]
    (folder / "config.json").write_text(json.dumps(values))
    names = hf_names(folder)
    dist.init_process_group("fake", store=FakeStore(), rank=at, world_size=of)
    parallel = ParallelConfig(tensor=tensor, expert=expert)
    parallel_state.initialize_model_parallel(
        tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=parallel.expert_tensor_size,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    from mcore_bridge import get_mcore_model

    config = megatron_config(
        folder,
        ModelConfig(dtype="bfloat16", recompute="full"),
        parallel,
    )
    own: list[torch.Tensor] = []  # the experts of this rank, both matrices

    def whole(t, dim, is_expert):
        split = parallel.expert_tensor_size if is_expert else tensor
        return t if t is None or dim is None else torch.cat([t] * split, dim)

    def of_other_ranks(t, is_expert):
        "Experts of another EP rank have the shapes of this rank's, which come first"
        if is_expert and t is None:
            t = own[-2]
        if is_expert:
            own.append(t)
        return t

    with OnMeta():
        model = get_mcore_model(config)[0]
        config.bridge._all_gather_tp = whole
        config.bridge._broadcast_ep_pp = of_other_ranks
        exported = {n: list(t.shape) for n, t in config.bridge.export_weights([model])}
    tp, dp = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
    )
    mixture = "num_moe_experts moe_router_topk moe_ffn_hidden_size".split()
    keys = """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups
    kv_channels sequence_parallel recompute_granularity tensor_model_parallel_size""".split()
    keys += mixture if config.num_moe_experts else []
    shown = {key: getattr(config, key) for key in keys}
    return dict(
        parameters=sum(p.numel() for p in model.parameters()),
        devices=sorted({p.device.type for p in model.parameters()}),
        exported=exported,
        hf=names,
        tp=dist.get_process_group_ranks(tp),
        dp=dist.get_process_group_ranks(dp),
        config=shown,
    )
