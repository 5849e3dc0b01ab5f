"""The shims of `npu.shims.torch.distributed`, and the rendezvous of a job."""

from proof import each

# fmt: off
test_shim = each(
    ("torch.new_group_backend", "unexpected keyword argument 'pg_options'", """
        import os, torch, torch.distributed as dist
        from torch.distributed.distributed_c10d import Backend, PrefixStore, default_pg_timeout
        from cookbook_npu.npu.shims.torch import distributed
        for name in ("torch.cuda_to_npu", "torch.new_group_backend"):
            registry.apply(name)
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
        made = []
        def second_world():
            made.append(1)
            name = f"engines{len(made)}"
            store = PrefixStore(name, dist.distributed_c10d._get_default_store())
            helper = dist.distributed_c10d._new_process_group_helper
            options = dict(pg_options=None, timeout=default_pg_timeout)
            return helper(2, rank, [], Backend("nccl"), store, name, **options)[0]
        def check():
            group = second_world()
            a = torch.full((2,), rank + 1.0, device="cuda")
            work = group.allreduce([a])
            work.wait()
            return a.tolist() == [3.0, 3.0] and group.size() == 2
    """, dict(ranks=2)),
    ("torch.new_group_backend", "doesn't have NCCL built in", """
        import torch, torch.distributed as dist
        from cookbook_npu.npu.shims.torch import distributed
        for name in ("torch.cuda_to_npu", "torch.new_group_backend"):
            registry.apply(name)
        dist.init_process_group("nccl")
        made = []
        def check():
            made.append(f"own{len(made)}")
            helper = dist.distributed_c10d._new_process_group_helper
            wait = dist.distributed_c10d.default_pg_timeout
            group, _ = helper(1, 0, [], dist.Backend("nccl"), dist.HashStore(), made[-1], timeout=wait)
            return dist.get_backend(group) == "hccl"
    """),
    ("new group takes every backend", None, """
        import torch, torch.distributed as dist
        from cookbook_npu.npu.shims.torch import distributed
        for name in ("torch.cuda_to_npu", "torch.new_group_backend"):
            registry.apply(name)
        def check():
            dist.init_process_group("cpu:gloo,cuda:nccl")
            groups = [dist.new_group([0], backend=b) for b in ("nccl", "gloo", None)]
            return [dist.get_backend(g) for g in groups] == ["hccl", "gloo", dist.get_backend()]
    """),
    ("torch.bound_device", "No backend type associated with device type npu", """
        import torch, torch.distributed as dist
        from cookbook_npu.npu.shims.torch import distributed
        registry.apply("torch.bound_device")
        torch.npu.set_device(rank)
        dist.init_process_group("cpu:gloo,npu:hccl", device_id=torch.device("npu", rank))
        def check():
            group = dist.new_group(backend="gloo")
            seen = [None, None]
            dist.all_gather_object(seen, {"rank": rank}, group=group)
            same = dist.new_group(backend="hccl")
            assert seen == [{"rank": 0}, {"rank": 1}], seen
            return same.bound_device_id == torch.device("npu", rank)
    """, dict(ranks=2)),
    # The simulated backend does not have this defect; the check adds it
    ("torch.eager_connect", "create hcclComm failed", """
        import torch
        import torch.distributed as dist
        import torch_npu
        from cookbook_npu.npu.shims.torch import distributed

        hccl = torch_npu._C._distributed_c10d.ProcessGroupHCCL


        def connect(self, device):
            raise RuntimeError("create hcclComm failed, error code is 7")


        hccl.supports_splitting = True
        hccl.eager_connect_single_device = connect
        assert registry.apply("torch.eager_connect").state == "applied"
        torch.npu.set_device(rank)
        dist.init_process_group("hccl")


        def check():
            group = dist.new_group(device_id=torch.device("npu", rank))
            a = torch.ones(2, device="npu")
            dist.all_reduce(a, group=group)
            return a.tolist() == [2.0, 2.0]
    """, dict(ranks=2)),
    ("join world again", None, """
        import datetime, os, psutil, torch, torch.distributed as dist
        from cookbook_npu.npu.shims.torch.distributed import join_world
        os.environ["MASTER_ADDR"] = f"[{os.environ['MASTER_ADDR']}]"  # as pasted from a URL
        def check():
            join_world("gloo", datetime.timedelta(seconds=60))
            served = [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN"]
            hosts = [host for host, port in served if port == int(os.environ["MASTER_PORT"])]
            assert hosts == ["127.0.0.1"] * (os.environ["RANK"] == "0"), served
            dist.destroy_process_group()
            for _ in range(2):  # more generations of the same job
                join_world("gloo", datetime.timedelta(seconds=60))
                join_world("gloo", datetime.timedelta(seconds=60))
                a = torch.ones(1)
                dist.all_reduce(a)
                dist.destroy_process_group()
            return a.item() == 2.0
    """, dict(bootstrap=None, ranks=2)),
    ("join world alone", None, """
        import datetime, os, torch, torch.distributed as dist
        from cookbook_npu.npu.shims.torch.distributed import join_world
        def check():
            for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
                del os.environ[name]
            join_world("cpu:gloo,npu:hccl", datetime.timedelta(seconds=60))
            a = torch.ones(1, device="npu")
            dist.all_reduce(a)
            return (dist.get_world_size(), a.item()) == (1, 1.0)
    """),
    bootstrap="simulator",
)
# fmt: on
