"""The shims of `npu.shims.mindspeed.flash_attention` on the replica of MindSpeed: masks, packed sequences."""

from places import HELPERS
from proof import each

PATCHED = f"{HELPERS}/mindspeed_start.py:patched"


ATTEND = """
    import torch, types
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    torch.manual_seed(1)
    config = types.SimpleNamespace(kv_channels=8, use_flash_attn=True, attention_mask_type="causal")
    q, k, v = torch.randn(3, 10, 1, 2, 8, device="npu")  # S, B, N, D
    def attention(kind, mask=None, packed=None, device="npu"):
        module = TEDotProductAttention(config, 1, AttnMaskType[kind], "self")
        inputs = [x[:, 0] if packed else x for x in (q, k, v)]
        return module(*inputs, mask, AttnMaskType[kind], packed_seq_params=packed).reshape(10, 2, 8)
    def plain(**how):
        heads_first = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, **how)
        return out[0].transpose(0, 1)
    def same(a, b): return torch.allclose(a, b, atol=1e-5)
    ends = torch.tensor([0, 10], dtype=torch.int32, device="npu")
    """


# fmt: off
test_shim = each(
    ("mindspeed.packed_fields", "got an unexpected keyword argument", ATTEND + """
    def check():
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        return same(attention("causal", packed=packed), plain(is_causal=True))
    """),
    ("a field that changes the result is refused", None, ATTEND + """
    from fastcore.test import test_fail
    def check():
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, local_cp_size=2)
        test_fail(lambda: attention("causal", packed=packed), contains="local_cp_size=2")
        return True
    """),
    ("mindspeed.causal_mask", "sparse_mode 2 got an atten_mask of shape None", ATTEND + """
    def check():
        assert same(attention("causal"), plain(is_causal=True))
        return same(attention("no_mask"), plain())
    """),
    ("mindspeed.causal_mask", "It takes the compressed mask", ATTEND + """
    dense = torch.ones(1, 1, 10, 10, dtype=torch.bool, device="npu").triu(1)
    padding = torch.tensor([False]*8 + [True]*2, device="npu")[None, None, None]
    def check():
        assert same(attention("padding", padding), plain(attn_mask=~padding))
        assert same(attention("padding_causal", padding), plain(attn_mask=~(padding | dense)))
        return same(attention("causal", dense), plain(is_causal=True))
    """),
    # And the configuration is restored after each call
    ("the compressed mask is created once", None, ATTEND + """
    import torch_npu
    def check():
        kernel = torch_npu.npu_fusion_attention
        masks = []
        def recorded(*args, **kwargs):
            masks.append(kwargs["atten_mask"])
            return kernel(*args, **kwargs)
        torch_npu.npu_fusion_attention = recorded
        for kind in ("causal", "no_mask", "causal"):
            attention(kind)
        assert config.attention_mask_type == "causal"
        return masks[0] is masks[2] and masks[1] is None
    """),
    ("mindspeed.sequence_ends", "without a leading 0", ATTEND + """
    borders = torch.tensor([0, 4, 10], dtype=torch.int32)  # on the host, as in model.packing
    def check():
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders)
        together = attention("causal", packed=packed)
        first = plain(is_causal=True)[:4]
        return same(together[:4], first) and not same(together[4:], plain(is_causal=True)[4:])
    """),
    bootstrap=PATCHED,
)
# fmt: on
