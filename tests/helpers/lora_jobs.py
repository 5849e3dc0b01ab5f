"""What the ranks of test_lora.py run: an adapter on each model family, trained and saved."""

from pathlib import Path

import torch

from cookbook_npu.config import LoraConfig, ModelConfig, OptimConfig, ParallelConfig
from cookbook_npu.model.checkpoint import BackgroundSaver, load_policy_weights
from cookbook_npu.model.lora import adapter_off
from cookbook_npu.model.megatron import (
    build_optimizer,
    destroy_parallel,
    export_adapter,
    export_weights,
    init_parallel,
    load_model,
)
from cookbook_npu.train.trainer import write_hf_folder

STEPS = 3
IDS = torch.randint(5, 200, (2, 8), generator=torch.Generator().manual_seed(0))
ATTENTION_AND_MLP = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
TARGETS = {
    "qwen3": ATTENTION_AND_MLP,
    "qwen3_5": (*ATTENTION_AND_MLP, "in_proj", "out_proj", "vision"),
    "qwen3_vl": (*ATTENTION_AND_MLP, "vision"),
}


def lora_of(family: str) -> LoraConfig:
    return LoraConfig(rank=4, alpha=16, targets=TARGETS[family])


def load(folder: Path, family: str, tensor: int):
    parallel = ParallelConfig(tensor=tensor)
    init_parallel(parallel, seed=0)
    float32 = ModelConfig(dtype="float32")
    return load_model(folder, float32, parallel, lora=lora_of(family), seed=3)


def train(folder: Path, family: str, tensor: int, rank: int) -> dict:
    "Train an adapter; save its state, its peft folder and the merged model"
    model = load(folder, family, tensor)
    frozen = {
        n: p.detach().clone()
        for n, p in model.module.named_parameters()
        if not p.requires_grad
    }
    with torch.no_grad():
        first = model.logits(IDS)
    optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-2), STEPS)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model.logits(IDS).logsumexp(-1).mean()
        loss.backward()
        losses.append(loss.item())
        norms.append(optimizer.step()[1])
    named = {name: t.cpu().contiguous() for name, t in export_adapter(model)}
    weights = {name: t.cpu().contiguous() for name, t in export_weights(model)}
    place = folder.parent
    if rank == 0:
        (place / f"state{tensor}").mkdir()
        write_hf_folder(place / f"adapter{tensor}", folder, named, lora_of(family))
        write_hf_folder(place / f"merged{tensor}", folder, weights)
    torch.distributed.barrier()
    saver = BackgroundSaver(optimizer)
    saver.start(place / f"state{tensor}")
    saver.finish()
    with torch.no_grad():
        trained = model.logits(IDS).cpu()
        with adapter_off(model.module):
            reference = model.logits(IDS)
    after = dict(model.module.named_parameters())
    moments = sum(t.numel() for t in optimizer.state_tensors())
    out = {
        "losses": losses,
        "norms": norms,
        "logits": trained,
        "frozen": all(torch.equal(after[n], p) for n, p in frozen.items()),
        "reference": torch.equal(reference, first),
        "trained": sum(p.numel() for p in after.values() if p.requires_grad),
        "optimizer": moments,
    }
    destroy_parallel()
    return out


def resume(folder: Path, family: str, tensor: int, saved: int) -> torch.Tensor:
    "The logits of an adapter that was saved at another TP"
    model = load(folder, family, tensor)
    load_policy_weights(model, folder.parent / f"state{saved}")
    with torch.no_grad():
        logits = model.logits(IDS).cpu()
    destroy_parallel()
    return logits


def at_tp2(folders: dict[str, str], rank: int, world_size: int) -> dict[str, dict]:
    return {f: train(Path(p), f, 2, rank) for f, p in folders.items()}


def at_tp1(folders: dict[str, str], rank: int, world_size: int) -> dict[str, dict]:
    return {
        f: train(Path(p), f, 1, rank) | {"resumed": resume(Path(p), f, 1, 2)}
        for f, p in folders.items()
    }
