"""Process groups that are destroyed and reloaded: memory, fifty cycles, failures."""

from proof import each

# fmt: off
test_shim = each(
    # Destroying is idempotent; a group that was not used gets no communicator on reload
    ("torch.process_groups", "ShimError: shim torch.process_groups is undone", """
        import os
        os.environ["HCCL_BUFFSIZE"] = "8"
        import torch, torch.distributed as dist
        from cookbook_npu.npu.shims.torch import distributed as pg
        registry.apply("torch.process_groups")
        torch.npu.set_device(rank)
        dist.init_process_group("cpu:gloo,npu:hccl")
        second = dist.new_group(backend="hccl")
        unused = dist.new_group()
        host = dist.new_group(backend="gloo")
        alone = dist.new_subgroups(1)[0]
        def communicators():
            free, total = torch.npu.mem_get_info(rank)
            return (total - free) // (16 << 20)
        def count(group, device="npu"):
            one = torch.ones(1, device=device)
            dist.all_reduce(one, group=group)
            return one.item()
        def refusal(call):
            try:
                call()
            except RuntimeError as error:
                return str(error)
            raise AssertionError("a late collective allocated memory")
        def check():
            assert pg.device_groups() == [dist.group.WORLD, second, unused]
            torch.npu.empty_cache()
            assert [count(None), count(second)] == [2, 2] and communicators() >= 2
            assert len(pg.destroy_process_groups()) == 3 and pg.destroy_process_groups() == []
            torch.npu.empty_cache()
            assert communicators() == pg.total_communicator_bytes() == 0
            assert pg.group_state(second) == "destroyed" and pg.group_state(host) == "active"
            assert count(None, "cpu") == count(host, "cpu") == 2  # host collectives work
            assert (second.size(), dist.get_rank(second), dist.get_backend(second)) == (2, rank, "hccl")
            refused = refusal(lambda: count(second))
            assert "allreduce on group" in refused and "ranks [0, 1]" in refused
            one = torch.ones(1, device="npu")
            assert "P2POp on group" in refusal(lambda: dist.P2POp(dist.isend, one, 1 - rank, second))
            assert len(pg.reload_process_groups()) == 2 and pg.reload_process_groups() == []
            assert communicators() == 2 and pg.total_communicator_bytes() == 2 * (16 << 20)
            assert [count(None), count(second), count(unused)] == [2, 2, 2]
            return communicators() == 3 and count(alone) == 1
    """, dict(ranks=2)),
    # Memory stays constant, keys of the store do not accumulate, group objects stay the same
    ("fifty cycles", None, """
        import os

        os.environ["HCCL_BUFFSIZE"] = "4"
        import torch
        import torch.distributed as dist
        from cookbook_npu.npu.shims.torch import distributed as pg

        registry.apply("torch.process_groups")
        torch.npu.set_device(rank)
        dist.init_process_group("hccl")


        def check():
            group = dist.new_group()
            one = torch.ones(1, device="npu")
            seen = set()
            store = dist.distributed_c10d._get_default_store()
            keys = []
            for _ in range(50):
                dist.all_reduce(one, op=dist.ReduceOp.MAX, group=group)
                awake = torch.npu.mem_get_info(rank)[0]
                pg.destroy_process_groups()
                seen.add((awake, torch.npu.mem_get_info(rank)[0]))
                pg.reload_process_groups()
                met = pg._barrier.count
                keys.append([n for n in range(1, met + 1) if store.check([f"process_groups/{n}/here"])])
            assert len(keys[-1]) <= 2, keys[-1]
            return len(seen) == 1 and group in pg.device_groups() and one.item() == 1
    """, dict(ranks=2)),
    # Rank 1 waits for the timeout of the group, then both retry; after the last attempt, an error names it
    ("a reload that fails once", None, """
        import datetime, torch, torch.distributed as dist
        from cookbook_npu.errors import DeviceError
        from cookbook_npu.npu.shims.torch import distributed as pg
        from cookbook_npu.npu.simulator import faults
        registry.apply("torch.process_groups")
        torch.npu.set_device(rank)
        dist.init_process_group("hccl", timeout=datetime.timedelta(seconds=2))
        def check():
            one = torch.ones(1, device="npu")
            dist.all_reduce(one)
            pg.destroy_process_groups()
            if rank == 0:
                faults.fail_collective("all_reduce")
            assert pg.reload_process_groups(pause_s=0.1) == [dist.group.WORLD.group_name]
            pg.destroy_process_groups()
            if rank == 0:
                faults.fail_collective("all_reduce")
            try:
                pg.reload_process_groups(attempts=1)
            except DeviceError as error:
                assert "could not be reloaded in 1 attempts" in str(error), error
            assert pg.group_state(dist.group.WORLD) == "destroyed"
            faults.clear_faults()
            pg.reload_process_groups()
            dist.all_reduce(one)
            return one.item() == 4
    """, dict(ranks=2)),
    # The others raise an error with the number of ranks instead of hanging
    ("a rank that does not reload", None, """
        import torch, torch.distributed as dist
        from cookbook_npu.errors import DeviceError
        from cookbook_npu.npu.shims.torch import distributed as pg
        registry.apply("torch.process_groups")
        torch.npu.set_device(rank)
        dist.init_process_group("cpu:gloo,npu:hccl")
        def check():
            dist.all_reduce(torch.ones(1, device="npu"))
            pg.destroy_process_groups()
            if rank == 0:
                try:
                    pg.reload_process_groups(timeout_s=0.3)
                except DeviceError as error:
                    assert "1 of 2 ranks reloaded" in str(error)
                else:
                    raise AssertionError("it reloaded alone")
            dist.all_reduce(torch.ones(1))
            return True
    """, dict(ranks=2)),
    bootstrap="simulator",
)
# fmt: on
