"""The shims of `npu.shims.megatron_core.imports`: each check passes with its shim and fails without."""

from proof import SIMULATED_CUDA, each

# fmt: off
test_shim = each(
    ("megatron.jit_fuser", "BackendCompilerFailed", """
        import torch
        from cookbook_npu.npu.shims.megatron_core import imports
        from cookbook_npu.npu.shims.transformer_engine import package
        registry.undo("torch.compile")  # as if Megatron was imported before any shim
        registry.apply("transformer_engine.stub")
        import megatron.core
        assert registry.apply("megatron.jit_fuser").state == "applied"
        from megatron.core.fusions.fused_bias_swiglu import swiglu as captured
        def check():
            from megatron.core.fusions.fused_bias_swiglu import swiglu
            from megatron.core.transformer.moe import experts
            x = torch.ones(2, 8, device="cuda")
            assert captured(x).shape == (2, 4)
            return swiglu(x).shape == (2, 4) and experts.jit_fuser(len) is len
    """),
    ("megatron.swiglu", "check() returned False", """
        import torch, torch_npu
        from cookbook_npu.npu.shims.megatron_core import imports
        from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, swiglu
        assert registry.apply("megatron.jit_fuser").state in ("applied", "not needed")
        assert registry.apply("megatron.swiglu").state == "applied"
        def check():
            kernel, torch_npu.npu_swiglu = torch_npu.npu_swiglu, lambda x: calls.append(1) or kernel(x)
            calls = []
            x = torch.randn(3, 2, 8, device="cuda", requires_grad=True)
            y = x.detach().clone().requires_grad_()
            fused, plain = bias_swiglu_impl(x, None), swiglu(y)
            fused.sum().backward()
            plain.sum().backward()
            torch_npu.npu_swiglu = kernel
            same = torch.allclose(fused, plain) and torch.allclose(x.grad, y.grad)
            return same and calls == [1]
    """, dict(bootstrap="trainer")),
    ("megatron.weighted_swiglu", "check() returned False", """
        import torch, torch_npu
        from cookbook_npu.npu.shims.megatron_core import imports
        from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl, weighted_swiglu
        assert registry.apply("megatron.jit_fuser").state in ("applied", "not needed")
        assert registry.apply("megatron.weighted_swiglu").state == "applied"
        def check():
            kernel, torch_npu.npu_swiglu = torch_npu.npu_swiglu, lambda x: calls.append(1) or kernel(x)
            calls, found = [], []
            x, w = torch.randn(6, 8, device="cuda"), torch.rand(6, 1, device="cuda")
            for fused in (True, False):
                a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
                out = weighted_bias_swiglu_impl(a, None, b) if fused else weighted_swiglu(a, b)
                out.square().sum().backward()
                found.append((out, a.grad, b.grad))
            torch_npu.npu_swiglu = kernel
            same = all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*found))
            return same and calls == [1, 1]
    """, dict(bootstrap="trainer")),
    # In a worker that starts in the correct order the tuples are correct; here they hold CUDA's types
    ("megatron.float_types", "check() returned False", """
        import sys, torch, types
        from megatron.core.transformer import module
        from cookbook_npu.npu.shims.megatron_core import imports
        name = "megatron.legacy.model.module"
        legacy = sys.modules[name] = types.ModuleType(name)
        for owner in (module, legacy):
            for kind in imports.FLOAT_TYPES:
                setattr(owner, kind, (torch.FloatTensor,))  # as Megatron sees them without the redirection
        assert registry.apply("megatron.float_types").state == "applied"
        def check():
            x = torch.ones(2, device="cuda")
            known = isinstance(x, legacy._FLOAT_TYPES) and isinstance(x.bfloat16(), legacy._BF16_TYPES)
            cast = module.fp32_to_float16(x, lambda t: t.bfloat16())
            return known and cast.dtype == torch.bfloat16
    """, dict(bootstrap="trainer")),
    ("megatron.frozen_flags", "TESpecProvider", """
        import sys
        from cookbook_npu.npu.shims.transformer_engine import package
        from cookbook_npu.npu.shims.megatron_core import imports
        registry.apply("transformer_engine.stub")
        import megatron.core.extensions.transformer_engine
        stub = sys.modules["transformer_engine"]
        sys.modules["transformer_engine"] = None  # as before the adaptor
        from megatron.core.models.gpt import gpt_layer_specs as specs
        sys.modules["transformer_engine"] = stub
        assert not specs.HAVE_TE and registry.apply("megatron.frozen_flags").state == "applied"
        def check():
            layer = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
            return layer.submodules.mlp.submodules.linear_fc2.__name__ == "TERowParallelLinear"
    """),
    ("megatron that was imported first is refused", None, """
        import sys
        from cookbook_npu.npu.shims.megatron_core import imports
        import megatron.core
        from cookbook_npu.npu.shims.transformer_engine.package import make_package, te_modules
        sys.modules.update(make_package(te_modules()))
        state = registry.apply("megatron.frozen_flags")
        def check(): return state.state == "refused" and "its layers are placeholders" in state.detail
    """),
    # An apex whose import works and whose kernel is missing
    ("megatron.apex", "fused_layer_norm_cuda", """
        import importlib, pathlib, sys, tempfile, textwrap, torch
        root = pathlib.Path(tempfile.mkdtemp())
        (root/"apex"/"normalization").mkdir(parents=True)
        for folder in ("apex", "apex/normalization"):
            (root/folder/"__init__.py").write_text("")
        (root/"apex"/"normalization"/"fused_layer_norm.py").write_text(textwrap.dedent('''
            import torch
            class FusedLayerNormAffineFunction(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x, weight, bias, shape, eps):
                    import fused_layer_norm_cuda
        '''))
        sys.path.insert(0, str(root))
        from cookbook_npu.npu.shims.transformer_engine import package
        from cookbook_npu.npu.shims.megatron_core import imports
        for name in ("transformer_engine.stub", "megatron.apex"):
            assert registry.apply(name).state == "applied"
        decided = ("megatron.core.models.backends", "megatron.core.fusions.fused_layer_norm")
        def check():
            for name in decided:
                sys.modules.pop(name, None)
            from megatron.core.transformer import TransformerConfig
            kind = importlib.import_module(decided[0]).LocalSpecProvider().layer_norm()
            config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
            norm = kind(config=config, hidden_size=8, persist_layer_norm=False).to("npu")
            return norm(torch.randn(2, 8, device="npu")).shape == (2, 8)
    """),
    ("megatron.rng_state", "random.py", """
        import torch
        from megatron.core import tensor_parallel
        from megatron.core.tensor_parallel import random
        random.initialize_rng_tracker()
        def noisy(x): return torch.nn.functional.dropout(x*x, 0.5)
        def check():
            torch.cuda.manual_seed(5)
            x = torch.ones(64, device="cuda", requires_grad=True)
            y = tensor_parallel.checkpoint(noisy, False, x)
            y.sum().backward()
            return torch.equal(x.grad > 0, y > 0)  # the recomputation dropped the same elements
    """, dict(bootstrap="trainer")),
    ("megatron.torch_norm", "sequence parallel not supported", """
        import torch
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
        from cookbook_npu.npu.shims.megatron_core.imports import _norm_config
        def check():
            norm = WrappedTorchNorm(_norm_config(), 8, eps=1e-6)
            plain = WrappedTorchNorm(_norm_config(sequence_parallel=False), 8)
            assert not plain.weight.sequence_parallel
            return norm.weight.sequence_parallel and norm(torch.ones(8)).shape == (8,)
    """, dict(bootstrap="trainer")),
    bootstrap=SIMULATED_CUDA,
)
# fmt: on
