"""A tensor-parallel vLLM engine in two processes, as in a run: each rank checks what its own layers hold."""

import functools
import re
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from cookbook_npu.config import TinyConfig
from cookbook_npu.rollout.vllm import missing_reason
from cookbook_npu.rollout.vllm_layers import layer_weight

# One key/value head: both ranks hold it.
TINY = TinyConfig(hidden_size=64, num_layers=2, ffn_size=128, num_kv_heads=1)
GATE = "model.layers.1.mlp.gate_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@contextmanager
def loads(weights, alter: Callable):
    "While inside, vLLM is given other tensors than those that came"
    load = weights.load
    weights.load = lambda version, tensors, handles: alter(load, version, tensors, handles)
    try:
        yield
    finally:
        del weights.load


def change_last_row(name: str, rank: int, own: int):
    "One rank loads another last row of a weight"

    def alter(load, version, tensors, handles):
        if rank == own:
            tensors = {**tensors, name: tensors[name].clone()}
            tensors[name][-1] += 1
        load(version, tensors, handles)

    return alter


def swap_gate_and_up(load, version, tensors, handles):
    "The halves of a merged layer in the wrong order"
    load(version, {**tensors, GATE: tensors[UP], UP: tensors[GATE]}, handles)


def load_nothing(load, version, tensors, handles):
    "A reload that reports success and leaves the old weights"


def run_engine(rank: int, world_size: int, cache: str) -> dict[str, object]:
    "What happens on one rank of an engine, by the name of the check; runs in a process of its own"
    import torch

    torch.set_num_threads(1)
    from conformance import folder_weights, sharpen_model

    from cookbook_npu.config import SamplingConfig
    from cookbook_npu.data.tokenizer import build_tokenizer
    from cookbook_npu.errors import WeightUpdateError
    from cookbook_npu.model.tiny import build_tiny
    from cookbook_npu.rollout.engine import SamplingParams, text_requests
    from cookbook_npu.rollout.vllm import VllmEngine
    from cookbook_npu.weights.manifest import checksum

    folder, other = (
        sharpen_model(build_tiny(TINY, build_tokenizer(), f"{cache}/{rank}/{seed}", seed))
        for seed in (0, 1)
    )
    old = folder_weights(Path(folder))
    new = folder_weights(Path(other))
    expected = {name: checksum(tensor) for name, tensor in new.items()}
    engine = VllmEngine(
        folder,
        dtype="float32",
        max_tokens=64,
        kv_cache_bytes=16 << 20,
        tensor_parallel=world_size,
    )

    def update(tensors, compared) -> str:
        "What an update says"
        try:
            engine.update_weights(engine.version + 1, tensors.items(), compared)
        except WeightUpdateError as error:
            return str(error)
        return "accepted"

    def tokens() -> list[list[int]]:
        requests = text_requests(["1+1=", "2*3="], 2, 0, engine.tokenizer)
        sampling = SamplingParams.of(SamplingConfig(max_response_tokens=8))
        return [s.response_ids for s in engine.generate(requests, sampling)]

    results: dict[str, object] = {}
    results["first sums"] = engine.checksums() == {n: checksum(t) for n, t in old.items()}
    results["old tokens"] = tokens()
    results["update"] = update(new, expected)
    results["new sums"] = engine.checksums() == expected
    results["new tokens"] = tokens()
    results["tied head"] = engine.checksums(["lm_head.weight"]) == {
        "lm_head.weight": expected["model.embed_tokens.weight"]
    }
    some = dict(list(expected.items())[::3])
    results["sampled update"] = update(new, some)
    for name, alter in {
        "query": change_last_row(QUERY, rank, 1),
        "down": change_last_row(DOWN, rank, 0),
        "norm": change_last_row(NORM, rank, 1),
        "embedding": change_last_row("model.embed_tokens.weight", rank, 1),
        "swapped": swap_gate_and_up,
    }.items():
        with loads(engine.weights, alter):
            results[name] = update(new, expected)
        results[name + " state"] = engine.state
    results["back"] = update(new, expected)
    with loads(engine.weights, load_nothing):
        results["nothing"] = update(old, {n: checksum(t) for n, t in old.items()})
        sampled = {n: checksum(t) for n, t in old.items() if n == DOWN}
        results["nothing, sampled"] = update(old, sampled)
    results["recovered"] = update(new, some)
    engine.decoder.request_seeds = False
    results["tokens of one generator"] = [tokens(), tokens()]
    engine.close()
    return results


@functools.cache
def outcomes() -> list[dict]:
    "Of both ranks"
    with tempfile.TemporaryDirectory() as cache:
        return run_ranks(f"{__file__}:run_engine", 2, {"cache": cache}, timeout=300)


pytestmark = [
    pytest.mark.lane("devices"),
    pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or ""),
]


def test_both_ranks_sample_the_same_from_the_weights_they_were_given():
    first, second = outcomes()
    for name in ("first sums", "new sums", "tied head"):
        assert first[name] and second[name], name
    for name in ("update", "sampled update", "back", "recovered"):
        assert first[name] == second[name] == "accepted", name
    assert first["old tokens"] == second["old tokens"]
    assert first["new tokens"] == second["new tokens"] != first["old tokens"]


def test_without_request_seeds_both_ranks_sample_the_same_and_again():
    first, second = (result["tokens of one generator"] for result in outcomes())
    assert first == second and first[0] == first[1]


@pytest.mark.parametrize(
    ("name", "rank", "weight"),
    [
        ("query", 1, QUERY),
        ("down", 0, DOWN),
        ("norm", 1, NORM),
        ("embedding", 1, "model.embed_tokens.weight|lm_head.weight"),
    ],
)
def test_a_damaged_shard_is_refused_by_the_rank_that_holds_it(name, rank, weight):
    results = outcomes()
    assert re.search(
        rf"rank {rank} of 2 of the engine holds other values in ({weight}) |"
        rf"({weight}) still differs from",
        results[rank][name],
    ), results[rank][name]
    assert results[rank][name + " state"] == "awaiting weights"
    assert results[1 - rank][name] == "accepted"


def test_swapped_halves_are_refused_by_both_ranks():
    for rank, result in enumerate(outcomes()):
        assert f"rank {rank} of 2 of the engine holds other values in" in result["swapped"]
        assert GATE in result["swapped"] or UP in result["swapped"]


@pytest.mark.parametrize("name", ["nothing", "nothing, sampled"])
def test_a_reload_that_loads_nothing_is_refused_by_both_ranks(name):
    for rank, result in enumerate(outcomes()):
        assert f"rank {rank} of 2 of the engine holds other values in" in result[name]


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(),
    reason="vLLM reorders the kernels of a convolution on processors with AVX-512BF16 only",
)
def test_reordered_kernels_are_read_from_their_plain_copy_and_both_are_checked():
    "vLLM's own reordering; a copy that another one does not come from is not believed"
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    kernels = torch.randn(64, 1, 4).bfloat16()
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(kernels.clone(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    assert not torch.equal(layer.weight.flatten(), kernels.flatten())
    assert torch.equal(layer_weight(layer, "weight"), kernels.flatten(1))
    layer.weight[3, 0] += 1
    assert not torch.equal(layer_weight(layer, "weight"), kernels.flatten(1))
