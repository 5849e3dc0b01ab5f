"""Context parallelism on the simulated NPU against Hugging Face: log-probs, training, weights, resume.

One job of four processes: ring and Ulysses attention at CP 2 (two copies), CP 4 and TP 2 x CP 2; a mixture
of experts, and models with images, one of them with gated delta nets, at ring attention. References and
samples are those of the other comparisons with Hugging Face.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from model_values import digest
from preloaded_jobs import TRAINER_RANK
from ranks import run_ranks

from cookbook_npu.config import ModelConfig, ParallelConfig, TinyConfig

sys.path.insert(0, str(Path(__file__).parent))  # in the ranks, too
import test_model_equality as text
import test_vision_equality as pictures

pytestmark = pytest.mark.lane("devices")

SIZES = {
    "CP2": {"context": 2},
    "CP4": {"context": 4},
    "TP2CP2": {"tensor": 2, "context": 2},
}
LAYOUTS = {
    (algorithm, name): ParallelConfig(context_algorithm=algorithm, **sizes)
    for algorithm in ("ring", "ulysses")
    for name, sizes in SIZES.items()
}
EXPERTS = ("ring", "CP2EP2")
LAYOUTS[EXPERTS] = ParallelConfig(context=2, expert=2)
SEEING = ("qwen3_vl", "qwen3_5")
WITH_PICTURES = [("ring", "CP4"), ("ring", "TP2CP2")]


def check_text(folder: Path, parallel: ParallelConfig, want: dict) -> dict:
    from cookbook_npu.model.logprobs import packed_logprobs
    from cookbook_npu.model.megatron import load_model
    from cookbook_npu.model.packing import pack

    model = load_model(folder, ModelConfig(dtype="float32"), parallel)
    place = model.layout
    row = pack(text.SAMPLES, place.row_multiple, place.sequence_multiple)
    with torch.no_grad():
        found = packed_logprobs(model, row, text.TEMPERATURE, 3)
    pairs = [
        pair
        for got, expected in zip(found, zip(*want["logps"], strict=True), strict=True)
        for pair in zip(row.split(got), expected, strict=True)
    ]
    empty, _ = packed_logprobs(model, pack([], place.row_multiple))
    return {
        "logps": max(text.far(a, b) for a, b in pairs),
        "empty": len(empty),
        "trained": text.check_training(model, want),
        "tensor_rank": place.tensor_rank,
        "digest": digest(model.module),
    }


def picture_reference(folder: Path) -> dict:
    from transformers import AutoModelForImageTextToText

    hf = AutoModelForImageTextToText.from_pretrained(folder)
    samples = pictures.make_samples(hf.config)
    with torch.no_grad():
        logps = [pictures.hf_logprobs(hf, s) for s in samples]
    return {"logps": logps, "trained": pictures.hf_train(hf, samples)}


def check_pictures(folder: Path, parallel: ParallelConfig, want: dict) -> dict:
    "One copy of the model on all ranks"
    model = pictures.load(folder, parallel)
    samples = pictures.make_samples(model.hf_config)
    logps = pictures.backward(model, samples)
    pairs = zip(logps, want["logps"], strict=True)
    return {
        "logps": max(pictures.far(a, b) for a, b in pairs),
        "weights": pictures.check_training(model, samples, want)["far"],
    }


def plain_samples() -> list[SimpleNamespace]:
    "Four samples of text, as those with pictures are written"
    return [SimpleNamespace(**vars(sample), images=[]) for sample in text.SAMPLES[:4]]


def check_trainer(rank: int, world_size: int, folder: Path, state: Path) -> dict:
    "The trainer role at CP 2 and DP 2: an update, a checkpoint, a resume in this layout and without CP"
    from megatron.core import parallel_state

    from cookbook_npu.model.checkpoint import load_policy_weights
    from cookbook_npu.model.megatron import destroy_parallel, init_parallel, load_model
    from cookbook_npu.plan.plan import process_groups
    from cookbook_npu.recipes import qwen3_4b_colocate
    from cookbook_npu.train.trainer import Trainer

    small = {
        "model.dtype": "float32",
        "parallel.tensor": 1,
        "parallel.context": 2,
        "placement.devices": 4,
        "rollout.prompts_per_step": 2,
        "rollout.samples_per_prompt": 2,
        "sampling.max_response_tokens": 8,
        "data.max_prompt_tokens": 24,
        "train.micro_batch_tokens": 16,
        "algorithm.use_reference": False,
        "algorithm.kl_loss_coef": 0.0,
    }
    config = qwen3_4b_colocate(overrides=small)
    trainer = Trainer(rank, world_size, config, str(folder))
    batch = pictures.as_batch(config, plain_samples())
    logps = trainer.logprobs(batch)
    first = trainer.train(batch)
    state.mkdir(exist_ok=True)
    torch.distributed.barrier()
    trainer.save_state(str(state))
    trainer.finish_state()
    held = digest(trainer.model.module)
    second = trainer.train(batch)
    moved = digest(trainer.model.module)
    restored = trainer.load_state(str(state))
    back = digest(trainer.model.module)
    again = trainer.train(batch)
    groups = {
        "TP": parallel_state.get_tensor_model_parallel_group(),
        "CP": parallel_state.get_context_parallel_group(),
        "DP": parallel_state.get_data_parallel_group(),
    }
    planned = process_groups(config)
    found = {
        "groups": {
            name: torch.distributed.get_process_group_ranks(group) in planned[name]
            for name, group in groups.items()
        },
        "rows": sorted(logps),
        "metrics": (first, second, again),
        "restored": restored,
        "digests": (held, moved, back, digest(trainer.model.module)),
    }
    destroy_parallel()
    init_parallel(ParallelConfig(), seed=0, timeout_s=300)
    alone = load_model(folder, ModelConfig(dtype="float32"), ParallelConfig())
    load_policy_weights(alone, state)
    return found | {"elsewhere": digest(alone.module)}


def all_layouts(rank: int, world_size: int, root: str) -> dict:
    from cookbook_npu.model.megatron import destroy_parallel, init_parallel

    wants = {
        family: torch.load(Path(root, f"{family}.pt"), weights_only=False)
        for family in ("qwen3", "qwen3_moe", *SEEING)
    }
    results = {}
    for name, parallel in LAYOUTS.items():
        layout = init_parallel(parallel, seed=0, timeout_s=300)
        assert layout.data_size == world_size // parallel.model_size
        family = "qwen3_moe" if name == EXPERTS else "qwen3"
        results[name] = check_text(Path(root, family), parallel, wants[family])
        for seeing in SEEING if name in WITH_PICTURES else ():
            found = check_pictures(Path(root, seeing), parallel, wants[seeing])
            results[seeing, name] = found
        destroy_parallel()
    results["trainer"] = check_trainer(
        rank, world_size, Path(root, "qwen3"), Path(root, "state")
    )
    destroy_parallel()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    from cookbook_npu.data.tokenizer import build_tokenizer
    from cookbook_npu.model.tiny import build_tiny

    root = tmp_path_factory.mktemp("models")
    size = {"hidden_size": 64, "num_layers": 2, "ffn_size": 128, "num_kv_heads": 4}
    for family in ("qwen3", "qwen3_moe"):
        shape = TinyConfig(family=family, **size)
        folder = build_tiny(shape, text.tokenizer(), root / family, seed=0)
        torch.save(text.reference(folder), root / f"{family}.pt")
    for family in SEEING:
        shape = TinyConfig(family=family, **size)
        folder = build_tiny(shape, build_tokenizer(), root / family, seed=0)
        torch.save(picture_reference(folder), root / f"{family}.pt")
    return run_ranks(
        f"{__file__}:all_layouts",
        4,
        {"root": str(root)},
        timeout=300,
        bootstrap="trainer",
        preload=TRAINER_RANK,
    )


layouts = pytest.mark.parametrize("layout", list(LAYOUTS), ids="-".join)


@layouts
def test_logprobs_equal_hugging_face(results, layout):
    for rank in results:
        assert rank[layout]["logps"] <= text.TOLERANCE
        assert rank[layout]["empty"] == 0


@layouts
def test_two_steps_equal_plain_adamw(results, layout):
    for rank in results:
        trained = rank[layout]["trained"]
        assert max(trained["norm"], trained["weights"]) <= text.TOLERANCE
    if layout == EXPERTS:
        return
    found = {(rank[layout]["tensor_rank"], rank[layout]["digest"]) for rank in results}
    assert len(found) == LAYOUTS[layout].tensor, "ranks with the same weights differ"


@pytest.mark.parametrize("layout", WITH_PICTURES, ids="-".join)
@pytest.mark.parametrize("family", SEEING)
def test_pictures_equal_hugging_face(results, family, layout):
    "And with gated delta nets rows of text alone among them"
    for rank in results:
        found = rank[family, layout]
        assert found["logps"] <= text.TOLERANCE
        assert {n: d for n, d in found["weights"].items() if d > text.TOLERANCE} == {}


def test_groups_are_those_of_the_plan(results):
    for rank in results:
        assert rank["trainer"]["groups"] == {"TP": True, "CP": True, "DP": True}


def test_a_trainer_resumes_bit_for_bit_and_without_context_parallelism(results):
    for number, rank in enumerate(results):
        found = rank["trainer"]
        first, second, again = found["metrics"]
        assert found["restored"] and second == again
        held, moved, back, end = found["digests"]
        assert held == back == found["elsewhere"] and moved == end != held
        if number % 2:
            assert found["rows"] == []  # CP rank 0 returns the values of both
    assert sorted(row for rank in results for row in rank["trainer"]["rows"]) == [
        0,
        1,
        2,
        3,
    ]
    whole = [rank["trainer"]["metrics"][0] for rank in results]
    assert "grad_norm" in whole[0] and "grad_norm" not in whole[1]
