"""Context parallelism on the simulated NPU against Hugging Face: log-probs, training, weights.

One job of four processes: ring and Ulysses attention at CP 2 (two copies), CP 4 and TP 2 x CP 2; a mixture
of experts, and models with images, one of them with gated delta nets, at ring attention. References and
samples are those of the other comparisons with Hugging Face.
"""

import sys
from pathlib import Path

import pytest
import torch
from model_values import digest
from ranks import run_trainers

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
    return run_trainers(f"{__file__}:all_layouts", 4, root=str(root))


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
