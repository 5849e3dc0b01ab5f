"""Formulas under the operators that only an NPU has, as far as vllm-ascend calls them for Qwen3, Qwen3-MoE,
Qwen3-VL and Qwen3.5, eager and in captured graphs, and MindSpeed for experts. Written from the operators'
schemas and documentation.

A formula gets CPU tensors over the memory of its NPU arguments, so it can write in place; its results move to
the NPU. An argument that a formula does not know must be at its default. `called` counts.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import launches
import torch
import torch.nn.functional as F
from host_memory import device, host
from torch import Tensor

called: Counter[str] = Counter()
_libraries: dict[str, torch.library.Library] = {}
_formulas: dict[str, Callable] = {}


def formula(name: str) -> Callable[[Callable], Callable]:
    "Register a function as the formula of an operator"

    def keep(function: Callable) -> Callable:
        _formulas[name] = function
        return function

    return keep


def install(namespaces: Sequence[str]) -> None:
    "Register the formulas of these namespaces; their libraries must be loaded"
    for name, function in _formulas.items():
        namespace, _, operator = name.partition("::")
        base, _, overload = operator.partition(".")
        packet = getattr(getattr(torch.ops, namespace), base, None)
        if namespace not in namespaces or packet is None:
            continue
        library = _libraries.setdefault(namespace, torch.library.Library(namespace, "IMPL"))
        schema = getattr(packet, overload or "default")._schema
        kernel = _kernel(name, function, schema)
        library.impl(operator, kernel, "PrivateUse1", allow_override=True)


def _kernel(name: str, function: Callable, schema: Any) -> Callable:
    known = set(inspect.signature(function).parameters)
    if "_" in known:  # takes all
        known = {a.name for a in schema.arguments}
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    written = {
        a.name
        for a in schema.arguments
        if a.name == "out" or (a.alias_info and a.alias_info.is_write)
    }

    def kernel(*args: Any, **kwargs: Any) -> Any:
        called[name] += 1
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        strange = [
            k for k, v in given.items() if k not in known and v != defaults.get(k, v)
        ]
        required = [k for k in given if k not in known and k not in defaults]
        if strange or required:
            names = ", ".join(strange + required)
            raise NotImplementedError(f"{name}: the formula has no {names}")
        originals: list[tuple[Tensor, Tensor]] = []
        touched: list[tuple[Tensor, bool]] = []

        def down(value: Any, key: str) -> Any:
            if isinstance(value, list | tuple):
                return [down(one, key) for one in value]
            if not isinstance(value, Tensor):
                return value
            originals.append((host(value), value))
            if value.device.type == "npu":
                touched.append((value, key in written))
            return originals[-1][0]

        def up(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            same = [original for alias, original in originals if alias is value]
            return same[0] if same else device(value)

        def move(result: Any) -> Any:
            several = isinstance(result, list | tuple)
            return type(result)(map(up, result)) if several else up(result)

        arguments = {k: down(v, k) for k, v in given.items() if k in known}
        return launches.launch(name, lambda: function(**arguments), touched, move)

    return kernel


# ---- norms and rotary embeddings


@formula("_C_ascend::npu_add_rms_norm_bias")
def add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    total = x1 + x2
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    y = (wide * scale).to(total.dtype) * gamma
    return y if beta is None else y + beta, scale, total


@formula("npu::npu_add_rms_norm")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Any:
    return add_rms_norm_bias(x1, x2, gamma, None, epsilon)


def _gemma(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale * (1.0 + gamma.float())).to(x.dtype), scale


@formula("_C_ascend::npu_gemma_rms_norm")
def c_gemma_rms_norm(
    x: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    return _gemma(x, gamma, epsilon)


@formula("npu::npu_gemma_rms_norm")
def npu_gemma_rms_norm(
    input: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    return _gemma(input, gamma, epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, neox: bool) -> Tensor:
    if neox:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


@formula("atb::_npu_rotary_embedding")
def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool,
) -> None:
    cos, sin = cos_sin_cache[positions.long()].float().unsqueeze(1).chunk(2, -1)
    for x in (query, key):
        heads = x.view(x.shape[0], -1, head_size)
        heads.copy_(_rotate(heads.float(), cos, sin, is_neox_style))


@formula("npu::npu_mrope")
def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str = "half",
    cache_mode: str = "default",
) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin_cache.float()[positions.long()].chunk(2, -1)
    if positions.ndim == 2 and mrope_section and sum(mrope_section):
        if cache_mode != "default":
            raise NotImplementedError(f"npu_mrope: cache_mode {cache_mode}")
        cos, sin = (_sections(x, mrope_section) for x in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        heads = x.view(x.shape[0], -1, head_size).float()
        size = cos.shape[-1] * 2
        front = _rotate(
            heads[..., :size], cos[:, None], sin[:, None], rotary_mode == "half"
        )
        return torch.cat((front, heads[..., size:]), -1).to(x.dtype).view_as(x)

    return turned(query), turned(key)


def _sections(x: Tensor, sizes: Sequence[int]) -> Tensor:
    "Time, height and width take turns along the last dimension"
    return torch.cat([part[i] for i, part in enumerate(x.split(list(sizes), -1))], -1)


# ---- attention over paged memory


@formula("atb::_npu_reshape_and_cache")
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    slots = slot_indices.long()
    kept = slots >= 0  # padding has slot -1
    for x, cache in ((key, key_cache), (value, value_cache)):
        rows = cache.view(-1, *cache.shape[-2:])
        rows[slots[kept]] = x[: len(slots)][kept].to(cache.dtype)


@formula("npu::npu_scatter_pa_kv_cache")
def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str = "PA_NZ",
) -> None:
    if cache_mode != "Norm":
        raise NotImplementedError(f"npu_scatter_pa_kv_cache: cache_mode {cache_mode}")
    reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


def _attend(
    query: Tensor,  # [queries, heads, size], sequence after sequence
    key: Tensor,  # [sequences, most keys, key/value heads, size]
    value: Tensor,  # as key
    scale: float,
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    causal: bool,  # the last query of a sequence sees all its keys
) -> Tensor:
    lq, lk = torch.tensor(query_lengths)[:, None], torch.tensor(key_lengths)[:, None]
    steps = torch.arange(int(lq.max()))[None]
    there = steps < lq
    rows = ((lq.cumsum(0) - lq) + steps).clamp(max=len(query) - 1)
    groups = query.shape[1] // key.shape[2]
    k, v = (x.float().repeat_interleave(groups, 2) for x in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query[rows].float(), k) * scale
    keys = torch.arange(k.shape[1])[None, None]
    hidden = keys >= lk[..., None]
    if causal:
        hidden = hidden | (keys > (steps + lk - lq)[..., None])
    weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1).nan_to_num()
    # memory of a page that was never written may hold anything
    v = v.masked_fill((keys[0, 0] >= lk)[..., None, None], 0.0)
    result = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    output = torch.zeros_like(query)
    output[rows[there]] = result[there].to(query.dtype)
    return output


def _pages(
    cache: Tensor, table: Tensor, lengths: Sequence[int], heads: int, size: int
) -> Tensor:
    "[sequences, most keys, heads, size] out of paged memory"
    flat = cache.reshape(cache.shape[0], -1, heads, size)
    steps = torch.arange(max(lengths))
    return flat[table.long()[:, steps // flat.shape[1]], steps % flat.shape[1]]


def _lengths(ends: Sequence[int]) -> list[int]:
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


@formula("npu::npu_fused_infer_attention_score")
def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] = (),
    actual_seq_lengths_kv: Sequence[int] = (),
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
) -> tuple[Tensor, Tensor]:
    if input_layout != "TND" or sparse_mode not in (0, 3) or query.shape[1] != num_heads:
        raise NotImplementedError(f"layout {input_layout}, sparse_mode {sparse_mode}")
    size, heads = query.shape[-1], num_key_value_heads or num_heads
    ends = list(actual_seq_lengths)
    if block_table is None:  # the keys' numbers are ends of sequences
        key_ends = list(actual_seq_lengths_kv)[: len(ends)]
        lengths = _lengths(key_ends)
        starts = torch.tensor([0, *key_ends[:-1]])[:, None]
        rows = (starts + torch.arange(max(lengths))).clamp(max=len(key) - 1)
        k, v = key[rows], value[rows]
    else:  # the keys' numbers are lengths of sequences
        lengths = list(actual_seq_lengths_kv)[: len(ends)]
        table = block_table[: len(ends)]
        k, v = (_pages(x, table, lengths, heads, size) for x in (key, value))
    output = _attend(query, k, v, scale, _lengths(ends), lengths, sparse_mode == 3)
    return output, query.new_empty(0, dtype=torch.float32)


@formula("npu::npu_fused_infer_attention_score.out")
def fused_infer_attention_score_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] = (),
    actual_seq_lengths_kv: Sequence[int] = (),
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    workspace: Tensor | None = None,
    out: Sequence[Tensor],
) -> Sequence[Tensor]:
    given = {k: v for k, v in locals().items() if k not in ("workspace", "out")}
    out[0].copy_(fused_infer_attention_score(**given)[0].view_as(out[0]))
    return out


@formula("npu::_npu_fused_infer_attention_score_get_max_workspace")
def fused_infer_attention_workspace(query: Tensor, **_: Any) -> Tensor:
    return query.new_empty(16)


@formula("atb::_npu_paged_attention")
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
    *,
    workspace: Tensor | None = None,
) -> None:
    lengths = context_lens.tolist()
    n, size = len(lengths), query.shape[-1]
    caches = (key_cache, value_cache)
    k, v = (_pages(x, block_table[:n], lengths, num_kv_heads, size) for x in caches)
    out[:n] = _attend(query[:n], k, v, scale_value, [1] * n, lengths, False)


# ---- sampling, matrices, formats


@formula("_C_ascend::npu_apply_top_k_top_p")
@formula("npu::npu_top_k_top_p")
def top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    ordered, places = logits.sort(-1)
    if k is not None:
        rank = (ordered.shape[-1] - k.long()).clamp(min=0)
        least = ordered.gather(1, rank[:, None])
        ordered = ordered.masked_fill(ordered < least, float("-inf"))
    if p is not None:
        tail = ordered.float().softmax(-1).cumsum(-1) <= 1 - p[:, None]
        tail[:, -1] = False
        ordered = ordered.masked_fill(tail, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, places, ordered)


@formula("npu::npu_dynamic_quant")
def dynamic_quant(input: Tensor) -> tuple[Tensor, Tensor]:
    "Computed while vllm-ascend registers patterns of its compiler, in bfloat16"
    scale = input.float().abs().amax(-1) / 127
    return (input / scale[..., None]).round().to(torch.int8), scale


@formula("npu::npu_quantize")
def quantize(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    "As above"
    scaled = input / scales if div_mode else input * scales
    offset = 0 if zero_points is None else zero_points
    return (scaled + offset).round().clamp(-128, 127).to(torch.int8)


@formula("atb::_npu_matmul_add_fp32")
def matmul_add_fp32(x: Tensor, weight: Tensor, C: Tensor) -> None:
    C.add_(x.float().T @ weight.float())


@formula("npu::npu_format_cast")
def format_cast(input: Tensor, acl_format: int) -> Tensor:
    if acl_format not in (0, 2):  # NCHW, ND
        raise NotImplementedError(
            f"format {acl_format}: host memory has no fractal layouts"
        )
    return input


@formula("_C_ascend::get_masked_input_and_mask")
def masked_input_and_mask(
    input: Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> tuple[Tensor, Tensor]:
    begin, end = org_vocab_start_index, org_vocab_end_index
    own = (input >= begin) & (input < end)
    added = (input >= added_vocab_start_index) & (input < added_vocab_end_index)
    offset = added_vocab_start_index - (end - begin) - num_org_vocab_padding
    kept = own | added
    return (input - begin * own - offset * added) * kept, ~kept


# ---- adapters: segments of consecutive tokens, each with the slot of its adapter, -1: none


def _segments(slots: Tensor, lengths: Tensor, tokens: int) -> Iterator[tuple[int, slice]]:
    start = 0
    for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
        end = min(start + length, tokens)
        if slot >= 0 and end > start:
            yield slot, slice(start, end)
        start = end


@formula("_C_ascend::sgmv_shrink")
def sgmv_shrink(
    x: Tensor,
    weight: Tensor,  # [slots, 1, rank, size]
    lora_indices: Tensor,
    seq_len: Tensor,
    y: Tensor,
    scale: float,
) -> None:
    for slot, rows in _segments(lora_indices, seq_len, len(x)):
        a = weight[slot].reshape(-1, weight.shape[-1]).float()
        y[rows] += (x[rows].float() @ a.T * scale).to(y.dtype)


@formula("_C_ascend::sgmv_expand")
def sgmv_expand(
    x: Tensor,
    weight: Tensor,  # [slots, 1, size, rank]
    lora_indices: Tensor,
    seq_len: Tensor,
    y: Tensor,
    slice_offset: int,
    slice_size: int,
) -> Tensor:
    columns = slice(slice_offset, slice_offset + slice_size)
    for slot, rows in _segments(lora_indices, seq_len, len(x)):
        b = weight[slot].reshape(-1, weight.shape[-1]).float()
        y[rows, columns] += (x[rows].float() @ b.T).to(y.dtype)
    return y


# ---- mixtures of experts


@formula("_C_ascend::moe_gating_top_k")
def gating_top_k(
    x: Tensor,  # [tokens, experts]
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if (k_group, group_count, norm_type, out_flag) != (1, 1, 0, False):
        raise NotImplementedError(
            f"moe_gating_top_k: {group_count} groups, norm {norm_type}"
        )
    scores = x.float().softmax(-1)
    weights, experts = scores.topk(k)
    if renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), experts.int(), scores


@formula("_C_ascend::npu_moe_init_routing_custom")
def init_routing(
    x: Tensor,  # [tokens, size]
    expert_idx: Tensor,  # [tokens, top-k]
    *,
    active_num: int = -1,
    expert_num: int = -1,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    "Copies of the tokens in the order of their experts, where each copy went, and counts of the experts"
    every = (
        tuple(active_expert_range) == (0, expert_num) and active_num == expert_idx.numel()
    )
    if not every or (expert_tokens_num_type, quant_mode) != (1, -1):
        raise NotImplementedError(
            f"npu_moe_init_routing: {active_expert_range}, {quant_mode}"
        )
    order = expert_idx.flatten().argsort(stable=True)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(len(order), dtype=torch.int32)
    counts = torch.bincount(expert_idx.flatten(), minlength=expert_num)
    return x[order // expert_idx.shape[1]], places, counts, x.new_empty(0).float()


@formula("npu::npu_moe_token_unpermute")
def token_unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None
) -> Tensor:
    copies = permuted_tokens[sorted_indices.long()].float()
    if probs is None:
        return copies.to(permuted_tokens.dtype)
    weighed = copies.unflatten(0, probs.shape) * probs.float()[..., None]
    return weighed.sum(1).to(permuted_tokens.dtype)


@formula("npu::npu_grouped_matmul")
def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
) -> list[Tensor]:
    "Rows (group_type 0) or columns (2) of one matrix, group after group, each times its own matrix"
    if len(x) != 1 or split_item not in (2, 3) or group_type not in (0, 2):
        raise NotImplementedError(
            f"npu_grouped_matmul: split {split_item}, type {group_type}"
        )
    assert group_list is not None
    sizes = (
        group_list if group_list_type == 1 else group_list.diff(prepend=group_list[:1] * 0)
    )
    groups = sizes.tolist()
    (whole,) = x
    if group_type == 2:
        parts = zip(whole.split(groups, 1), weight[0].split(groups), strict=True)
        return [torch.stack([a @ b for a, b in parts])]
    matrices = weight[0] if len(weight) == 1 else weight  # [groups, inputs, outputs]
    used = sum(groups)
    parts = zip(whole[:used].split(groups), matrices, strict=True)
    rest = whole.new_zeros(len(whole) - used, matrices[0].shape[-1])
    return [torch.cat([*(a @ b for a, b in parts), rest])]


# ---- gated delta nets (Qwen3.5)


@formula("_C_ascend::npu_fused_gdn_gating")
def fused_gdn_gating(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[Tensor, Tensor]:
    step = F.softplus(a.float() + dt_bias.float(), beta, threshold)
    g = -A_log.float().exp() * step
    return g.unsqueeze(0), b.float().sigmoid().to(b.dtype).unsqueeze(0)


@formula("_C_ascend::npu_causal_conv1d_custom")
def causal_conv1d(
    output: Tensor,
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    bias_opt: Tensor | None = None,
    query_start_loc_opt: Any = None,
    cache_indices_opt: Any = None,
    initial_state_mode_opt: Any = None,
    num_accepted_tokens_opt: Any = None,
    activation_mode: int = 0,
    pad_slot_id: int = -1,
    run_mode: int = 0,
) -> Tensor:
    if num_accepted_tokens_opt is not None and len(num_accepted_tokens_opt):
        raise NotImplementedError("causal_conv1d: speculative decoding")
    width = weight.shape[0]
    indices = torch.as_tensor(cache_indices_opt)
    slots = indices.reshape(len(indices), -1)[:, 0].long().tolist()
    ends = range(len(x) + 1)
    if query_start_loc_opt is not None:
        ends = torch.as_tensor(query_start_loc_opt).long().tolist()
    modes = None
    if initial_state_mode_opt is not None and len(initial_state_mode_opt):
        modes = torch.as_tensor(initial_state_mode_opt).long().tolist()
    kernel = weight.float().T.unsqueeze(1)  # [channels, 1, width]
    for i, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        if end <= start or i >= len(slots) or slots[i] == pad_slot_id:
            continue
        state = conv_state[slots[i], : width - 1]
        fresh = run_mode == 0 and modes is not None and not modes[i]
        before = torch.zeros_like(state) if fresh else state
        row = torch.cat((before, x[start:end].to(before.dtype)))
        y = F.conv1d(row.float().T[None], kernel, groups=kernel.shape[0])[0].T
        if bias_opt is not None:
            y = y + bias_opt.float()
        output[start:end] = (F.silu(y) if activation_mode else y).to(output.dtype)
        conv_state[slots[i], : width - 1] = row[-(width - 1) :].clone()
    return output


def _all_heads(x: Tensor, heads: int) -> Tensor:
    "Key heads repeated for their groups of value heads; heads are the last but one dimension"
    return x if x.shape[-2] == heads else x.repeat_interleave(heads // x.shape[-2], -2)


@formula("_C_ascend::npu_recurrent_gated_delta_rule")
def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    *,
    beta: Tensor,
    scale: float = 1.0,
    actual_seq_lengths: Tensor | None = None,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    g: Tensor,
    gk: Tensor | None = None,
) -> Tensor:
    if num_accepted_tokens is not None or gk is not None:
        raise NotImplementedError("recurrent_gated_delta_rule: speculative decoding, gk")
    heads, slots = value.shape[1], ssm_state_indices.flatten().long().tolist()
    q, k = _all_heads(query, heads).float(), _all_heads(key, heads).float()
    out = torch.zeros_like(value)
    for t in range(min(len(value), len(slots))):
        if slots[t] < 0:
            continue
        S = state[slots[t]].float() * g[t].float().exp()[:, None, None]  # [heads, V, K]
        error = value[t].float() - torch.einsum("hvk,hk->hv", S, k[t])
        S = S + (error * beta[t].float()[:, None])[:, :, None] * k[t][:, None]
        out[t] = (torch.einsum("hvk,hk->hv", S, q[t]) * scale).to(out.dtype)
        state[slots[t]] = S.to(state.dtype)
    return out


def _chunks(
    tokens: int, ends: Sequence[int] | None, size: int
) -> Iterator[tuple[int, bool, int, int, bool]]:
    "Sequence, whether the chunk is its first, start, end, whether it is its last"
    cu = [0, tokens] if ends is None else [int(end) for end in ends]
    for sequence, (a, b) in enumerate(zip(cu, cu[1:], strict=False)):
        for start in range(a, b, size):
            yield sequence, start == a, start, min(start + size, b), start + size >= b


@formula("_C_ascend::chunk_gated_delta_rule_fwd_h")
def chunk_states(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    save_new_value: bool = True,
    cu_seqlens: Sequence[int] | None = None,
    chunk_indices: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, tokens = u.shape[1], u.shape[2]
    k = _all_heads(k.transpose(1, 2), heads).transpose(1, 2).float()
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    states, new_values = [], torch.empty_like(u)
    shape = (sequences, heads, k.shape[-1], u.shape[-1])
    final = torch.zeros(shape) if initial_state is None else initial_state.float().clone()
    S = torch.zeros(shape[1:])
    for n, first, a, b, last in _chunks(tokens, cu_seqlens, chunk_size):
        S = final[n].clone() if first else S
        states.append(S)
        new = u[0, :, a:b].float() - w[0, :, a:b].float() @ S
        new_values[0, :, a:b] = new.to(u.dtype)
        decay = g[0, :, a:b].float()
        end = decay[:, -1:]
        weighted = new * (end - decay).exp()[..., None]
        S = S * end.exp()[..., None] + k[0, :, a:b].transpose(1, 2) @ weighted
        if last:
            final[n] = S
    kind = u.dtype if initial_state is None else initial_state.dtype
    return torch.stack(states, 1)[None].to(u.dtype), new_values, final.to(kind)


@formula("_C_ascend::chunk_fwd_o")
def chunk_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    scale: float,
    g: Tensor,
    cu_seqlens: Sequence[int] | None = None,
    chunk_indices: Any = None,
    chunk_size: int = 64,
) -> Tensor:
    heads, tokens = v.shape[1], v.shape[2]
    q, k = (_all_heads(x.transpose(1, 2), heads).transpose(1, 2).float() for x in (q, k))
    out = torch.empty_like(v)
    for i, (_, _, a, b, _) in enumerate(_chunks(tokens, cu_seqlens, chunk_size)):
        decay = g[0, :, a:b].float()
        before = (q[0, :, a:b] * decay.exp()[..., None]) @ h[0, :, i].float()
        above = torch.ones(b - a, b - a).triu(1).bool()
        # the exponential above the diagonal may be infinite
        ratio = (decay[..., None] - decay[:, None]).masked_fill(above, float("-inf")).exp()
        within = (q[0, :, a:b] @ k[0, :, a:b].transpose(1, 2)) * ratio
        result = before + within @ v[0, :, a:b].float()
        out[0, :, a:b] = (result * scale).to(out.dtype)
    return out
