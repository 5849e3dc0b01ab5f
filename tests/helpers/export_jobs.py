"""A trainer of every family on simulated NPUs, whose checkpoints test_export.py exports."""

import shutil

import torch

from cookbook_npu.config import OptimConfig, ParallelConfig
from cookbook_npu.model.checkpoint import BackgroundSaver
from cookbook_npu.model.megatron import (
    build_optimizer,
    destroy_parallel,
    export_weights,
    init_parallel,
    load_model,
)
from cookbook_npu.runs.checkpoints import Checkpoints
from cookbook_npu.runs.folder import RunFolder
from cookbook_npu.train.trainer import write_hf_folder

STEP = 2
IDS = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(0))


def train_and_save(hf_path: str, run_path: str, rank: int) -> torch.Tensor:
    "Two optimizer steps at TP 2, a checkpoint with and one without a Hugging Face folder; the last logits"
    parallel = ParallelConfig(tensor=2)
    init_parallel(parallel, 0)
    run = RunFolder.open(run_path)
    config = run.config()
    model = load_model(hf_path, config.model, parallel)
    optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-2), num_steps=STEP)
    for _ in range(STEP):
        optimizer.zero_grad()
        model.logits(IDS).logsumexp(-1).mean().backward()
        optimizer.step()
    folder = run.path / "writing"
    if rank == 0:
        (folder / "state").mkdir(parents=True)
    torch.distributed.barrier()
    saver = BackgroundSaver(optimizer)
    saver.start(folder / "state")
    saver.finish()
    named = {name: w.detach().cpu().contiguous() for name, w in export_weights(model)}
    if rank == 0:
        write_hf_folder(folder / "hf", hf_path, named)
        commit(run, folder)
    logits = model.logits(IDS).detach().cpu()
    destroy_parallel()
    return logits


def commit(run: RunFolder, folder) -> None:
    "The checkpoint twice: of step 2 with the Hugging Face folder, of step 1 with the state alone"
    store = Checkpoints.of_run(run)
    for step, left_out in ((STEP, None), (STEP - 1, "hf")):
        partial = store.partial(step)
        for name in {"state", "hf"} - {left_out}:
            shutil.copytree(folder / name, partial / name)
        store.commit(partial, step, {})
    shutil.rmtree(folder)


def every_family(rank, world_size, runs):
    return [train_and_save(hf, run, rank) for hf, run in runs]
