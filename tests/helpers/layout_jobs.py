"""What the ranks of test_checkpoint_layouts.py run: save, resume, and refused checkpoints."""

import resource
import shutil
from pathlib import Path

import torch

from cookbook_npu.config import ModelConfig, OptimConfig, ParallelConfig
from cookbook_npu.errors import ConfigError, CookbookError
from cookbook_npu.model.checkpoint import BackgroundSaver, load_policy_weights, load_state
from cookbook_npu.model.megatron import (
    build_optimizer,
    destroy_parallel,
    init_parallel,
    load_model,
)

ids = torch.randint(0, 255, (2, 8), generator=torch.Generator().manual_seed(0))


def build(hf, tensor, dtype, expert=1):
    "dtype `offload`: bfloat16 with the optimizer on the host"
    parallel = ParallelConfig(tensor=tensor, expert=expert)
    init_parallel(parallel, 0)
    offload = dtype == "offload"
    model = load_model(hf, ModelConfig(dtype="bfloat16" if offload else dtype), parallel)
    optim = OptimConfig(learning_rate=1e-3, schedule="cosine", cpu_offload=offload)
    return model, build_optimizer(model, optim, num_steps=6)


def steps(model, optimizer, n):
    norms = []
    for _ in range(n):
        optimizer.zero_grad()
        (model.logits(ids).logsumexp(-1).mean() / model.layout.data_size).backward()
        norms.append(optimizer.step()[1])
    return norms


def save(hf, folder, tensor, dtype, expert=1):
    model, optimizer = build(hf, tensor, dtype, expert)
    steps(model, optimizer, 2)
    saved = model.logits(ids).detach().cpu()
    saver = BackgroundSaver(optimizer)
    saver.start(folder)
    norms = steps(model, optimizer, 1)  # while the files are written
    saver.finish()
    random = torch.rand(2).tolist()
    norms += steps(model, optimizer, 1)
    return norms, optimizer.lr, random, model.logits(ids).detach().cpu(), saved


def resume(hf, folder, tensor, dtype, expert=1):
    model, optimizer = build(hf, tensor, dtype, expert)
    torch.rand(3)
    load_state(optimizer, folder)
    random = torch.rand(2).tolist()
    for part in optimizer.megatron.chained_optimizers:
        for own in getattr(part.optimizer, "cpu_optimizers", []):
            for state in own.state.values():
                moment = state["exp_avg"]
                assert moment.untyped_storage().nbytes() == moment.nbytes
    norms = steps(model, optimizer, 2)
    return norms, optimizer.lr, random, model.logits(ids).detach().cpu()


def resume_error(*args):
    try:
        resume(*args)
    except ConfigError as error:
        return str(error)


def weights(hf, folder, tensor, dtype, expert=1):
    "Logits of the policy of a checkpoint: its weights alone, then all of it"
    model, optimizer = build(hf, tensor, dtype, expert)
    load_policy_weights(model, folder)
    alone = model.logits(ids).detach().cpu()
    load_state(optimizer, folder)
    return alone, model.logits(ids).detach().cpu()


def policy(*args):
    "Logits of the policy of a checkpoint, without the optimizer"
    folder = args[1]
    model, _ = build(args[0], *args[2:])
    load_policy_weights(model, folder)
    return model.logits(ids).detach().cpu()


def several(rank, world_size, work):
    jobs = {f.__name__: f for f in (save, resume, resume_error, weights, policy)}
    found = []
    for name, *args in work:
        found.append(jobs[name](*args))
        destroy_parallel()
    return found


def message_of(work, *args):
    try:
        work(*args)
    except CookbookError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def save_limited(saver, folder, limit):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    unlimited = resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited))
    try:
        saver.start(folder)
        saver.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))


def refusals(rank, world_size, root):
    root = Path(root)
    model, optimizer = build(str(root / "qwen3"), 1, "float32")
    steps(model, optimizer, 1)
    limits = (1_000, 100_000, -1)
    saves = [
        message_of(save_limited, BackgroundSaver(optimizer), root / "small", limit)
        for limit in limits
    ]
    loads = [message_of(load_state, optimizer, root / name) for name in ("empty", "cut")]
    return saves + loads
