"""An adapter alone in a vLLM engine, at TP 1 and 2: log-probs of the merged model, and each rank compares."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from cookbook_npu.config import LoraConfig, TinyConfig
from cookbook_npu.rollout.vllm import missing_reason

# One key/value head: both ranks hold it.
TINY = TinyConfig(hidden_size=64, num_layers=2, ffn_size=128, num_kv_heads=1)
# alpha / rank is no power of two, and rank 12 is padded to 16
LORA = LoraConfig(rank=12, alpha=32.0, slots=2)
LAYER = "base_model.model.model.layers.1"
TOLERANCE = 1e-5


def random_adapter(shapes: dict[str, torch.Size], seed: int) -> dict[str, torch.Tensor]:
    "An adapter that changes every layer"
    generator = torch.Generator().manual_seed(seed)
    return {n: 0.1 * torch.randn(shape, generator=generator) for n, shape in shapes.items()}


def merged_logprobs(folder: Path, adapter: dict[str, torch.Tensor], samples) -> float:
    "The largest difference from the log-probs of transformers with the merged weights"
    from transformers import AutoModelForCausalLM

    from cookbook_npu.model.lora import merge_adapter

    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scale = LORA.alpha / LORA.rank
    net.load_state_dict(dict(merge_adapter(net.state_dict().items(), adapter, scale)))
    worst = 0.0
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        with torch.no_grad():
            logp_TV = net(ids).logits[0].log_softmax(-1)
        first = len(sample.prompt_ids)
        for t, (token, logp) in enumerate(
            zip(sample.response_ids, sample.logprobs, strict=True), first - 1
        ):
            worst = max(worst, abs(float(logp_TV[t, token]) - logp))
    return worst


def question(tokenizer):
    "Requests and their sampling"
    from cookbook_npu.config import SamplingConfig
    from cookbook_npu.rollout.engine import SamplingParams, text_requests

    # long prompts, so that blocks of the prefix cache are full
    requests = text_requests(["1+1=" * 8, "2*3="], 2, 0, tokenizer)
    return requests, SamplingParams.of(SamplingConfig(max_response_tokens=8))


def run_engine(rank: int, world_size: int, cache: str) -> dict[str, object]:
    "What happens on one rank of an engine, by the name of the check; runs in a process of its own"
    torch.set_num_threads(1)
    from cookbook_npu.data.tokenizer import build_tokenizer
    from cookbook_npu.errors import WeightUpdateError
    from cookbook_npu.model.tiny import build_tiny
    from cookbook_npu.rollout.engine import SharedDecoder, generate_together
    from cookbook_npu.rollout.vllm import VllmAdapterEngine, VllmEngine
    from cookbook_npu.weights.manifest import checksum

    folder = build_tiny(TINY, build_tokenizer(), f"{cache}/{world_size}/{rank}", 0)
    engine = VllmEngine(
        folder,
        dtype="float32",
        max_tokens=64,
        kv_cache_bytes=16 << 20,
        tensor_parallel=world_size,
        load_weights=False,
        lora=LORA,
    )
    results: dict[str, object] = {"first": engine.state}
    first, second = (random_adapter(engine.weights.shapes, seed) for seed in (0, 1))
    load = engine.weights.load

    def update(tensors, loaded=None) -> str:
        "What an update says; `loaded`: what the layers get instead (of one rank)"
        sums = {name: checksum(t) for name, t in tensors.items()}
        if loaded is not None:
            engine.weights.load = lambda version, _, handles: load(version, loaded, handles)
        try:
            engine.update_weights(engine.version + 1, tensors.items(), sums)
        except WeightUpdateError as error:
            return str(error)
        finally:
            engine.weights.load = load
        return "accepted"

    def sample():
        return engine.generate(*question(engine.tokenizer))

    def spoiled(name: str) -> dict[str, torch.Tensor]:
        other = {**first, name: first[name].clone()}
        if rank == world_size - 1:
            other[name][-1, -1] += 1
        return other

    results["update"] = update(first)
    results["sums"] = engine.checksums() == {n: checksum(t) for n, t in first.items()}
    tokens = sample()
    results["difference"] = merged_logprobs(folder, first, tokens)
    results["without"] = merged_logprobs(folder, {}, tokens)
    results["second"] = update(second)
    results["second difference"] = merged_logprobs(folder, second, sample())
    for name in ("self_attn.v_proj.lora_B", "mlp.down_proj.lora_A", "mlp.up_proj.lora_A"):
        name = f"{LAYER}.{name}.weight"
        results[name] = update(first, spoiled(name))
    gate, up = (f"{LAYER}.mlp.{part}_proj.lora_B.weight" for part in ("gate", "up"))
    results["swapped"] = update(first, {**first, gate: first[up], up: first[gate]})
    results["old"] = update(first, second)
    engine.sleep(2)
    engine.wake()
    results["asleep"] = engine.state
    results["back"] = update(first)
    again = sample()
    results["same"] = [s.logprobs for s in again] == [s.logprobs for s in tokens]
    together = SharedDecoder(engine.decoder)
    tenants = [VllmAdapterEngine(engine, slot, together) for slot in range(2)]
    asked = {}
    for slot, (tenant, own) in enumerate(zip(tenants, (first, second), strict=True)):
        sums = {name: checksum(t) for name, t in own.items()}
        tenant.update_weights(3 + slot, own.items(), sums)
        asked[slot] = (tenant, *question(engine.tokenizer))
    found = generate_together(asked)
    results["tenants"] = [
        (
            merged_logprobs(folder, own, found[slot]),
            {v for s in found[slot] for v in s.versions},
        )
        for slot, own in enumerate((first, second))
    ]
    tenants[1].close()
    results["kept"] = tenants[0].checksums() == {n: checksum(t) for n, t in first.items()}
    engine.close()
    return results


@functools.cache
def outcomes(ranks: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as cache:
        return run_ranks(f"{__file__}:run_engine", ranks, {"cache": cache}, timeout=300)


pytestmark = [
    pytest.mark.lane("devices"),
    pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or ""),
]
SIZES = (1, 2)


@pytest.mark.parametrize("ranks", SIZES)
def test_log_probs_are_those_of_the_merged_model(ranks):
    for found in outcomes(ranks):
        assert found["first"] == "awaiting weights"
        assert found["update"] == found["second"] == "accepted"
        assert found["sums"]
        assert found["difference"] < TOLERANCE < 1e-2 < found["without"]


@pytest.mark.parametrize("ranks", SIZES)
def test_a_later_version_reads_no_prefix_of_an_earlier_one(ranks):
    for found in outcomes(ranks):
        assert found["second difference"] < TOLERANCE


@pytest.mark.parametrize("ranks", SIZES)
def test_each_rank_finds_what_it_does_not_hold(ranks):
    found = outcomes(ranks)[-1]
    spoiled = [name for name in found if name.startswith(LAYER)]
    assert len(spoiled) == 3
    for name in spoiled:
        assert f"holds other values in {name}" in found[name]
    assert "gate_proj.lora_B" in found["swapped"]
    assert "holds other values in" in found["old"]
    if ranks == 2:
        assert "rank 1 of 2" in found[spoiled[0]]
        assert outcomes(2)[0][spoiled[0]] == "accepted"  # it holds the other part


@pytest.mark.parametrize("ranks", SIZES)
def test_the_weights_below_survive_a_sleep(ranks):
    for found in outcomes(ranks):
        assert found["asleep"] == "awaiting weights"
        assert found["back"] == "accepted" and found["same"]


@pytest.mark.parametrize("ranks", SIZES)
def test_two_tenants_in_one_batch_have_adapters_of_their_own(ranks):
    for found in outcomes(ranks):
        for slot, (difference, versions) in enumerate(found["tenants"]):
            assert difference < TOLERANCE
            assert versions == {3 + slot}
        assert found["kept"]
