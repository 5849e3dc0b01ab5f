"""Trainers in several layouts of four simulated NPUs against one device.

The rows cover every pair of sizes and families that can occur together with pipeline stages. One job of
four processes runs them one after another: log-probs, gradients, two optimizer steps, a sleep, a weight
update, and the second step again from the checkpoint of another layout. Qwen3-MoE replays random experts.
"""

from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from model_values import gradients_as_weights
from ranks import run_trainers
from text_samples import token_sample

from cookbook_npu.config import TinyConfig, override
from cookbook_npu.data.sample import ImageInput
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.errors import NumericsError
from cookbook_npu.plan.memory import (
    communicators,
    critic_parameters,
    model_of,
    stages_of,
    trainer_parameters,
)
from cookbook_npu.plan.plan import process_groups
from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.train.batch import make_batch

pytestmark = pytest.mark.lane("devices")

DEVICES = 4
TOLERANCE = 1e-5
FAMILIES = {
    "qwen3": TinyConfig(num_layers=2),
    "qwen3_moe": TinyConfig(num_layers=2, num_experts=4),
    "qwen3_vl": TinyConfig(num_layers=4),  # image features are added to the first two
    # three gated delta nets, whose key heads TP x CP divides, and one attention layer
    "qwen3_5": TinyConfig(num_layers=4, num_kv_heads=4),
    "qwen3_5_moe": TinyConfig(num_layers=4, num_kv_heads=4, num_experts=4),
}
REPLAYED = ("qwen3_moe",)  # trained with the experts of the rollout
SMALL = dict(hidden_size=32, ffn_size=64)
COUNTED = ("qwen3", "qwen3_moe")  # whose tiny models the plan counts whole


@dataclass(frozen=True)
class Row:
    family: str
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    data: int = 1
    context: int = 1
    lora: bool = False  # train an adapter

    @property
    def reference(self) -> str:
        "The model on one device that this row must equal"
        return f"{self.family}-LoRA" if self.lora else self.family

    def __str__(self):
        sizes = {
            "TP": self.tensor,
            "CP": self.context,
            "PP": self.pipeline,
            "EP": self.expert,
            "DP": self.data,
        }
        split = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        return "-".join([self.reference, *split])

    @property
    def can_run(self) -> bool:
        "On all devices, with experts in a mixture only"
        experts = self.expert == 1 or TinyConfig(family=self.family).is_mixture
        size = self.tensor * self.context * self.pipeline * self.data
        return size == DEVICES and experts

    def pairs(self) -> set:
        return set(combinations(vars(self).items(), 2))


# A row resumes from the checkpoint of the row above it that has the same family and EP, the first
# from its own. PP 1 of the other families: test_model_equality.py, test_vision_equality.py
# Adapters: refused with pipeline stages
ROWS = [
    Row("qwen3", tensor=2, pipeline=2),
    Row("qwen3", tensor=2, context=2),
    Row("qwen3", pipeline=2, data=2),
    Row("qwen3_moe", pipeline=2, context=2),
    Row("qwen3_moe", tensor=2, data=2, expert=2),
    Row("qwen3_moe", pipeline=2, context=2, expert=2),
    Row("qwen3_moe", tensor=2, pipeline=2, expert=2),
    Row("qwen3_vl", context=2, data=2),
    Row("qwen3_vl", tensor=2, pipeline=2),
    Row("qwen3_5", context=4),
    Row("qwen3_5", tensor=2, context=2),
    Row("qwen3_5", tensor=2, pipeline=2),
    Row("qwen3_5", pipeline=2, context=2),
    Row("qwen3_5", pipeline=2, data=2),
    Row("qwen3_5_moe", tensor=2, context=2),
    Row("qwen3_5_moe", tensor=2, pipeline=2, expert=2),
    Row("qwen3_5_moe", pipeline=2, data=2, expert=2),
    Row("qwen3", tensor=2, context=2, lora=True),
    Row("qwen3_5", context=2, data=2, lora=True),
    Row("qwen3_moe", tensor=2, data=2, expert=2, lora=True),
]
ADAPTED = ("qwen3", "qwen3_moe", "qwen3_5")
REFERENCES = [*map(Row, FAMILIES), *(Row(family, lora=True) for family in ADAPTED)]


