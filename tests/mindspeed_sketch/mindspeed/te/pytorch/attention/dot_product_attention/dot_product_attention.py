"""Attention. Defects: passes on fields of PackedSeqParams it does not take; takes the kind of mask from the process."""

import dataclasses

import torch
import torch_npu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from mindspeed.core.transformer.flash_attention.generate_mask.generate_mask import (
    get_attention_mask,
)

SPARSE_MODE = {"no_mask": 0, "general": 1, "causal": 2}


class DotProductAttention(torch.nn.Module):
    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
    ):
        thd, heads, scale = (
            qkv_format == "thd",
            query_layer.shape[-2],
            query_layer.shape[-1] ** -0.5,
        )
        inputs = [x if thd else x.flatten(2) for x in (query_layer, key_layer, value_layer)]
        ends = (
            dict(
                actual_seq_qlen=cu_seqlens_q.tolist(),
                actual_seq_kvlen=cu_seqlens_kv.tolist(),
            )
            if thd
            else {}
        )
        layout, mode = "TND" if thd else "SBH", SPARSE_MODE.get(attn_mask_type, 0)
        window = dict(pre_tockens=65536, next_tockens=0, sparse_mode=mode)
        return torch_npu.npu_fusion_attention(
            *inputs, heads, layout, atten_mask=attention_mask, scale=scale, **window, **ends
        )[0]


class MindSpeedTEDotProductAttention(DotProductAttention):
    def __init__(self, config, layer_number, attn_mask_type, attention_type, **kwargs):
        super().__init__()
        self.config, self.attn_mask_type, self.qkv_format = config, attn_mask_type, "sbhd"
        self.kept_packed_seq_params = {
            field.name for field in dataclasses.fields(PackedSeqParams)
        }

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type,
        attention_bias=None,
        packed_seq_params=None,
    ):
        if attention_mask is None and self.attn_mask_type == AttnMaskType.causal:
            attention_mask = get_attention_mask(self.config)
        packed = (
            {name: getattr(packed_seq_params, name) for name in self.kept_packed_seq_params}
            if packed_seq_params
            else {}
        )
        return super().forward(
            query,
            key,
            value,
            attention_mask,
            attn_mask_type=self.config.attention_mask_type,
            **packed,
        )
