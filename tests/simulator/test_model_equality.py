"""Megatron models on the simulated NPU against Hugging Face: logits, gradients, names, packing, training.

One job of two processes checks everything: first as one model at TP 2 with sequence parallelism, then as
two copies at TP 1. A mixture of experts is split in two more ways: EP 2 over the ranks of a tensor-parallel
group, and over the two copies. The references are made here, in a process that knows no accelerator.
"""

import functools
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from model_values import ADAM_EPS, far, hf_gradients, plain_adamw, response_logp
from ranks import run_trainers
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from cookbook_npu.config import ModelConfig, OptimConfig, ParallelConfig, TinyConfig
from cookbook_npu.model.folder import both_names
from cookbook_npu.plan.dimensions import dimensions_of_folder, total_parameters
from cookbook_npu.rollout.engine import STACKED_EXPERTS

# transformers 4, of the 910B stack with vllm-ascend 0.18.0, has no Qwen3.5 (make test-stacks)
NEWER = (
    ("qwen3_5", "qwen3_5_moe") if int(version("transformers").split(".")[0]) >= 5 else ()
)
DENSE = {"llama": "Llama", "qwen2": "Qwen2"}  # without a tiny model of the package
FAMILIES = ("qwen3", "qwen3_moe", "qwen3_vl", *DENSE, *NEWER)
TEXT_ONLY = ("qwen3", "qwen3_moe", *DENSE)
EXPERTS = ("qwen3_moe", "qwen3_5_moe")
TRAINED = ("qwen3", "qwen2", *EXPERTS)
LAYOUTS = {
    "TP2": ParallelConfig(tensor=2),  # of experts, too
    "TP1": ParallelConfig(),
    "TP2EP2": ParallelConfig(tensor=2, expert=2),
    "DP2EP2": ParallelConfig(expert=2),
}
CASES = [
    (layout, family)
    for layout, parallel in LAYOUTS.items()
    for family in FAMILIES
    if parallel.expert == 1 or family in EXPERTS
]
TOLERANCE = 1e-5
TEMPERATURE = 0.8
OPTIM = OptimConfig(learning_rate=1e-2, weight_decay=0.1, clip_grad=0.5)
STEPS = 2


def sample(prompt: list[int], response: list[int]) -> SimpleNamespace:
    return SimpleNamespace(prompt_ids=prompt, response_ids=response)


SAMPLES = [
    sample([2, 3, 4], [5, 6]),
    sample([7], [8, 9, 10, 11]),
    sample([3, 4], [5]),
    sample([12, 13, 14, 2, 3], [4, 5, 6, 7, 8, 9]),
    sample([6, 5], [4, 3, 2]),
    sample([9, 9, 9], [9]),
]


# ---------------------------------------------------------------- references, on the host


def tokenizer():
    "15 tokens: a vocabulary that TP 2 does not divide"
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(
        models.WordLevel(
            {t: i for i, t in enumerate(["<pad>", "<eos>", *"0123456789+*="])}, "<pad>"
        )
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>"
    )


def dense_folder(folder: Path) -> Path:
    "A random model as transformers saves it: Llama 3's rotary positions, a tied head; Qwen2's biases"
    rope = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0)
    rope |= dict(high_freq_factor=4.0, original_max_position_embeddings=4)
    config = getattr(transformers, f"{DENSE[folder.name]}Config")(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer()),
        tie_word_embeddings=folder.name == "llama",
        **both_names({"rope_parameters": rope} if folder.name == "llama" else {}),
    )
    model = getattr(transformers, f"{DENSE[folder.name]}ForCausalLM")(config)
    for n, p in model.named_parameters():
        if n.endswith("bias"):
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def hf_model(folder: Path):
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    text = folder.name in TEXT_ONLY
    auto = AutoModelForCausalLM if text else AutoModelForImageTextToText
    return auto.from_pretrained(folder)


def folder_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    "The tensors of a model under the names of its folder: experts that transformers stacks, one by one"
    named = {}
    for name, t in tensors.items():
        path, _, leaf = name.rpartition(".")
        parts = STACKED_EXPERTS.get(leaf, ()) if path.endswith(".experts") else ()
        for e, expert in enumerate(t if parts else ()):
            for part, own in zip(parts, expert.chunk(len(parts)), strict=True):
                named[f"{path}.{e}.{part}.weight"] = own
        if not parts:
            named[name] = t
    return named


