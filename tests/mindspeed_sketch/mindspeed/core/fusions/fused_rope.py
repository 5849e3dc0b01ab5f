"""Defect: `cp_group` is taken and not passed on."""

from typing import Optional

import torch
from torch import Tensor


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    config,
    cu_seqlens: Optional[Tensor] = None,  # noqa: UP045
    mscale: float = 1.0,
    cp_group: torch.distributed.ProcessGroup = None,
):
    from megatron.core.models.common.embeddings import rope_utils

    latent = config.multi_latent_attention
    rotation = dict(
        rotary_interleaved=config.rotary_interleaved,
        multi_latent_attention=latent,
        mscale=mscale,
    )
    if cu_seqlens is None:
        return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, **rotation)
    return rope_utils._apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, **rotation)