def test_the_rows_cover_every_pair():
    sizes = (1, 2)
    every = [Row(*values) for values in product(FAMILIES, *[sizes] * 5)]
    possible = set().union(*(row.pairs() for row in every if row.can_run))
    assert all(row.can_run for row in ROWS)
    assert possible - set().union(*(row.pairs() for row in ROWS)) == set()


# ---------------------------------------------------------------- what the processes do


def run_config(row: Row, devices: int):
    shape = FAMILIES[row.family].model_dump(exclude_unset=True)
    tiny = {f"model.tiny.{name}": value for name, value in shape.items()}
    own = {
        **tiny,
        **{f"model.tiny.{name}": value for name, value in SMALL.items()},
        "model.tiny.family": row.family,
        "placement.devices": devices,
        "parallel.tensor": row.tensor,
        "parallel.context": row.context,
        "parallel.pipeline": row.pipeline,
        "parallel.expert": row.expert,
        "rollout.prompts_per_step": 4,
        "rollout.samples_per_prompt": 2,
        "train.micro_batch_tokens": 32,
        "placement.destroy_process_groups": True,
        "optim.learning_rate": 1e-2,
        "optim.clip_grad": 0.0,
    }
    if row.family in REPLAYED:  # and layers are computed again in the backward pass
        own |= {"rollout.routing_replay": True, "model.recompute": "full"}
    if row.lora:
        layers = ("linear_qkv", "linear_proj")  # not those of experts
        nets = ("in_proj", "out_proj") if row.family == "qwen3_5" else ()
        own |= {"lora.rank": 4, "lora.targets": (*layers, *nets)}
    return override(qwen3_4b_colocate(overrides={"placement.devices": 4}), own)


def chosen_experts(tokens: int, hf) -> np.ndarray:
    "Random experts, which the routers would not select: [tokens, layers, top-k]"
    shape = (tokens, hf.num_hidden_layers, 1)
    every = np.tile(np.arange(hf.num_experts, dtype=np.uint8), shape)
    chosen = np.random.default_rng(tokens).permuted(every, axis=-1)
    return chosen[..., : hf.num_experts_per_tok]


def make_inputs(config, hf):
    "Eight graded responses of different lengths; a model with a vision tower also sees an image"
    images = {}
    prompts = [[50, 43, 50, 61], [51, 43], [52, 45, 50, 43, 53], [54]]
    if hasattr(hf, "vision_config"):
        noise = torch.Generator().manual_seed(0)
        pixels = torch.randn(4 * 6, 3 * 2 * 16 * 16, generator=noise).numpy()
        images["picture"] = ImageInput(
            reference="picture", pixel_values=pixels, grid_thw=(1, 4, 6)
        )
        shown = [hf.image_token_id] * 6
        prompts[2] = [50, hf.vision_start_token_id, *shown, hf.vision_end_token_id, 43]
    samples = []
    for number, (group, index) in enumerate(product(range(4), range(2))):
        response = [48 + (number + i) % 10 for i in range(1 + number % 5)]
        seen = ["picture"] if images and group == 2 else []
        tokens = len(prompts[group]) + len(response) - 1
        experts = chosen_experts(tokens, hf) if config.rollout.routing_replay else None
        more = {"reward": float(index == group % 2), "images": seen}
        more |= {"routed_experts": experts}
        samples.append(token_sample(number, prompts[group], response, -5.5, **more))
    size = config.global_batch_size
    return make_batch(samples, 2, config.algorithm, size, 8, images)


def whole(tensors) -> dict[str, torch.Tensor]:
    return {name: t.detach().cpu().clone() for name, t in tensors}


def exported(model) -> dict[str, torch.Tensor]:
    "The trained weights under their Hugging Face names: all, or those of an adapter"
    from cookbook_npu.model.megatron import export_adapter, export_weights

    export = export_weights if model.adapter_scale is None else export_adapter
    return whole(export(model))


def whole_gradients(model) -> dict[str, torch.Tensor]:
    "The summed gradients under Hugging Face names: exported as if they were the weights"
    import torch.distributed as dist
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer

    model.finish_gradients()
    for group in (*model.ddp.bucket_groups, *model.ddp.expert_parallel_bucket_groups):
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:  # each rank has summed its own slice
            own = shard_buffer(bucket.grad_data, ranks.size())[ranks.rank()]
            dist.all_gather_into_tensor(bucket.grad_data, own.clone(), group=ranks)
    with gradients_as_weights(p for p in model.module.parameters() if p.requires_grad):
        return exported(model)


