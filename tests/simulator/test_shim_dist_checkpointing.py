"""The shims of `npu.shims.megatron_core.built_model`: hostile checkpoints, writing without forks."""

from proof import each

# fmt: off
test_shim = each(
    # What Megatron's own training saves: every kind of value of its arguments
    ("megatron.safe_globals", "Weights only load failed", """
        import argparse, signal, tempfile, numpy as np, torch
        from pathlib import Path
        from megatron.core import optimizer
        from megatron.core.enums import ModelType
        from megatron.core.transformer.enums import AttnBackend
        from cookbook_npu.npu.shims.megatron_core import built_model
        torch.serialization.clear_safe_globals()  # Megatron's list differs from release to release
        state = registry.apply("megatron.safe_globals")
        assert state.state == "applied" and "Signals" in state.detail, state
        saved = tempfile.mktemp()
        values = dict(exit_signal=signal.SIGTERM, save=Path("/runs"), params_dtype=torch.bfloat16)
        values |= dict(model_type=ModelType.encoder_or_decoder, attention_backend=AttnBackend.auto)
        config = optimizer.OptimizerConfig(lr=0.5)
        rng = np.random.get_state()
        torch.save({"args": argparse.Namespace(**values), "config": config, "rng": rng}, saved)
        def check():
            loaded = torch.load(saved)
            assert (loaded["rng"][1] == rng[1]).all()
            return vars(loaded["args"]) == values and loaded["config"].lr == 0.5
    """),
    # Megatron's random states, and a hostile object in a shard
    ("megatron.safe_objects", "check() returned False", """
        import os
        import random
        import tempfile
        from pathlib import Path

        import numpy as np
        import torch
        import torch.distributed as dist
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.mapping import ShardedObject
        from torch.distributed.checkpoint.api import CheckpointException


        class Hostile:
            def __reduce__(self):
                return os.mkdir, (str(folder / "owned"),)


        def state(data):
            return {"rng_state": ShardedObject("rng_state", data, (1,), (0,), replica_id=0)}


        dist.init_process_group("nccl")
        folder = Path(tempfile.mkdtemp())
        good = {"random": random.getstate(), "np": np.random.get_state()}
        good |= {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()}
        for name, data in (("good", [good]), ("bad", Hostile())):
            (folder / name).mkdir()
            dist_checkpointing.save(state(data), folder / name)


        def check():
            (loaded,) = dist_checkpointing.load(state(None), folder / "good")["rng_state"]
            assert torch.equal(loaded["torch"], torch.get_rng_state())
            assert (loaded["np"][1] == np.random.get_state()[1]).all()
            try:
                dist_checkpointing.load(state(None), folder / "bad")
            except CheckpointException as error:
                assert "mkdir" in str(error), error
            return not (folder / "owned").exists()
    """),
    ("megatron.safe_metadata", "check() returned False", """
        import os, pickle, tempfile, torch, torch.distributed as dist
        from pathlib import Path
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.mapping import ShardedTensor
        from torch.distributed.checkpoint.api import CheckpointException
        class Hostile:
            def __reduce__(self): return os.mkdir, (str(folder/"owned"),)
        def state(): return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4, device="cuda"))}
        dist.init_process_group("nccl")
        folder = Path(tempfile.mkdtemp())
        saved = folder/"saved"
        saved.mkdir()
        dist_checkpointing.save(state(), saved)
        good = (saved/".metadata").read_bytes()
        def check():
            (saved/".metadata").write_bytes(good)
            assert dist_checkpointing.load(state(), saved)["w"].tolist() == [1.0] * 4
            (saved/".metadata").write_bytes(pickle.dumps(Hostile()))
            try:
                dist_checkpointing.load(state(), saved)
            except (pickle.UnpicklingError, CheckpointException, AttributeError):
                pass  # refused; or the folder was made, and it is no metadata
            return not (folder/"owned").exists()
    """),
    # A real checkpoint of one tensor starts no process
    ("megatron.checkpoint_writer", "check() returned False", """
        import os, tempfile, torch, torch.distributed as dist
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import ShardedTensor
        os.environ.setdefault("MASTER_PORT", "29500")
        forked = []
        os.register_at_fork(before=lambda: forked.append(1))
        def sharded(values): return {"w": ShardedTensor.from_rank_offsets("w", values)}
        def check():
            if not dist.is_initialized():
                dist.init_process_group("cpu:gloo,npu:hccl")
            values = torch.arange(8.0, device="npu")
            folder = tempfile.mkdtemp()
            dist_checkpointing.save(sharded(values), folder)
            loaded = dist_checkpointing.load(sharded(torch.zeros(8, device="npu")), folder)
            assert torch.equal(loaded["w"], values)
            return len(forked) == 0
    """),
)
# fmt: on
