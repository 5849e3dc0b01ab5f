"""What the ranks of test_broadcast.py run: three processes, of which the third leaves."""

import torch

from cookbook_npu.errors import WeightUpdateError
from cookbook_npu.npu.device import accelerator
from cookbook_npu.npu.shims.bootstrap import bootstrap
from cookbook_npu.npu.simulator.faults import hang_collective
from cookbook_npu.weights.manifest import checksum

WEIGHTS = {
    "b": torch.arange(15).float().view(3, 5),
    "a": torch.arange(700).bfloat16(),
    "c": torch.arange(4),
}


def take_part(rank, world_size, port):
    from cookbook_npu.weights import transport as b
    from cookbook_npu.weights.transport import SharedMemory, read_buckets, write_buckets

    bootstrap("plain")
    end = b.BroadcastEnd(accelerator())
    shared = SharedMemory()
    manifest = write_buckets(7, WEIGHTS.items(), 512, shared)
    first = b.UpdateGroup("127.0.0.1", port, 1, 3, 60.0)
    if rank == 0:
        b.send_buckets(end.join(first, 0), manifest, shared.blocks)
    else:
        # so that it reads only received data
        for block in shared.blocks.values():
            block.zero_()
        manifest.buckets = b.receive_buckets(end.join(first, rank), manifest, shared)
    seen = [{name: checksum(t) for name, t in read_buckets(manifest)}]
    shared.release()
    if rank == 2:
        return seen, manifest.expected
    try:
        if rank == 0:
            b.give_up(end.member.store, "rollout2 died")
        end.join(first, rank).broadcast(torch.zeros(8, dtype=torch.uint8, device="npu"))
    except WeightUpdateError as error:
        seen.append(error.what)
    second = b.UpdateGroup("127.0.0.1", port, 2, 2, 60.0)
    block = torch.full((8,), 1 - rank, dtype=torch.uint8, device="npu")
    end.join(second, rank).broadcast(block)
    # rank 1 does not join, and its timeout is far shorter
    if rank == 1:
        hang_collective("broadcast")
    third = b.UpdateGroup("127.0.0.1", port, 3, 2, 1.0 if rank == 1 else 60.0)
    large = torch.zeros(32 * 2**20, dtype=torch.uint8, device="npu")
    try:
        end.join(third, rank).broadcast(large)
    except WeightUpdateError as error:
        seen.append("not broadcast within 1 s" in error.what)
    end.close()
    return seen, block.tolist()