def check_update(trainer) -> list[str]:
    "Names of an update that differ from the exported weights"
    from cookbook_npu.weights.transport import read_buckets

    manifest = trainer.weights.write(1)
    want = exported(trainer.model)
    if manifest is None:
        return []
    found = whole(read_buckets(manifest))
    trainer.weights.release()
    return [n for n in want | found if not torch.equal(want.get(n), found.get(n))]


def with_critic(critic, batch, metrics: list[dict]) -> dict:
    "Train a critic; return its values before and after, keyed apart from log-probs"
    returns = [np.linspace(0, 1, n, dtype=np.float32) for n in batch.response_lengths]
    old = [np.zeros_like(one) for one in returns]
    before = critic.forward_only(batch)
    metrics[0] |= critic.train(replace(batch, values=old, returns=returns))
    after = critic.forward_only(batch)
    return {("before", i): v for i, v in before.items()} | {
        ("after", i): v for i, v in after.items()
    }


def not_finite(trainer, batch) -> str:
    "The error of a batch of which one rank meets a value that is not finite"
    old = [np.full(n, -5.5, dtype=np.float32) for n in batch.response_lengths]
    old[0][0] = np.nan
    try:
        trainer.train(replace(batch, old_logprobs=old))
    except NumericsError as error:
        return error.what
    return "nothing"


def as_planned(config) -> dict[str, bool]:
    "Whether the groups of this rank are those of the plan"
    from megatron.core import parallel_state

    own = {
        "TP": parallel_state.get_tensor_model_parallel_group,
        "CP": parallel_state.get_context_parallel_group,
        "DP": parallel_state.get_data_parallel_group,
        "PP": parallel_state.get_pipeline_model_parallel_group,
        "EP": parallel_state.get_expert_model_parallel_group,
    }
    ranks = torch.distributed.get_process_group_ranks
    planned = process_groups(config)
    return {kind: ranks(own[kind]()) in planned[kind] for kind in planned.keys() & own}


def train_row(row: Row, devices: int, root: Path, previous: Row | None) -> dict:
    from cookbook_npu.model import megatron
    from cookbook_npu.model.megatron import destroy_parallel
    from cookbook_npu.npu.shims.torch import distributed as groups
    from cookbook_npu.train.run_trainer import RunTrainer
    from cookbook_npu.train.trainer import Trainer

    megatron.ADAM_EPS = 1e-4  # a tiny gradient does not become a step
    config = run_config(row, devices)
    batch_config, kind = config, Trainer
    if row.reference == "qwen3":  # with a critic, which gets its own values and returns
        config = override(config, {"algorithm.advantage_estimator": "gae"})
        kind = RunTrainer
    groups._used.clear()
    trainer = kind(0, devices, config, str(root / row.family))
    batch = make_inputs(batch_config, trainer.model.hf_config)
    result = {"logprobs": trainer.logprobs(batch)}
    (rows,) = batch.optimizer_steps
    trainer.forward_backward(batch, rows)
    result["gradients"] = whole_gradients(trainer.model)
    result["metrics"] = [trainer.train(batch)]
    if row.reference == "qwen3":
        result["logprobs"] |= with_critic(trainer.critic, batch, result["metrics"])
    folder = root / f"state-{row}"
    if trainer.rank == 0:
        folder.mkdir()
    torch.distributed.barrier()
    trainer.save_state(str(folder))
    trainer.finish_state()
    result["wrong"] = check_update(trainer)
    result["held"] = trainer.sleep()["memory/weights"]
    trainer.wake()
    result["metrics"].append(trainer.train(batch))
    result["weights"] = exported(trainer.model)
    result["bytes"] = trainer.model.weight_bytes
    if devices == DEVICES:
        trainer.load_state(str(root / f"state-{previous or row}"))
        trainer.train(batch)
        result["resumed"] = exported(trainer.model)
    if devices == DEVICES and previous is None:
        again = result["resumed"].items()
        result["exact"] = all(torch.equal(result["weights"][n], t) for n, t in again)
    if row == ROWS[0]:
        result["heard"] = not_finite(trainer, batch)
    used = groups._used
    result["groups"] = sum(group in used for group in groups.device_groups())
    result["as planned"] = as_planned(config)
    destroy_parallel()
    return result


def references(rank: int, world_size: int, root: str) -> None:
    for row in REFERENCES:
        found = train_row(row, 1, Path(root), None)
        torch.save(found, Path(root, f"{row}.pt"))


