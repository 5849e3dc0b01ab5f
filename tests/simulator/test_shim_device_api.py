"""The shims of `npu.shims.torch.device_api`: each check passes with its shim and fails without."""

from proof import SIMULATED_CUDA, prove


def test_cuda_to_npu():
    prove(
        "torch.cuda_to_npu",
        """
        import torch
        from cookbook_npu.npu.shims.torch import device_api as shim
        registry.apply("torch.cuda_to_npu")  # no other shim
        def check():
            a = torch.ones(3, device="cuda").cuda()
            assert a.is_cuda and a.device.type == "npu" and torch.cuda.is_available()
            return torch.nn.Linear(2, 2).cuda().weight.device.type == "npu"
        """,
        "Torch not compiled with CUDA enabled",
        bootstrap="simulator",
    )


def test_nccl_is_hccl():
    prove(
        "torch.cuda_to_npu",
        """
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
        """,
        "_cuda_setDevice",
        ranks=2,
        bootstrap="simulator",
    )


def test_tensor_type_names():
    prove(
        "torch.tensor_type_names",
        """
        import torch
        def check():
            names = [torch.ones(1, device="cuda", dtype=d).type() for d in (torch.float, torch.bfloat16)]
            assert names == ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor"], names
            host = torch.ones(1)
            assert host.type() == "torch.FloatTensor" and host.type(torch.int64).dtype == torch.int64
            return torch.ones(1, device="cuda").type("torch.cuda.HalfTensor").dtype == torch.half
        """,
        "torch.npu.",
        bootstrap=SIMULATED_CUDA,
    )


def test_device_capability():
    prove(
        "torch.device_capability",
        """
        import torch
        import torch.distributed as dist


        def check():
            if not dist.is_initialized():
                dist.init_process_group("nccl")
            a = torch.ones(2, device="cuda")
            dist.broadcast(a, 0)
            return a.tolist() == [1.0, 1.0]
        """,
        "TypeError: 'NoneType' object is not subscriptable",
        bootstrap=SIMULATED_CUDA,
    )


def test_custom_fwd():
    prove(
        "torch.custom_fwd",
        """
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
        """,
        "dtype",
        bootstrap=SIMULATED_CUDA,
    )


def test_compile():
    prove(
        "torch.compile",
        """
        import torch


        def check():
            @torch.compile
            def double(x):
                return 2 * x

            return double(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]
        """,
        "BackendCompilerFailed",
        bootstrap=SIMULATED_CUDA,
    )


def test_cuda_memory():
    prove(
        "torch.cuda_memory",
        """
        import torch
        held = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
        def check(): return torch.cuda.memory.memory_allocated("cuda:0") >= 8 << 20
        """,
        "check() returned False",
        bootstrap=SIMULATED_CUDA,
    )


def test_load_path():
    prove(
        "torch.load_path",
        """
        import pathlib, tempfile, torch
        folder = pathlib.Path(tempfile.mkdtemp(suffix="cuda"))
        torch.save({"weight": torch.ones(2)}, folder/"cuda.pt")
        def check(): return torch.load(str(folder/"cuda.pt"), map_location="cuda")["weight"].is_cuda
        """,
        "FileNotFoundError",
        bootstrap=SIMULATED_CUDA,
    )


def test_host_cache():
    prove(
        "torch.host_cache",
        """
        import torch
        def cached(): return torch.cuda.host_memory_stats()["allocated_bytes.current"]
        def check():
            torch.empty(8 << 20, dtype=torch.uint8).pin_memory("cuda")
            assert cached() >= 8 << 20  # freed, and still pinned
            torch._C._host_emptyCache()
            return cached() == 0
        """,
        "has no attribute '_host_emptyCache'",
        bootstrap=SIMULATED_CUDA,
    )


def test_unsigned_views():
    prove(
        "torch.unsigned_views",
        """
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
        """,
        "no operator of the device knows UInt32",
        bootstrap=SIMULATED_CUDA,
    )


def test_profiler_ranges():
    prove(
        "torch.profiler_ranges",
        """
        import torch
        def check():
            with torch.cuda.nvtx.range("layer 1"): torch.cuda.nvtx.mark("inside")
            return True
        """,
        "NVTX functions not installed",
        bootstrap=SIMULATED_CUDA,
    )
