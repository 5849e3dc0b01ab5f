"""The compressed causal mask, made once."""

import torch

_GLOBAL_ATTN_MASK = None


def set_attention_mask(attn_mask):
    global _GLOBAL_ATTN_MASK
    _GLOBAL_ATTN_MASK = attn_mask


def get_attention_mask(config):
    global _GLOBAL_ATTN_MASK
    if _GLOBAL_ATTN_MASK is None:
        if not getattr(config, "use_flash_attn", False):
            raise RuntimeError(
                "Please set micro_batch_size or set use_flash_attn=True in config."
            )
        _GLOBAL_ATTN_MASK = torch.triu(
            torch.ones((2048, 2048), device="npu", dtype=torch.bool), diagonal=1
        )
    return _GLOBAL_ATTN_MASK