def farthest(found: dict, want: dict) -> float:
    assert found.keys() == want.keys()
    return max((found[n] - want[n]).abs().max().item() for n in want)


def all_rows(rank: int, world_size: int, root: str) -> dict:
    from cookbook_npu.npu.shims.registry import registry

    assert registry.apply("torch.process_groups").state == "applied"
    results = {}
    latest: dict[tuple[str, int], Row] = {}
    for row in ROWS:
        want = torch.load(Path(root, f"{row.reference}.pt"), weights_only=False)
        previous = latest.get((row.reference, row.expert))
        found = train_row(row, world_size, Path(root), previous)
        for name in ("gradients", "weights", "resumed"):
            if name in found:
                of = "weights" if name == "resumed" else name
                found[name] = farthest(found[name], want[of])
        found["bytes"] -= want["bytes"]
        results[str(row)] = found
        latest[row.reference, row.expert] = row
    return results


# ---------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> SimpleNamespace:
    from cookbook_npu.model.tiny import build_tiny

    root = tmp_path_factory.mktemp("layouts")
    for family, shape in FAMILIES.items():
        tiny = shape.model_copy(update={"family": family, **SMALL})
        build_tiny(tiny, build_tokenizer(), root / family, seed=0)
    run_trainers(f"{__file__}:references", root=str(root))
    want = {
        str(row): torch.load(root / f"{row}.pt", weights_only=False) for row in REFERENCES
    }
    ranks = run_trainers(f"{__file__}:all_rows", DEVICES, root=str(root))
    return SimpleNamespace(ranks=ranks, want=want)


rows = pytest.mark.parametrize("row", ROWS, ids=str)


@rows
def test_logprobs_equal_one_device(found, row):
    "And the values of a critic, before and after its optimizer step"
    merged = {}
    for rank in found.ranks:
        own = rank[str(row)]["logprobs"]
        assert not merged.keys() & own  # one rank reports a value
        merged |= own
    want = found.want[row.reference]["logprobs"]
    assert merged.keys() == want.keys()
    assert max(np.abs(merged[i] - want[i]).max() for i in want) <= TOLERANCE


@rows
def test_gradients_and_weights_equal_one_device(found, row):
    "After two optimizer steps; with a sleep, and resumed from another layout, in between"
    for rank in found.ranks:
        result = rank[str(row)]
        assert result["gradients"] <= TOLERANCE
        assert result["weights"] <= TOLERANCE
        assert result.get("resumed", 0.0) <= TOLERANCE
        assert result.get("exact", True)
        assert result["wrong"] == []
        # at TP a norm counts once for each rank
        assert row.tensor > 1 or result["bytes"] == 0


@pytest.mark.parametrize("row", [r for r in ROWS if r.reference in COUNTED], ids=str)
def test_the_plan_knows_the_largest_stage(found, row):
    config = run_config(row, DEVICES)
    stages = stages_of(model_of(config, len(build_tokenizer())), config)
    planned = [trainer_parameters(stage, config) for stage in stages]
    if row.family == "qwen3":  # with a critic
        critic = [critic_parameters(stage, config) for stage in stages]
        planned = [sum(both) for both in zip(planned, critic, strict=True)]
    held = max(rank[str(row)]["held"] for rank in found.ranks)
    assert held == pytest.approx(4 * max(planned), rel=0.02)


@rows
def test_the_plan_counts_the_process_groups_in_use(found, row):
    "Of Megatron and of mcore-bridge's export, those of expert parallelism included"
    planned, _ = communicators(run_config(row, DEVICES))
    for rank in found.ranks:
        assert planned - 2 <= rank[str(row)]["groups"] <= planned
        assert all(rank[str(row)]["as planned"].values())


def test_every_rank_hears_of_a_value_that_is_not_finite(found):
    "Only ranks of the last stage meet it; the others wait for their gradients"
    for rank in found.ranks:
        assert "finite" in rank[str(ROWS[0])]["heard"]


@rows
def test_metrics_equal_one_device(found, row):
    "The sum over the ranks, as the driver adds them"
    for step, want in enumerate(found.want[row.reference]["metrics"]):
        for name, value in want.items():
            ours = sum(r[str(row)]["metrics"][step].get(name, 0.0) for r in found.ranks)
            assert ours == pytest.approx(value, abs=TOLERANCE), name
