"""One feature with everything. Defect: a parser that has one of the options already raises ArgumentError."""

import importlib

import torch

from mindspeed.patch_utils import MindSpeedPatchesManager

DUMMIES = """LayerNorm LayerNormLinear DotProductAttention Linear GroupedLinear distributed.CudaRNGStatesTracker
distributed.activation_recompute_forward fp8.fp8_autocast fp8.FP8GlobalStateManager ops.Sequential ops.FusibleOperation
tensor.QuantizedTensor""".split()
ROPE = "megatron.core.models.common.embeddings.rope_utils"
TE = "megatron.core.extensions.transformer_engine"


class MindSpeedFeaturesManager:
    @classmethod
    def register_features_args(cls, parser):
        group = parser.add_argument_group(title="profile")
        group.add_argument("--profile-level", type=str, default="level0")
        group.add_argument("--optimization-level", type=int, default=2)
        group.add_argument("--attention-mask-type", type=str, default="causal")

    @classmethod
    def remove_patches(cls):
        MindSpeedPatchesManager.remove_patches()

    @classmethod
    def apply_features_pre_patches(cls, args):
        """What must be there before Megatron is imported."""
        from mindspeed.core.megatron_basic.requirements_basic import (
            dummy_compile,
            ensure_contiguous_wrapper,
            torch_all_reduce_double_dtype_bypass_wrapper,
            version_wrapper,
        )
        from mindspeed.core.ssm.chunk_gated_delta_rule import chunk_gated_delta_rule
        from mindspeed.ops.triton.l2norm import l2norm

        register = MindSpeedPatchesManager.register_patch
        register("torch.compile", dummy_compile)
        register("torch.Tensor.view", ensure_contiguous_wrapper)
        register(
            "torch.distributed.all_reduce", torch_all_reduce_double_dtype_bypass_wrapper
        )
        register("importlib.metadata.version", version_wrapper)
        for name in DUMMIES:
            register(
                f"transformer_engine.pytorch.{name}", torch.nn.Module, create_dummy=True
            )
        register(
            "transformer_engine.common.recipe.DelayedScaling",
            torch.nn.Module,
            create_dummy=True,
        )
        register("fla.modules.l2norm.l2norm", l2norm, create_dummy=True)
        register(
            "fla.ops.gated_delta_rule.chunk_gated_delta_rule",
            chunk_gated_delta_rule,
            create_dummy=True,
        )
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def apply_features_patches(cls, args):
        """Layers and functions of Megatron."""
        register = MindSpeedPatchesManager.register_patch
        parts = {
            f"{ROPE}.apply_rotary_pos_emb": "core.fusions.fused_rope:apply_rotary_pos_emb",
            "megatron.core.transformer.transformer_config.TransformerConfig.__init__": "core.megatron_basic.arguments_basic:"
            "transformer_config_init_wrapper",
            "megatron.core.transformer.torch_norm.WrappedTorchNorm": "core.fusions.fused_rms_norm:PTNorm",
            f"{TE}.TENorm": "core.fusions.fused_rms_norm:PTNorm",
            f"{TE}.TELayerNormColumnParallelLinear": "te.pytorch.module.layernorm_column_parallel_linear:"
            "MindSpeedTELayerNormColumnParallelLinear",
            f"{TE}.TEDotProductAttention": "te.pytorch.attention.dot_product_attention.dot_product_attention:"
            "MindSpeedTEDotProductAttention",
        }
        for target, source in parts.items():
            module, name = source.split(":")
            register(target, getattr(importlib.import_module(f"mindspeed.{module}"), name))
        MindSpeedPatchesManager.apply_patches()
