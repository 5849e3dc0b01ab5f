"""What the ranks of test_tenants.py run: tenants that share a model, alone and with others."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from text_samples import token_sample

from cookbook_npu.cluster.worker_group import LocalWorkerGroup
from cookbook_npu.config import RunConfig, override
from cookbook_npu.errors import CookbookError
from cookbook_npu.model.megatron import destroy_parallel
from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.rollout.engine import Request
from cookbook_npu.train.batch import Batch, make_batch
from cookbook_npu.train.offload import device_storages
from cookbook_npu.train.rollout_worker import Engines
from cookbook_npu.train.tenants import TenantEngine, Tenants, TenantTrainer
from cookbook_npu.weights.manifest import merge_manifests

STEPS = 3
A = {"seed": 1, "optim.learning_rate": 1e-2}
B = {
    "seed": 2,
    "optim.learning_rate": 3e-3,
    "optim.schedule": "linear",
    "algorithm.loss": "sapo",
}


def shared_config(tensor: int, **settings) -> RunConfig:
    "Three slots on a tiny model, with dropout: its random numbers belong to the tenant"
    overrides = {
        "placement.devices": tensor,
        "parallel.tensor": tensor,
        "rollout.prompts_per_step": 2,
        "rollout.samples_per_prompt": 2,
        "num_steps": 8,
        "lora.rank": 4,
        "lora.slots": 3,
        "lora.dropout": 0.2,
        "algorithm.use_reference": False,
    }
    return qwen3_4b_colocate(overrides=overrides | settings)


def batch_of(config: RunConfig, number: int, bad: str = "") -> Batch:
    "Two groups of two responses; `bad`: with a value that is not finite"
    draw = random.Random(number)
    samples = []
    for i in range(4):
        ids = [draw.randrange(5, 200) for _ in range(draw.randrange(1, 5))]
        prompt = [draw.randrange(5, 200) for _ in range(4)]
        samples.append(token_sample(i, prompt, ids, -5.0, reward=float(i % 2)))
    batch = make_batch(samples, 2, config.algorithm, 4, max_tokens=4)
    if bad == "log-prob":
        batch.old_logprobs = [t * np.float32("nan") for t in batch.rollout_logprobs]
    if bad == "gradient":
        weights = [t * np.float32("inf") for t in batch.loss_weights]
        batch = replace(batch, loss_weights=weights)
    return batch


class Side:
    "A trainer rank and an engine of all tenants, in this process"

    def __init__(self, config: RunConfig, folder: str, rank: int, world_size: int):
        self.config = config
        self.trainer = TenantTrainer(rank, world_size, config, folder)
        self.engine = TenantEngine(0, 1, config, folder) if rank == 0 else None
        self.folder = folder

    def lease(self, slot: int, overrides: dict) -> "Player":
        config = override(self.config, overrides)
        self.trainer.lease(slot, config)
        if self.engine:
            self.engine.lease(slot)
        player = Player(self, slot, config)
        player.send()
        return player

    def release(self, slot: int) -> None:
        self.trainer.release(slot)
        if self.engine:
            self.engine.release(slot)


class Player:
    "A tenant that acts in small pieces, each a call of the trainer or of the engine"

    def __init__(self, side: Side, slot: int, config: RunConfig):
        self.side = side
        self.slot = slot
        self.config = config
        self.version = 0
        self.calls = 0
        self.seen: list = []

    def of(self, method: str, *args):
        return self.side.trainer.call_in_slot(self.slot, method, *args)

    def send(self) -> None:
        manifest = self.of("write_weights", self.version)
        if self.side.engine:
            whole = merge_manifests([manifest])
            self.side.engine.call_in_slot(self.slot, "update_weights", whole)
        self.of("release_weights")
        self.version += 1

    def sample(self) -> None:
        self.calls += 1
        if self.side.engine is None:
            return
        requests = [
            Request(
                group_id="q", index=i, prompt_ids=[50 + i % 2, 43], seed=97 * self.calls + i
            )
            for i in range(6)
        ]
        found = self.side.engine.call_in_slot(
            self.slot, "generate", requests, self.config.sampling
        )
        self.seen += [(s.response_ids, s.logprobs, s.versions) for s in found]

    def pieces(self):
        "One piece of work of each step at a time"
        for number in range(STEPS):
            yield self.sample
            for half in range(2):
                batch = batch_of(self.config, 10 * number + half)
                yield lambda batch=batch: self.seen.append(self.of("add_gradient", batch))
            yield lambda: self.seen.append(self.of("step"))
            yield self.send

    def outcome(self) -> list:
        "Everything a tenant consists of, in bytes"
        one = self.side.trainer.slots[self.slot]
        layers = [
            p.detach().cpu()
            for n, p in one.model.module.named_parameters()
            if ".lora_" in n and f".{one.model.adapter}." in n
        ]
        moments = [t.detach().cpu() for t in one.optimizer.state_tensors()]
        states = [one.random["host"], one.random["device"]]
        states += [one.random["tracker"][name] for name in sorted(one.random["tracker"])]
        tensors = [
            t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for t in layers + moments + states
        ]
        return [tensors, self.seen, one.optimizer.steps, one.optimizer.lr]


def disturbances(side: Side, draw: random.Random):
    "Pieces of work of others: tenants join, train, fail and leave"
    slots = [0, 2]
    leased: dict[int, Player] = {}
    while True:
        slot = draw.choice(slots)
        player = leased.get(slot)
        kind = draw.choice(["work", "work", "nan", "gradient", "leave", "draw"])
        if player is None:
            leased[slot] = side.lease(slot, A | {"seed": draw.randrange(100)})
        elif kind == "work":
            player.sample()
            player.of("add_gradient", batch_of(player.config, draw.randrange(1000)))
            player.of("step")
            player.send()
        elif kind in ("nan", "gradient"):
            bad = "log-prob" if kind == "nan" else "gradient"
            failed = False
            try:
                player.of("add_gradient", batch_of(player.config, 1, bad))
                player.of("step")
            except CookbookError:
                failed = True
            assert failed
        elif kind == "leave":
            side.release(slot)
            del leased[slot]
        else:
            torch.rand(3)  # somebody else's random numbers
        yield


def interleavings(
    folder: str, tensor: int, count: int, rank: int, world_size: int
) -> list[bool]:
    "For each random order: whether tenant B ended bitwise as it does alone"
    config = shared_config(tensor)
    side = Side(config, folder, rank, world_size)

    def play(others=None, draw=None) -> list:
        player = side.lease(1, B)
        for piece in player.pieces():
            for _ in range(draw.randrange(3) if draw else 0):
                next(others)
            piece()
        found = player.outcome()
        side.release(1)
        return found

    alone = play()
    same = []
    for seed in range(count):
        draw = random.Random(seed)
        same.append(play(disturbances(side, draw), draw) == alone)
        for slot in (0, 2):
            if slot in side.trainer.slots:
                side.release(slot)
    destroy_parallel()
    return same


def adapter_bytes(folder: str, dtype: str, rank: int, world_size: int) -> dict[str, float]:
    "Device memory of a trained slot by parameter: weights, gradients and optimizer"
    config = shared_config(
        1, **{"model.dtype": dtype, "lora.rank": 16, "lora.dropout": 0.0}
    )
    trainer = TenantTrainer(rank, world_size, config, folder)
    trainer.lease(0, config)
    trainer.call_in_slot(0, "add_gradient", batch_of(config, 1))
    trainer.call_in_slot(0, "step")
    tenant = trainer.slots[0]
    weights = [p for p in tenant.model.module.parameters() if p.requires_grad]
    held = [*weights, *tenant.memory.gradients(), *tenant.memory.moments()]
    nbytes = sum(storage.nbytes() for storage in device_storages(held, "npu"))
    parameters = sum(p.numel() for p in weights)
    destroy_parallel()
    return {"per_parameter": nbytes / parameters, "parameters": parameters}


def verbs(folder: str, out: str, rank: int, world_size: int) -> dict:
    "Two tenants save their adapters; the whole model is trained with the same verbs"
    config = shared_config(1, **{"lora.dropout": 0.0})
    found = {}
    for name, each in (("adapters", config), ("whole", override(config, {"lora.rank": 0}))):
        given = {"config": each, "hf_path": folder}
        trainer = LocalWorkerGroup.create("trainer", TenantTrainer, kwargs=given)
        engine = LocalWorkerGroup.create("rollout0", TenantEngine, kwargs=given)
        tenants = Tenants(each, trainer, Engines([engine]), folder)
        names = ("a", "b") if name == "adapters" else ("whole",)
        for one in names:
            tenant = tenants.lease(
                one, {"optim.learning_rate": 1e-2, "seed": len(one + name)}
            )
            for number in range(2):
                samples = tenant.sample(["2+3=", "7+1="], n=4)
                for i, sample in enumerate(samples):
                    sample.reward = float((i + number + (one == "b")) % 2)
                tenant.forward_backward(samples)
                tenant.optim_step()
            place = Path(out) / one
            shutil.rmtree(place, ignore_errors=True)
            tenant.save(place)
            greedy = each.sampling.model_copy(update={"temperature": 0.0})
            sampled = tenant.sample(["2+3=", "9+4="], n=1, sampling=greedy)
            found[one] = [(s.prompt_ids, s.response_ids, s.logprobs) for s in sampled]
        if name == "whole":
            try:
                tenants.release(tenant)
                tenants.lease("second")
            except CookbookError as error:
                found["second"] = str(error)
        destroy_parallel()
    return found