def hf_logprobs(hf, s: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
    "Log-probs and entropies of the response of one sample, by itself"
    own_T, logp_TV = response_logp(hf, s, TEMPERATURE)
    return own_T, -(logp_TV.exp() * logp_TV).sum(-1)


def objective(logps: list[torch.Tensor], numbers: list[int]) -> torch.Tensor:
    "A loss that weighs every sample differently; a sum, so it can be split anywhere"
    return -sum((1 + i) * logp.sum() for i, logp in zip(numbers, logps, strict=True)) / 10


def hf_train(hf) -> tuple[dict[str, torch.Tensor], list[float]]:
    "Weights after some steps of plain AdamW, and the gradient norms"

    def loss() -> torch.Tensor:
        return objective([hf_logprobs(hf, s)[0] for s in SAMPLES], range(len(SAMPLES)))

    norms = plain_adamw(hf, loss, OPTIM, STEPS)
    trained = {n: p.detach().clone() for n, p in hf.state_dict().items()}
    return folder_names(trained), norms


def chosen_experts(s: SimpleNamespace) -> np.ndarray:
    "Random experts of a rollout: of each token but the last, 2 of 8 in 2 layers"
    tokens = len(s.prompt_ids) + len(s.response_ids) - 1
    random = np.random.default_rng(tokens)
    return random.permuted(np.tile(np.arange(8), (tokens, 2, 1)), axis=-1)[..., :2]


def select(experts_TK, gate, inputs, output):
    "Let a router of transformers select these experts"
    scores_TK = output[0].softmax(-1).gather(1, experts_TK)
    return output[0], scores_TK / scores_TK.sum(-1, keepdim=True), experts_TK


def hf_replayed(hf) -> dict:
    "Log-probs and the gradient of the objective, each token computed by `chosen_experts`"
    hf.zero_grad()
    logps = []
    for s in SAMPLES:
        experts = chosen_experts(s)
        experts = torch.from_numpy(np.concatenate([experts, experts[:1]]))  # the last: any
        gates = [layer.mlp.gate for layer in hf.model.layers]
        hooks = [
            gate.register_forward_hook(functools.partial(select, experts[:, layer]))
            for layer, gate in enumerate(gates)
        ]
        logps.append(hf_logprobs(hf, s)[0])
        for hook in hooks:
            hook.remove()
    objective(logps, range(len(SAMPLES))).backward()
    grads = {n: p.grad.clone() for n, p in hf.named_parameters()}
    return {"logps": [p.detach() for p in logps], "grads": folder_names(grads)}


def reference(folder: Path) -> dict:
    hf = hf_model(folder)
    ids = torch.randint(2, 15, (2, 8), generator=torch.Generator().manual_seed(0))
    logits = hf(input_ids=ids).logits
    logits.logsumexp(-1).mean().backward()
    grads = {
        n: torch.zeros_like(p) if p.grad is None else p.grad
        for n, p in hf.named_parameters()
    }
    with torch.no_grad():
        logps = [hf_logprobs(hf, s) for s in SAMPLES]
    out = {
        "ids": ids,
        "logits": logits.detach(),
        "grads": folder_names(grads),
        "logps": logps,
        "parameters": sum(p.numel() for p in hf.parameters()),
    }
    if folder.name == "qwen3_moe" and NEWER:
        out["replayed"] = hf_replayed(hf)
    return out | ({"trained": hf_train(hf)} if folder.name in TRAINED else {})


# ---------------------------------------------------------------- what the two processes do


def whole_gradient(model, ids) -> dict[str, torch.Tensor]:
    "One micro-batch; at TP 1 nothing is summed over ranks, so that every copy keeps its own gradient"
    model.zero_grad()
    model.logits(ids).logsumexp(-1).mean().backward()
    if model.layout.tensor_size > 1:
        model.finish_gradients()
    return hf_gradients(model)


def whole_norm(model) -> float:
    "The gradient norm as the optimizer sees it: slices of all ranks, each parameter once"
    from cookbook_npu.model.megatron import build_optimizer

    megatron = build_optimizer(model, OPTIM, num_steps=10).megatron
    megatron.prepare_grads()
    return float(megatron.get_grad_norm())


def check_packed(model, want: dict) -> dict[str, float]:
    from cookbook_npu.model.logprobs import packed_logprobs
    from cookbook_npu.model.packing import pack, pad

    batch = pack(SAMPLES, model.layout.row_multiple)
    result = {"one_by_one": 0.0, "chunked": 0.0}
    with torch.no_grad():
        full = packed_logprobs(model, batch, TEMPERATURE, 10_000)
        small = packed_logprobs(model, batch, TEMPERATURE, 3)
        padded = packed_logprobs(
            model, pad(SAMPLES, model.layout.row_multiple), TEMPERATURE, 10_000
        )
    result["chunked"] = max(far(a, b.cpu()) for a, b in zip(small, full, strict=True))
    result["padded"] = max(far(a, b.cpu()) for a, b in zip(padded, full, strict=True))
    for got, references in zip(full, zip(*want["logps"], strict=True), strict=True):
        pairs = zip(batch.split(got), references, strict=True)
        result["one_by_one"] = max(result["one_by_one"], *(far(a, b) for a, b in pairs))
    return result


def check_training(model, want: dict) -> dict[str, float]:
    from cookbook_npu.model import megatron
    from cookbook_npu.model.logprobs import packed_logprobs
    from cookbook_npu.model.megatron import build_optimizer, export_weights
    from cookbook_npu.model.packing import pack, plan_micro_batches

    with patch.object(megatron, "ADAM_EPS", ADAM_EPS):
        optimizer = build_optimizer(model, OPTIM, num_steps=100)
    lengths = [len(s.prompt_ids) + len(s.response_ids) for s in SAMPLES]
    mine = plan_micro_batches(lengths, 12, model.layout.data_size)[model.layout.data_rank]
    norms = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for numbers in mine:
            place = model.layout
            mine_now = [SAMPLES[i] for i in numbers]
            batch = pack(mine_now, place.row_multiple, place.sequence_multiple)
            logp, _ = packed_logprobs(model, batch, TEMPERATURE, 5)
            objective(batch.split(logp), numbers).backward()
        norms.append(optimizer.step()[1])
    weights, reference_norms = want["trained"]
    differences = [abs(a / b - 1) for a, b in zip(norms, reference_norms, strict=True)]
    return {
        "micro_batches": len(mine),
        "norm": max(differences),
        "weights": max(far(t, weights[n]) for n, t in export_weights(model)),
    }


def check_weight_update(model, saved: dict[str, torch.Tensor]) -> dict:
    "All ranks join every bucket, rank 0 writes; the first time it fails half-way, and every rank hears of it"
    from cookbook_npu.errors import WeightUpdateError
    from cookbook_npu.model.megatron import export_weights
    from cookbook_npu.weights.transport import (
        SharedMemory,
        read_buckets,
        write_buckets,
    )

    class Full(SharedMemory):
        "The third bucket finds no memory"

        def allocate(self, index, nbytes):
            if index == 2:
                raise OSError(28, "No space left on device")
            return super().allocate(index, nbytes)

    def attempt(kind):
        memory = kind() if model.layout.rank == 0 else None
        named = export_weights(model)
        return write_buckets(1, named, 2**14, memory, device=model.layout.device), memory

    try:
        attempt(Full)
        heard = "nothing"
    except WeightUpdateError as error:
        heard = error.what
    manifest, memory = attempt(SharedMemory)
    if memory is None:
        return {"heard": heard}
    arrived = {n: t.clone() for n, t in read_buckets(manifest)}
    memory.release()
    wrong = [
        n
        for n in saved | arrived
        if n not in saved or n not in arrived or not torch.equal(saved[n], arrived[n])
    ]
    return {"heard": heard, "wrong": wrong, "buckets": len(manifest.buckets)}


def check_recomputed(
    folder: Path, parallel: ParallelConfig, ids, grads
) -> dict[str, float]:
    "Gradients where activations are computed again in the backward pass"
    from cookbook_npu.model.megatron import load_model

    differences = {}
    for kind in ("selective", "full"):
        again = load_model(folder, ModelConfig(dtype="float32", recompute=kind), parallel)
        counted = count_attention(again)
        found = whole_gradient(again, ids)
        differences[kind] = max(far(g, grads[n]) for n, g in found.items())
        differences[f"{kind} attentions"] = sum(counted)
    return differences


def check_replay(folder: Path, parallel: ParallelConfig, want: dict) -> dict[str, float]:
    "Other experts than the routers would select, also when activations are computed again"
    from cookbook_npu.model.logprobs import packed_logprobs
    from cookbook_npu.model.megatron import load_model
    from cookbook_npu.model.packing import pack, pad

    config = ModelConfig(dtype="float32", recompute="full")
    model = load_model(folder, config, parallel, routing_replay=True)
    samples = [
        SimpleNamespace(**vars(s), routed_experts=chosen_experts(s)) for s in SAMPLES
    ]
    differences = {}
    for lay_out in (pad, pack):
        batch = lay_out(samples, model.layout.row_multiple)
        logps = batch.split(packed_logprobs(model, batch, TEMPERATURE, 10_000)[0])
        pairs = zip(logps, want["logps"], strict=True)
        differences[lay_out.__name__] = max(far(a, b) for a, b in pairs)
    objective(logps, range(len(SAMPLES))).backward()
    model.finish_gradients()
    grads = hf_gradients(model)
    differences["gradient"] = max(far(g, want["grads"][n]) for n, g in grads.items())
    gates = [
        g.abs().max().item() for n, g in grads.items() if n.endswith("mlp.gate.weight")
    ]
    return differences | {"routers": len(gates), "router_gradient": min(gates)}


def count_attention(model) -> list[int]:
    "One entry for each attention that a layer computes from now on"
    calls: list[int] = []
    for layer in model.decoder.decoder.layers:
        core = layer.self_attention.core_attention
        core.register_forward_hook(lambda *_: calls.append(1))
    return calls


def check(folder: Path, parallel: ParallelConfig, want: dict) -> dict:
    from cookbook_npu.model.delta_net import choose_layout
    from cookbook_npu.model.megatron import export_weights, load_model

    model = load_model(folder, ModelConfig(dtype="float32"), parallel)
    saved = load_file(folder / "model.safetensors")
    exported = {n: t.cpu() for n, t in export_weights(model)}
    result = {
        "parameters": (total_parameters(dimensions_of_folder(folder)), want["parameters"]),
        "missing": sorted(set(saved) ^ set(exported)),
        "changed": [n for n in saved if not torch.equal(saved[n], exported[n])],
        "logits": far(model.logits(want["ids"]), want["logits"]),
        "updated": check_weight_update(model, saved),
        "layout": choose_layout(model, "auto"),
    }
    if parallel.expert > model.layout.tensor_size:  # experts add the tokens of both copies
        return result | check_packed(model, want) | {"trained": check_training(model, want)}
    grads = whole_gradient(model, want["ids"])
    result["grads"] = {n: far(g, want["grads"][n]) for n, g in grads.items()}
    result["largest_grad"] = max(g.abs().max().item() for n, g in grads.items())
    if model.layout.tensor_size > 1:
        result["norms"] = (
            whole_norm(model),
            torch.stack([g.norm() for g in want["grads"].values()]).norm().item(),
        )
    if folder.name == "qwen3":
        result["recomputed"] = check_recomputed(folder, parallel, want["ids"], grads)
    if "replayed" in want and parallel.expert > 1:
        result["replayed"] = check_replay(folder, parallel, want["replayed"])
    result |= check_packed(model, want)
    return result | ({"trained": check_training(model, want)} if "trained" in want else {})


def check_frozen(folder: Path, parallel: ParallelConfig) -> float:
    from cookbook_npu.model.megatron import load_model

    want = torch.load(folder.with_suffix(".pt"), weights_only=False)
    model = load_model(folder, ModelConfig(dtype="float32"), parallel, frozen=True)
    return far(model.logits(want["ids"]), want["logits"])


def all_layouts(rank: int, world_size: int, root: str) -> dict:
    from cookbook_npu.model.megatron import destroy_parallel, init_parallel

    results = {}
    for name, parallel in LAYOUTS.items():
        tensor = parallel.tensor
        layout = init_parallel(parallel, seed=0, timeout_s=300)
        assert (layout.data_size, layout.sequence) == (world_size // tensor, tensor > 1)
        for family in (family for found, family in CASES if found == name):
            want = torch.load(Path(root, f"{family}.pt"), weights_only=False)
            results[name, family] = check(Path(root, family), parallel, want)
        if parallel.expert > 1:
            results[name, "dense teacher"] = check_frozen(Path(root, "qwen3"), parallel)
        destroy_parallel()
    return results


# ---------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    from cookbook_npu.model.tiny import build_tiny

    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        # of a hybrid model: three gated delta nets and one attention layer
        layers = 4 if family.startswith("qwen3_5") else 2
        if family in DENSE:
            folder = dense_folder(root / family)
        else:
            shape = TinyConfig(
                family=family, hidden_size=64, num_layers=layers, ffn_size=128
            )
            folder = build_tiny(shape, tokenizer(), root / family, seed=0)
        torch.save(reference(folder), root / f"{family}.pt")
    return run_trainers(f"{__file__}:all_layouts", 2, root=str(root))


cases = pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(c))


@cases
def test_logits_equal_hugging_face(results, case):
    for rank in results:
        assert rank[case]["logits"] <= TOLERANCE


@pytest.mark.parametrize(
    "case", [c for c in CASES if c[0] != "DP2EP2"], ids=lambda c: "-".join(c)
)
def test_gradients_equal_hugging_face(results, case):
    for rank in results:
        assert {n: d for n, d in rank[case]["grads"].items() if d > TOLERANCE} == {}
        assert rank[case]["largest_grad"] > 1e-2  # the comparison is of something


@pytest.mark.parametrize("layout", ["TP2EP2", "DP2EP2"])
def test_a_mixture_may_have_a_dense_teacher(results, layout):
    for rank in results:
        assert rank[layout, "dense teacher"] <= TOLERANCE


@pytest.mark.skipif(not NEWER, reason="the reference hooks the routers of transformers 5")
def test_replayed_experts_compute_each_token(results):
    "TP 2 with sequence parallelism and EP 2: each rank routes its own half of the tokens"
    for rank in results:
        found = rank["TP2EP2", "qwen3_moe"]["replayed"]
        for name in ("pack", "pad", "gradient"):
            assert found[name] <= TOLERANCE
        assert found["routers"] == 2 and found["router_gradient"] > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_norm_counts_every_parameter_once(results, family):
    for rank in results:
        ours, theirs = rank["TP2", family]["norms"]
        assert ours == pytest.approx(theirs, rel=1e-5)


@cases
def test_the_plan_counts_the_parameters_of_transformers(results, case):
    planned, found = results[0][case]["parameters"]
    assert planned == found


@cases
def test_an_update_carries_every_weight_and_a_failed_one_stops_all_ranks(results, case):
    "Tied and untied heads, a padded vocabulary; the ranks leave the gathers at the same bucket"
    first, second = (rank[case]["updated"] for rank in results)
    assert first["wrong"] == [] and first["buckets"] > 3
    assert "bucket 2 could not be written" in first["heard"]
    assert second == {"heard": "1 ranks could not write a bucket"}


@cases
def test_every_weight_survives_load_and_export_bit_for_bit(results, case):
    "The tied head of qwen3 is not in the file either: the embedding is the head"
    for rank in results:
        assert rank[case]["missing"] == []
        assert rank[case]["changed"] == []


@cases
def test_every_layer_keeps_packed_sequences_apart(results, case):
    "The trial of the gated delta nets, with shards of several ranks and sequence parallelism"
    for rank in results:
        assert (rank[case]["layout"].layout, rank[case]["layout"].note) == ("thd", "")


@cases
def test_a_packed_row_equals_its_samples_one_by_one(results, case):
    for rank in results:
        assert rank[case]["one_by_one"] <= TOLERANCE


@cases
def test_padded_rows_equal_the_packed_row(results, case):
    for rank in results:
        assert rank[case]["padded"] <= TOLERANCE


@cases
def test_chunked_logprobs_equal_unchunked(results, case):
    for rank in results:
        assert rank[case]["chunked"] <= 1e-6


@pytest.mark.parametrize("layout", ["TP2", "TP1"])
@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputed_gradients_are_the_same(results, layout, kind):
    "Attention of both layers ran in the forward pass and again in the backward pass"
    for rank in results:
        found = rank[layout, "qwen3"]["recomputed"]
        assert found[kind] <= 1e-6
        assert found[f"{kind} attentions"] == 4


@pytest.mark.parametrize(
    "case", [c for c in CASES if c[1] in TRAINED], ids=lambda c: "-".join(c)
)
def test_training_steps_equal_plain_adamw(results, case):
    "TP 2 and DP 2 (two copies, half the samples each) against one plain process; so they equal each other"
    for rank in results:
        trained = rank[case]["trained"]
        assert trained["micro_batches"] >= 2
        assert trained["norm"] <= 1e-6  # relative: norms of 6 to 35 in float32
        assert trained["weights"] <= TOLERANCE
