"""The stubs of flash-linear-attention and causal-conv1d in transformers' Qwen3.5 layer."""

import pytest
import transformers
from packaging.version import Version
from proof import prove, run_check

from cookbook_npu.npu.shims.fla import ConvShim, FlaShim

PACKED = """
    import sys

    import torch
    from cookbook_npu.npu.shims import fla

    for shim in (fla.FlaShim, fla.ConvShim):
        registry.apply(shim.name)


    def check():
        # transformers looks for the packages at import
        for name in [n for n in sys.modules if n.startswith("transformers.models.qwen3_5")]:
            del sys.modules[name]
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

        torch.manual_seed(0)
        sizes = dict(linear_num_key_heads=2, linear_num_value_heads=4)
        sizes |= dict(linear_key_head_dim=8, linear_value_head_dim=8, hidden_size=16)
        config = Qwen3_5TextConfig(
            num_hidden_layers=1, layer_types=["linear_attention"], **sizes
        )
        layer = Qwen3_5GatedDeltaNet(config, 0)
        x = torch.randn(1, 15, 16)
        cu = torch.tensor([0, 4, 5, 15])
        packed = layer(x, cu_seq_lens_q=cu)
        alone = []
        for begin, end in zip(cu[:-1], cu[1:], strict=True):
            alone.append(layer(x[:, begin:end]))
        return torch.allclose(packed, torch.cat(alone, 1), atol=1e-5)
"""


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.9.0"),
    reason="before 5.9.0 transformers' layer takes no packed rows: test_model_equality.py has them",
)
@pytest.mark.parametrize("shim", [FlaShim.name, ConvShim.name])
def test_packed_rows_are_those_of_each_sequence(shim):
    prove(shim, PACKED, "check() returned False", bootstrap=None)


def test_verify_fails_for_what_ignores_the_boundaries():
    run_check(
        """
        import importlib
        from cookbook_npu.npu.shims import fla

        FORGETFUL = {
            "fla.ops.gated_delta_rule": ("chunk_gated_delta_rule", "cu_seqlens"),
            "causal_conv1d": ("causal_conv1d_fn", "seq_idx"),
        }


        def forget(function, argument):
            def forgetful(*args, **kwargs):
                return function(*args, **kwargs | {argument: None})

            return forgetful


        def check():
            verdicts = []
            for shim in (fla.FlaShim, fla.ConvShim):
                assert registry.apply(shim.name).state == "applied"
                verdicts.append(registry[shim.name].verify())
            for name, (function, argument) in FORGETFUL.items():
                module = importlib.import_module(name)
                setattr(module, function, forget(getattr(module, function), argument))
            return verdicts == [True, True] and not (
                fla.FlaShim().verify() or fla.ConvShim().verify()
            )
        """,
        bootstrap=None,
    )
