"""Every collective that Megatron and FSDP2 use, on npu tensors; run in each rank."""

import copy
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from simulator_jobs import names, run_checks


def here():
    return torch.device("npu", torch.npu.current_device())


def rank():
    return dist.get_rank()


def size():
    return dist.get_world_size()


def total():
    return sum(range(size()))


def mine(*shape, dtype=torch.float32):
    return torch.full(shape, rank(), device=here(), dtype=dtype)


def check_all_reduce():
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.uint8,
        torch.float16,
    ):
        t = mine(4, dtype=dtype)
        dist.all_reduce(t)
        assert t.device == here() and (t == total()).all(), dtype
    for op, expected in (
        (dist.ReduceOp.MAX, size() - 1),
        (dist.ReduceOp.MIN, 0),
        (dist.ReduceOp.AVG, total() / size()),
    ):
        t = mine(4)
        dist.all_reduce(t, op=op)
        assert (t == expected).all(), op
    work = dist.all_reduce(t := mine(4), async_op=True)
    work.wait()
    assert (t == total()).all() and work.is_completed()
    part = torch.zeros(4, 4, device=here())
    part[1:3] = rank()
    dist.all_reduce(part[1:3])
    assert (part[1:3] == total()).all() and (part[0] == 0).all()


def check_broadcast_and_reduce():
    for dtype in (torch.float32, torch.int16, torch.complex64, torch.bool):
        t = torch.full((3,), rank() == size() - 1, device=here(), dtype=dtype)
        dist.broadcast(t, size() - 1)
        assert (t == torch.ones(3, device=here(), dtype=dtype)).all(), dtype
    t = mine(3)
    dist.reduce(t, 0)
    assert rank() != 0 or (t == total()).all()


def check_all_gather():
    expected = [float(i // 2) for i in range(2 * size())]
    out = torch.empty(2 * size(), device=here())
    dist.all_gather_into_tensor(out, mine(2))
    assert out.tolist() == expected
    dist.all_gather_into_tensor(out.zero_(), mine(2), async_op=True).wait()
    assert out.tolist() == expected
    parts = [torch.empty(2, device=here()) for _ in range(size())]
    dist.all_gather(parts, mine(2))
    assert [p.tolist() for p in parts] == [[float(i)] * 2 for i in range(size())]
    uneven = [torch.empty(2, 3, device=here()).t() for _ in range(size())]
    dist.all_gather([u.t() for u in uneven], mine(2, 3))
    assert (uneven[-1] == size() - 1).all()


def check_reduce_scatter():
    whole = torch.arange(3.0 * size(), device=here())
    expected = torch.arange(3.0 * rank(), 3.0 * rank() + 3)
    out = torch.empty(3, device=here())
    dist.reduce_scatter_tensor(out, whole)
    assert torch.equal(out.cpu(), expected * size())
    dist.reduce_scatter_tensor(out, whole, op=dist.ReduceOp.AVG)
    assert torch.allclose(out.cpu(), expected)
    dist.reduce_scatter_tensor(out.zero_(), whole, async_op=True).wait()
    assert torch.equal(out.cpu(), expected * size()) and whole[1].item() == 1, (
        "the input must stay as it was"
    )
    dist.reduce_scatter(
        out, [torch.full((3,), float(i), device=here()) for i in range(size())]
    )
    assert (out == size() * rank()).all()
    inside = whole.clone()  # Megatron's gradient buffer: the output is a slice of the input
    dist.reduce_scatter_tensor(inside[3 * rank() : 3 * rank() + 3], inside)
    assert torch.equal(inside[3 * rank() : 3 * rank() + 3].cpu(), expected * size())


def check_all_to_all():
    out = torch.empty(size(), device=here())
    dist.all_to_all_single(out, torch.arange(float(size()), device=here()) + 10 * rank())
    assert out.tolist() == [rank() + 10.0 * i for i in range(size())]
    sent = [i + 1 for i in range(size())]
    out = torch.empty(size() * (rank() + 1), device=here())
    dist.all_to_all_single(out, mine(sum(sent)), [rank() + 1] * size(), sent)
    assert out.tolist() == [float(i) for i in range(size()) for _ in range(rank() + 1)]
    parts = [torch.empty(2, 1, device=here()) for _ in range(size())]
    dist.all_to_all(
        parts, [torch.full((2, 1), 10.0 * rank() + i, device=here()) for i in range(size())]
    )
    assert all((p == 10 * i + rank()).all() for i, p in enumerate(parts))


def check_point_to_point():
    t = mine(2)
    if rank() == 0:
        dist.send(t, 1)
    elif rank() == 1:
        dist.recv(t, 0)
        assert (t == 0).all()
    right = (rank() + 1) % size()
    left = (rank() - 1) % size()
    got = torch.empty(2, device=here())
    for work in (dist.isend(mine(2), right), dist.irecv(got, left)):
        work.wait()
    assert (got == left).all()
    ops = [
        dist.P2POp(dist.isend, mine(2), right),
        dist.P2POp(dist.irecv, got.zero_(), left),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert (got == left).all()


def check_groups():
    both = dist.new_group(backend="cpu:gloo,npu:hccl")
    for device in ("cpu", here()):
        t = torch.ones(2, device=device)
        dist.all_reduce(t, group=both)
        assert (t == size()).all()
    pair = dist.new_group([0, 1])
    if rank() < 2:
        t = torch.ones(1, device=here())
        dist.all_reduce(t, group=pair)
        assert t.item() == 2
    host = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1), group=host)
    assert dist.get_backend() == "hccl" and dist.get_backend(host) == "gloo"
    if size() == 2:
        dist.barrier(group=pair)
    else:
        dist.barrier()
    dist.destroy_process_group(both)


def check_memory_is_back_when_wait_returns():
    "gloo's thread may still hold its views of the buffers: what a program measures must not depend on that"
    held = torch.npu.memory_allocated()
    after = []
    for _ in range(200):
        tensor = mine(4096)
        works = [
            dist.all_reduce(tensor, async_op=True),
            dist.broadcast(tensor, 0, async_op=True),
        ]
        for work in works:
            work.wait()
        del tensor, works, work
        after.append(torch.npu.memory_allocated() - held)
    assert set(after) == {0}, set(after)


def check_ddp_equals_one_process():
    torch.manual_seed(0)
    reference = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    )
    model = torch.nn.parallel.DistributedDataParallel(
        copy.deepcopy(reference).to(here()), device_ids=[here().index]
    )
    data = torch.randn(size() * 2, 4)
    model(data[rank() * 2 : rank() * 2 + 2].to(here())).pow(2).mean().backward()
    reference(data).pow(2).mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-5, atol=1e-6)


