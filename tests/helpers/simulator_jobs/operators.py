"""Operators and habits of PyTorch on the simulated NPU, each against the CPU."""

import copy
import io
import pickle

import torch
import torch.nn.functional as F

from simulator_jobs import names, run_checks


def on_both(function, *tensors, tolerance=0.0):
    "Results and input gradients of `function` on the NPU equal those on the CPU"
    found = []
    for device in ("cpu", "npu"):
        inputs = [
            t.detach().to(device).requires_grad_(t.is_floating_point() or t.is_complex())
            for t in tensors
        ]
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        assert all(o.device.type == device for o in outputs)
        learned = [o for o in outputs if o.requires_grad]
        if learned:
            sum((o.abs() ** 2).sum() for o in learned).backward()
        found.append(
            [o.detach().cpu() for o in outputs]
            + [i.grad.cpu() for i in inputs if i.grad is not None]
        )
    for cpu, npu in zip(*found, strict=True):
        torch.testing.assert_close(npu, cpu, rtol=tolerance, atol=tolerance)


def raises(function, *words):
    "`function` raises RuntimeError with all these words"
    try:
        function()
    except RuntimeError as error:
        missing = [w for w in words if w not in str(error)]
        assert not missing, f"{missing} not in {error}"
    else:
        raise AssertionError("no error")


def check_elementwise_and_reductions():
    a = torch.randn(3, 4)
    b = torch.randn(3, 4)
    on_both(lambda x, y: ((x + y) * x.sin() - y.exp()).sum(), a, b, tolerance=1e-6)
    on_both(
        lambda x: (x.mean(0), x.std(), x.amax(1), x.cumsum(0), x.logsumexp(-1)),
        a,
        tolerance=1e-6,
    )


def check_views_share_memory():
    a = torch.arange(12.0, device="npu").view(3, 4)
    a.unfold(1, 2, 1)[0, 0, 0] = 99
    a[:, 1].mul_(2)
    a.t().add_(1)
    assert a.cpu()[0, 0] == 100 and a.cpu()[2, 1] == 19
    assert a.t().data_ptr() == a.data_ptr() and a.chunk(3)[0].data_ptr() == a.data_ptr()


def check_topk():
    x = torch.randn(5, 9)
    on_both(lambda t: torch.topk(t, 3), x)
    on_both(lambda t: torch.sort(t, descending=True), x)
    values = torch.empty(0, device="npu")
    indices = torch.empty(0, dtype=torch.long, device="npu")
    torch.topk(x.npu(), 2, out=(values, indices))
    assert torch.equal(values.cpu(), x.topk(2).values) and torch.equal(
        indices.cpu(), x.topk(2).indices
    )
    on_both(lambda t: torch.kthvalue(t, 2), x)
    on_both(
        lambda t: (t.argmax(), t.median(), t.multinomial(1).shape[0] * t.new_ones(1)),
        x.exp(),
    )


def check_attention_equals_the_cpu():
    q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
    mask = torch.rand(2, 1, 8, 8) > 0.3
    mask[..., 0] = True
    on_both(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), q, k, v)
    on_both(
        lambda *t: F.scaled_dot_product_attention(
            *t, attn_mask=mask.to(t[0].device), scale=0.2
        ),
        q,
        k,
        v,
    )
    few = k[:, :2], v[:, :2]
    on_both(lambda *t: F.scaled_dot_product_attention(*t, enable_gqa=True), q, *few)
    bias = torch.randn(2, 1, 8, 8)
    on_both(
        lambda a, b, c, m: F.scaled_dot_product_attention(a, b, c, attn_mask=m),
        q,
        k,
        v,
        bias,
        tolerance=1e-5,
    )


def check_convolution_and_norms():
    x = torch.randn(2, 3, 8, 8)
    w = torch.randn(4, 3, 3, 3)
    b = torch.randn(4)
    on_both(lambda *t: F.conv2d(*t, padding=1), x, w, b, tolerance=1e-4)
    on_both(lambda t: F.layer_norm(t, (8,)), x, tolerance=1e-5)
    on_both(lambda t, g: F.rms_norm(t, (8,), g), x, torch.rand(8), tolerance=1e-5)
    on_both(lambda t: F.batch_norm(t, None, None, training=True), x, tolerance=1e-4)
    on_both(lambda t: F.interpolate(t, scale_factor=2, mode="bilinear"), x, tolerance=1e-5)
    on_both(
        lambda t, e: F.cross_entropy(F.embedding(t, e), t % 3),
        torch.tensor([1, 5, 2]),
        torch.randn(6, 3),
        tolerance=1e-6,
    )


def check_indexing():
    x = torch.randn(4, 5)
    on_both(
        lambda t: (
            t[[0, 2]],
            t[:, torch.tensor([1, 1])],
            t[t > 0],
            t.gather(1, torch.zeros(4, 1, dtype=torch.long, device=t.device)),
        ),
        x,
    )
    y = x.npu()
    y[torch.tensor([0, 1]), 0] = 7.0
    y[y > 5] = 0
    assert y[0, 0].item() == 0 and y[1, 0].item() == 0
    on_both(
        lambda t: t.index_add(0, torch.tensor([0, 0], device=t.device), t[:2]).scatter(
            1, torch.ones(4, 1, dtype=torch.long, device=t.device), 0.5
        ),
        x,
    )


