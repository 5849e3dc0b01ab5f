"""The shims of `npu.shims.megatron_core.built_model`: each check passes with its shim and fails without."""

from proof import each

# fmt: off
test_shim = each(
    # A real distributed optimizer is saved and loaded, and takes a step
    ("megatron.optimizer_step", "NoneType", """
        import torch, torch.distributed as dist
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig
        torch.cuda.set_device(0)
        dist.init_process_group("nccl")
        parallel_state.initialize_model_parallel()
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        flat = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(config, flat, torch.nn.Linear(8, 8, bias=False, device="cuda"))
        settings = OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=True)
        optimizer = get_megatron_optimizer(settings, [model]).chained_optimizers[0]
        def check():
            for group in optimizer.optimizer.param_groups:
                group["step"] = None
            optimizer.load_state_dict(optimizer.state_dict())
            model.zero_grad_buffer()
            model(torch.ones(2, 8, device="cuda")).sum().backward()
            model.finish_grad_sync()
            return optimizer.step()[0]
    """),
    # Two stages exchange a tensor through Megatron's function, in a group wrapped as in slime
    ("megatron.p2p_groups", "not registered", """
        import os, torch, torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel.p2p_communication import _batched_p2p_ops
        class Reloadable(dist.ProcessGroup):
            def __init__(self, group):
                super().__init__(rank=dist.get_rank(group), size=dist.get_world_size(group))
                self.group = group
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        group = Reloadable(parallel_state._PIPELINE_MODEL_PARALLEL_GROUP)
        parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = group
        from cookbook_npu.npu.shims.bootstrap import model_ready
        assert {row["name"]: row["state"] for row in model_ready()}["megatron.p2p_groups"] == "applied"
        def check():
            mine = torch.full((2,), float(rank), device="cuda")
            theirs = torch.empty(2, device="cuda")
            names = ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
            ends = dict.fromkeys(names)
            side = "prev" if rank else "next"
            ends |= {f"tensor_send_{side}": mine, f"tensor_recv_{side}": theirs}
            peers = dict(prev_pipeline_rank=1 - rank, next_pipeline_rank=1 - rank)
            for work in _batched_p2p_ops(**ends, group=group, **peers):
                work.wait()
            return theirs.tolist() == [1 - rank] * 2
    """, dict(ranks=2)),
    # A layer with MindSpeed's fields, split over two ranks: gathering by the attribute restores the weight
    ("megatron.grouped_partition", "check() returned False", """
        import torch
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
        from cookbook_npu.npu.shims.bootstrap import model_ready

        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
        parallel_state.initialize_model_parallel(2)
        whole = torch.arange(24.0).view(6, 4)


        class Grouped(torch.nn.Module):
            def __init__(self, parallel_mode):
                super().__init__()
                column = parallel_mode == "column"
                self.num_gemms = 2
                self.parallel_mode = parallel_mode
                self.partition_dim = 1 if column else 0
                for i in range(2):
                    weight = torch.nn.Parameter(
                        whole.chunk(2, 0 if column else 1)[rank].clone()
                    )
                    set_tensor_model_parallel_attributes(weight, True, self.partition_dim, 1)
                    self.register_parameter(f"weight{i}", weight)


        model = torch.nn.ModuleList([Grouped("column"), Grouped("row")])
        states = {row["name"]: row["state"] for row in model_ready(model)}
        assert states["megatron.grouped_partition"] == "applied"


        def gathered(weight):
            shards = [torch.empty_like(weight) for _ in range(2)]
            group = parallel_state.get_tensor_model_parallel_group()
            dist.all_gather(shards, weight.detach().contiguous(), group=group)
            return torch.cat(shards, weight.partition_dim)


        def check():
            for layer in model:
                layer.to("cuda")
            return all(
                torch.equal(gathered(weight).cpu(), whole) for weight in model.parameters()
            )
    """, dict(ranks=2)),
    ("a second model is repaired and both are undone", None, """
        import torch
        from cookbook_npu.npu.shims.bootstrap import model_ready
        def grouped_layer():
            layer = torch.nn.Module()
            layer.num_gemms, layer.parallel_mode, layer.partition_dim = 1, "column", 1
            return layer
        def check():
            models = [grouped_layer(), grouped_layer()]
            for model in models:
                model_ready(model)
            fixed = [m.partition_dim for m in models]
            registry.undo("megatron.grouped_partition")
            return fixed == [0, 0] and [m.partition_dim for m in models] == [1, 1]
    """),
)
# fmt: on
