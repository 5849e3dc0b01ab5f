"""The shims of `npu.shims.mindspeed.features` on the replica of MindSpeed: with each shim and without it."""

import pytest
from places import HELPERS
from proof import each

pytestmark = pytest.mark.lane("devices")

# the replica of MindSpeed in the process, and patched for a model
SKETCH = f"{HELPERS}/mindspeed_start.py:sketch"
PATCHED = f"{HELPERS}/mindspeed_start.py:patched"


REPATCHED = """
    import torch
    from cookbook_npu.npu.shims.mindspeed.adaptor import current
    def again():
        "MindSpeed reverts its patches and patches again"
        current().reset()
        current().repatch(current().arguments({}))
    """


# fmt: off
test_shim = each(
    ("mindspeed.module_scan", "torchvision", """
        import sys, types
        class Lazy(types.ModuleType):
            def __getattr__(self, name):
                if name == "apply_rotary_pos_emb": raise ModuleNotFoundError("No module named 'torchvision'")
                raise AttributeError(name)
        sys.modules["lazy"] = Lazy("lazy")
        def check():
            from cookbook_npu.npu.shims.mindspeed.adaptor import current
            current().reset()
            return current().repatch(current().arguments({}))
    """),
    ("mindspeed.compile", "'function' object has no attribute 'parameters'", REPATCHED + """
    def check():
        again()
        return len(list(torch.compile(torch.nn.Linear(2, 2)).parameters())) == 2
    """),
    ("mindspeed.all_reduce", "IndexError", REPATCHED + """
    import torch.distributed as dist
    dist.init_process_group("hccl")
    def check():
        again()
        x = torch.ones(1, dtype=torch.float64, device="npu")
        y = torch.ones(1, device="npu")
        dist.all_reduce(x)
        dist.all_reduce(tensor=y)
        return x.item() == y.item() == 2
    """, dict(ranks=2)),
    # The IndexError of `test_all_reduce` hides this defect
    ("mindspeed.all_reduce", "check() returned False", REPATCHED + """
    import torch.distributed as dist
    dist.init_process_group("hccl")
    def check():
        again()
        x = torch.ones(1, dtype=torch.float64, device="npu")
        dist.all_reduce(x)
        return x.item() == 2
    """, dict(ranks=2)),
    ("mindspeed.view", "check() returned False", REPATCHED + """
    def check():
        again()
        x = torch.zeros(4, 6, device="npu")
        x[:, :3].view(4, 3, 1).fill_(1)
        return x.sum().item() == 12
    """),
    ("mindspeed.triton", "triton.backends.ascend", """
        import sys, importlib, torch
        def check():
            for name in ("mindspeed.core.ssm", "mindspeed.ops.triton"): sys.modules.pop(name, None)
            rule = importlib.import_module("mindspeed.core.ssm.chunk_gated_delta_rule").chunk_gated_delta_rule
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule as registered
            q, g = torch.randn(1, 4, 2, 8, device="npu"), torch.zeros(1, 4, 2, device="npu")
            return registered is rule and rule(q, q, q, g, g + 1)[0].shape == q.shape
    """),
    ("mindspeed.argument_conflicts", "conflicting option string: --profile-level", """
        import argparse
        from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
        def check():
            parser = argparse.ArgumentParser()
            parser.add_argument("--profile-level", type=int)
            MindSpeedFeaturesManager.register_features_args(parser)
            return parser.conflict_handler == "error" and parser.parse_args([]).profile_level == "level0"
    """),
    ("mindspeed.argument_defaults", "has no attribute 'use_fused_rotary_pos_emb'", """
        from mindspeed.args_utils import get_full_args
        def check(): return get_full_args().use_fused_rotary_pos_emb is False
    """, dict(bootstrap=PATCHED)),
    ("mindspeed.rope_cp_group", "cp_group must be provided", REPATCHED + """
    import types
    class GroupOfOne:
        def size(self): return 1
        def rank(self): return 0
    config = types.SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False
    )
    freqs = torch.rand(4, 1, 1, 8, device="npu")
    def rotate(tokens, **packed):
        from megatron.core.models.common.embeddings import rope_utils
        return rope_utils.apply_rotary_pos_emb(tokens, freqs[:2], config, **packed)
    def check():
        tokens = torch.arange(32., device="npu").view(4, 1, 8)
        ends = torch.tensor([0, 2, 4], dtype=torch.int32, device="npu")
        both = rotate(tokens, cu_seqlens=ends, cp_group=GroupOfOne())
        first = rotate(tokens[:2, None])
        return torch.allclose(both[:2], first[:, 0], atol=1e-5)
    """, dict(bootstrap=PATCHED)),
    ("a dropped shim is applied again", None, REPATCHED + """
    import megatron.core.models.common.embeddings.rope_utils as rope_utils
    from cookbook_npu.npu.shims.registry import registry
    def wrapper_of_another_library(*args, **kwargs): return "wrapped"
    def row():
        from cookbook_npu.npu.shims.bootstrap import model_ready
        return next(r for r in model_ready() if r["name"] == "mindspeed.rope_cp_group")
    def check():
        first = row()
        ours = rope_utils.apply_rotary_pos_emb
        rope_utils.apply_rotary_pos_emb = wrapper_of_another_library
        again()
        # MindSpeed found the shim in its own module
        dropped = rope_utils.apply_rotary_pos_emb.__wrapped__ is ours.__wrapped__
        # as if the shim had been dropped everywhere
        broken = __import__("mindspeed.core.fusions.fused_rope", fromlist=["x"])
        rope_utils.apply_rotary_pos_emb = ours.__wrapped__
        broken.apply_rotary_pos_emb = ours.__wrapped__
        again_applied = row()["detail"].startswith("again: it had been dropped")
        return first["state"] == "applied" and dropped and again_applied
    """, dict(bootstrap=PATCHED)),
    ("mindspeed.optimizer_state", "Unknown sharding_type: fully_reshardable", REPATCHED + """
    from types import SimpleNamespace
    def check():
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        got = {}
        optimizer = SimpleNamespace(
            optimizer=SimpleNamespace(load_state_dict=lambda state: got.update(groups=state)),
            load_parameter_state_from_fully_reshardable=lambda state: got.update(state=state),
        )
        saved = dict(optimizer="groups", param_state="moments", param_state_sharding_type="fully_reshardable")
        DistributedOptimizer.load_state_dict(optimizer, saved)
        return got == dict(groups="groups", state="moments")
    """, dict(bootstrap=PATCHED)),
    ("mindspeed.zero_centered_norm", "check() returned False", """
        import torch, types
        from megatron.core.extensions.transformer_engine import TENorm, TELayerNormColumnParallelLinear
        config = types.SimpleNamespace(
            layernorm_zero_centered_gamma=True, layernorm_epsilon=1e-6, sequence_parallel=False
        )
        def check():
            x = torch.randn(4, 8, device="npu")
            norm = TENorm(config, 8, eps=1e-6).to("npu")
            fused = TELayerNormColumnParallelLinear(8, 8, config=config)
            with torch.no_grad():
                norm.weight.zero_()
                fused.layer_norm_weight.zero_()
                fused.weight.copy_(torch.eye(8))
            expected = torch.nn.functional.rms_norm(x, (8,), eps=1e-6)
            alone = torch.allclose(norm(x), expected, atol=1e-5)
            return alone and torch.allclose(fused(x)[0], expected, atol=1e-5)
    """, dict(bootstrap=PATCHED)),
    bootstrap=SKETCH,
)
# fmt: on