def check_mixed_devices_are_refused():
    here = torch.ones(2, device="npu:0")
    there = torch.ones(2, device="npu:1")
    host = torch.ones(2)
    for a, b in ((here, host), (host, here), (here, there)):
        raises(lambda a=a, b=b: a + b, "same device", "npu:0")
        raises(lambda a=a, b=b: a.add_(b), "same device")
        raises(lambda a=a, b=b: torch.add(a, a, out=b), "device")
        raises(lambda a=a, b=b: torch.stack([a, b]), "device")
        raises(lambda a=a, b=b: a @ b, "device")
        raises(lambda a=a, b=b: torch._foreach_add([a], [b]), "device")
        raises(lambda a=a, b=b: torch.where(a > 0, a, b), "device")
    raises(lambda: F.linear(here.view(1, 2), host.view(1, 2)), "device")
    raises(lambda: F.embedding(torch.tensor([0]), here.view(1, 2)), "device")
    assert (here + torch.tensor(2.0)).tolist() == [3, 3] and here[
        torch.tensor([1])
    ].tolist() == [1]
    assert there.to("npu:0").device.index == 0 and here.copy_(there).device.index == 0


def check_tied_weights_survive_to_npu():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.to("npu")
    assert model.head.weight is model.embed.weight and len(list(model.parameters())) == 1
    model.head(model.embed(torch.tensor([1], device="npu"))).sum().backward()
    before = model.embed.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model.head.weight), (
        "the optimizer kept a parameter that the model no longer uses"
    )


def check_optimizers_equal_the_cpu():
    kinds = [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ]
    for kind, options in kinds:
        found = []
        for device in ("cpu", "npu"):
            parameter = torch.nn.Parameter(torch.arange(6.0).to(device))
            optimizer = kind([parameter], lr=0.1, **options)
            for _ in range(3):
                (parameter**2).sum().backward()
                torch.nn.utils.clip_grad_norm_([parameter], 1.0)
                optimizer.step()
                optimizer.zero_grad()
            found.append(parameter.detach().cpu())
        torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def check_foreach_takes_whole_lists():
    import simulated_npu

    tensors = [torch.ones(3, device="npu") for _ in range(10)]
    before = simulated_npu.fallback_count()
    torch._foreach_mul_(tensors, 2.0)
    assert simulated_npu.fallback_count() - before == 1 and all(
        t[0].item() == 2 for t in tensors
    )
    norms = torch._foreach_norm(tensors)
    assert norms[3].device.type == "npu" and abs(norms[3].item() - 12**0.5) < 1e-6


def check_save_load_copy():
    data = {
        "x": torch.randn(3, device="npu:1"),
        "p": torch.nn.Parameter(torch.ones(2, device="npu")),
    }
    file = io.BytesIO()
    torch.save(data, file)
    for location, device in ((None, "npu:1"), ("npu:0", "npu:0"), ("cpu", "cpu")):
        file.seek(0)
        assert str(torch.load(file, map_location=location)["x"].device) == device
    twin = copy.deepcopy(data["x"])
    assert twin.device.index == 1 and twin.data_ptr() != data["x"].data_ptr()
    assert torch.equal(pickle.loads(pickle.dumps(data["x"])).cpu(), data["x"].cpu())


def check_pinned_memory():
    pinned = torch.ones(4).pin_memory()
    assert (
        pinned.is_pinned()
        and not torch.ones(4).is_pinned()
        and torch.empty(3, pin_memory=True).is_pinned()
    )
    assert pinned.to("npu", non_blocking=True).tolist() == [1, 1, 1, 1]
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    assert all(
        batch[0].is_pinned()
        for batch in torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)
    )


def check_memory_returns():
    torch.npu.empty_cache()
    base = torch.npu.memory_allocated()
    for _ in range(20):
        x = torch.randn(64, 64, device="npu", requires_grad=True)
        (x @ x).relu().topk(3).values.sum().backward()
        with torch.inference_mode():
            x.view(-1)[::2].add_(1).sort()
    del x
    assert torch.npu.memory_allocated() == base
    storage = torch.empty(1 << 20, device="npu").untyped_storage()
    storage.resize_(0)
    assert torch.npu.memory_allocated() == base
    storage.resize_(4 << 20)
    assert torch.npu.memory_allocated() == base + (4 << 20)


def check_checkpointing_keeps_dropout():
    def layer(t):
        return F.dropout(t.sin(), 0.5)

    grads = []
    for wrap in (False, True):
        torch.manual_seed(3)
        x = torch.ones(40, device="npu", requires_grad=True)
        y = (
            torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            if wrap
            else layer(x)
        )
        y.sum().backward()
        grads.append(x.grad.tolist())
    assert grads[0] == grads[1]


def check_generators():
    generator = torch.Generator("npu:2").manual_seed(5)
    a = torch.randn(4, device="npu:2", generator=generator)
    assert torch.equal(a.cpu(), torch.randn(4, generator=torch.Generator().manual_seed(5)))
    raises(lambda: torch.randn(4, device="npu", generator=torch.Generator()), "enerator")
    with torch.random.fork_rng(devices=[0], device_type="npu"):
        torch.rand(3, device="npu")
    torch.npu.manual_seed(1)
    assert len(set(torch.randperm(8, device="npu").tolist())) == 8


def check_threads():
    from concurrent.futures import ThreadPoolExecutor

    shared = torch.randn(32, 32, device="npu")

    def work(seed):
        with torch.npu.device(seed % 4):
            x = torch.full((32, 32), float(seed), device="npu", requires_grad=True)
            for _ in range(30):
                (x @ x.t()).relu().sum().backward()
            return (shared @ shared).sum().item(), x.device.index

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(16)))
    assert len({total for total, _ in results}) == 1 and [
        index for _, index in results
    ] == [s % 4 for s in range(16)]


def check_fork_is_refused():
    import os

    torch.ones(1, device="npu")
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.npu.set_device(0)
            os.write(write_end, b"no error")
        except RuntimeError as error:
            os.write(write_end, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"fork" in os.read(read_end, 1000)


def everything(rank, world_size):
    return run_checks([globals()[name] for name in names(globals())])