def everything(rank, world_size):
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", timeout=timedelta(seconds=300))
    results = run_checks([globals()[name] for name in names(globals())])
    dist.destroy_process_group()
    return results


def one_rank(rank, world_size):
    "What each collective makes of 1, 2, 3 in a group of one rank"
    dist.init_process_group("hccl")
    given = torch.tensor([1.0, 2.0, 3.0], device=here())
    found = {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        reduced = given.clone()
        dist.all_reduce(reduced, op=op)
        found[str(op)] = reduced.tolist()
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        output = torch.zeros(3, device=here())
        work = getattr(dist, name)(output, given, async_op=True)
        assert work.wait() and work.is_completed()
        found[name] = output.tolist()
    sent = given.clone()
    dist.broadcast(sent, 0)
    found["broadcast"] = sent.tolist()
    dist.barrier()
    dist.destroy_process_group()
    return found


def with_device_id(rank, world_size):
    "A group that is bound to its device, as torchtitan and Megatron's newer code ask for"
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl", device_id=torch.device("npu", rank))
    t = torch.ones(1, device="npu")
    dist.all_reduce(t)
    dist.barrier()
    dist.destroy_process_group()
    return t.item()


def hold_memory(rank, world_size, bytes_each):
    "Both ranks use device 0; rank 1 reports what it sees while rank 0 holds memory, and after rank 0 let go"
    torch.npu.set_device(0)
    dist.init_process_group("gloo")
    held = torch.empty(bytes_each, dtype=torch.uint8, device="npu:0") if rank == 0 else None
    dist.barrier()
    seen = torch.npu.mem_get_info(0)
    refused = ""
    if rank == 1:
        try:
            torch.empty(bytes_each, dtype=torch.uint8, device="npu:0")
        except torch.OutOfMemoryError as error:
            refused = str(error)
    dist.barrier()
    del held
    cached = torch.npu.mem_get_info(0)
    torch.npu.empty_cache()
    dist.barrier()
    after = torch.npu.mem_get_info(0)
    if rank == 1:
        torch.empty(bytes_each, dtype=torch.uint8, device="npu:0")
    dist.barrier()
    return seen, refused, cached, after


def hold_and_die(rank, world_size):
    torch.empty(32 << 20, dtype=torch.uint8, device="npu:0")
    os._exit(0)


def free_now(rank, world_size):
    torch.npu.set_device(0)
    return torch.npu.mem_get_info(0)


def visible(rank, world_size):
    return torch.npu.device_count(), torch.ones(1, device="npu:1").device.index


def _start(rank, seconds=60):
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", timeout=timedelta(seconds=seconds))
    return torch.device("npu", rank)


def options(rank, world_size):
    import torch_npu

    _start(rank)
    return torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options().hccl_config


def host_tensor(rank, world_size):
    _start(rank)
    dist.all_reduce(torch.ones(2))


def uneven(rank, world_size):
    device = _start(rank)
    dist.reduce_scatter_tensor(torch.empty(3, device=device), torch.ones(4, device=device))


def buffers(rank, world_size):
    "MiB that are taken before and after the first collective of each communicator"
    device = _start(rank)
    backend = dist.group.WORLD._get_backend(device)

    def free():
        return torch.npu.mem_get_info(rank)[0] >> 20

    total = torch.ones(1, device=device)
    before = free()
    seen = []
    for _ in range(3):
        seen.append(before - free())
        dist.all_reduce(total)
        seen.append(before - free())
        backend.abort_hccl_comm("test")
    return seen, total.item()


def alone(rank, world_size):
    "Only rank 0 destroys its communicator"
    device = _start(rank)
    dist.all_reduce(torch.ones(1, device=device))
    if rank == 0:
        dist.group.WORLD._get_backend(device).abort_hccl_comm("only here")
    dist.all_reduce(torch.ones(1, device=device))


def reduce_twice(rank, world_size):
    "Class and text of the error, and the seconds until then"
    _start(rank, seconds=3)
    begun = time.monotonic()
    ones = torch.ones(1, device="npu")
    try:
        for _ in range(2):
            dist.all_reduce(ones)
    except (dist.DistBackendError, RuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "no error", "", 0
