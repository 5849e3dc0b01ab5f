"""The shims of `npu.shims.torch.device_api`: each check passes with its shim and fails without."""

from proof import SIMULATED_CUDA, each

# fmt: off
test_shim = each(
    ("torch.cuda_to_npu", "Torch not compiled with CUDA enabled", """
        import torch
        from cookbook_npu.npu.shims.torch import device_api as shim
        registry.apply("torch.cuda_to_npu")  # no other shim
        def check():
            a = torch.ones(3, device="cuda").cuda()
            assert a.is_cuda and a.device.type == "npu" and torch.cuda.is_available()
            return torch.nn.Linear(2, 2).cuda().weight.device.type == "npu"
    """, dict(bootstrap="simulator")),
    ("torch.cuda_to_npu", "_cuda_setDevice", """
        import torch, torch.distributed as dist
        from cookbook_npu.npu.shims.torch import device_api as shim
        registry.apply("torch.cuda_to_npu")
        def check():
            torch.cuda.set_device(rank)
            dist.init_process_group("nccl")
            a = torch.full((2,), float(rank + 1), device="cuda")
            dist.all_reduce(a)
            group = dist.new_group([0, 1], backend="nccl")
            return dist.get_backend() == dist.get_backend(group) == "hccl" and a.tolist() == [3.0, 3.0]
    """, dict(bootstrap="simulator", ranks=2)),
    ("torch.tensor_type_names", "torch.npu.", """
        import torch
        def check():
            names = [torch.ones(1, device="cuda", dtype=d).type() for d in (torch.float, torch.bfloat16)]
            assert names == ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor"], names
            host = torch.ones(1)
            assert host.type() == "torch.FloatTensor" and host.type(torch.int64).dtype == torch.int64
            return torch.ones(1, device="cuda").type("torch.cuda.HalfTensor").dtype == torch.half
    """),
    ("torch.device_capability", "TypeError: 'NoneType' object is not subscriptable", """
        import torch
        import torch.distributed as dist


        def check():
            if not dist.is_initialized():
                dist.init_process_group("nccl")
            a = torch.ones(2, device="cuda")
            dist.broadcast(a, 0)
            return a.tolist() == [1.0, 1.0]
    """),
    ("torch.custom_fwd", "dtype", """
        import torch
        def check():
            class Product(torch.autograd.Function):
                @staticmethod
                @torch.amp.custom_fwd(device_type="cuda")
                def forward(ctx, x, w):
                    ctx.save_for_backward(x, w)
                    return x @ w
                @staticmethod
                @torch.amp.custom_bwd(device_type="cuda")
                def backward(ctx, dy):
                    x, w = ctx.saved_tensors
                    return dy @ w.t(), x.t() @ dy
            x, w = (torch.ones(2, 2, device="cuda", requires_grad=True) for _ in range(2))
            with torch.autocast("cuda", torch.bfloat16): y = Product.apply(x, w)
            assert y.dtype == torch.bfloat16
            y.sum().backward()
            return w.grad is not None
    """),
    ("torch.compile", "BackendCompilerFailed", """
        import torch


        def check():
            @torch.compile
            def double(x):
                return 2 * x

            return double(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]
    """),
    ("torch.cuda_memory", "check() returned False", """
        import torch
        held = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
        def check(): return torch.cuda.memory.memory_allocated("cuda:0") >= 8 << 20
    """),
    ("torch.load_path", "FileNotFoundError", """
        import pathlib, tempfile, torch
        folder = pathlib.Path(tempfile.mkdtemp(suffix="cuda"))
        torch.save({"weight": torch.ones(2)}, folder/"cuda.pt")
        def check(): return torch.load(str(folder/"cuda.pt"), map_location="cuda")["weight"].is_cuda
    """),
    ("torch.host_cache", "has no attribute '_host_emptyCache'", """
        import torch
        def cached(): return torch.cuda.host_memory_stats()["allocated_bytes.current"]
        def check():
            torch.empty(8 << 20, dtype=torch.uint8).pin_memory("cuda")
            assert cached() >= 8 << 20  # freed, and still pinned
            torch._C._host_emptyCache()
            return cached() == 0
    """),
    ("torch.unsigned_views", "no operator of the device knows UInt32", """
        import torch
        def fingerprint(x): return x.contiguous().view(-1).view(torch.uint32).sum().item()
        def check():
            a = torch.full((2, 4), -1.5, device="cuda")
            b = torch.full((2, 4), -1.5, device="cuda")
            assert a.view(4, 2).shape == (4, 2) and a.view(size=(8,)).shape == (8,)
            assert torch.ones(1).view(torch.uint32).dtype == torch.uint32
            same = fingerprint(a) == fingerprint(b)
            b[0, 0] = -1.25
            return same and fingerprint(a) != fingerprint(b)
    """),
    ("torch.profiler_ranges", "NVTX functions not installed", """
        import torch
        def check():
            with torch.cuda.nvtx.range("layer 1"): torch.cuda.nvtx.mark("inside")
            return True
    """),
    bootstrap=SIMULATED_CUDA,
)
# fmt: on
