"""Qwen3-VL and Qwen3.5 with images in Megatron against Hugging Face: every gradient, vision tower included.

One job of two processes: one model at TP 2 with sequence parallelism, then two copies at TP 1. The packed
row holds several images of odd sizes and samples of text alone.
"""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from model_values import (
    ADAM_EPS,
    digest,
    far,
    hf_gradients,
    plain_adamw,
    response_logp,
)
from ranks import run_trainers
from safetensors.torch import load_file
from text_samples import token_sample

from cookbook_npu.config import ModelConfig, OptimConfig, ParallelConfig, TinyConfig

# deepstack in one, gated delta nets in the other
SHAPES = {"qwen3_vl": {"num_layers": 2}, "qwen3_5": {"num_layers": 4}}
LAYOUTS = ("TP2", "TP1")
RECOMPUTE = ("none", "selective", "full")
TOLERANCE = 1e-5
OPTIM = OptimConfig(learning_rate=1e-2, weight_decay=0.1, clip_grad=0.5)
STEPS = 3
SHIM = "mcore_bridge.deepstack_sums"
TEXT = SimpleNamespace(prompt_ids=[7], response_ids=[8, 9, 10, 11], images=[])


def image(seed: int, height: int, width: int) -> SimpleNamespace:
    "An image of 16 x 16 pixel patches"
    noise = torch.Generator().manual_seed(seed)
    pixels = torch.randn(height * width, 3 * 2 * 16 * 16, generator=noise)
    return SimpleNamespace(pixel_values=pixels.numpy(), grid_thw=(1, height, width))


def seeing(config, response: list[int], *images) -> SimpleNamespace:
    "A sample whose prompt shows some images"
    from cookbook_npu.model.vision import image_token_count

    ids = [2]
    for shown in images:
        placeholders = [config.image_token_id] * image_token_count(shown, config)
        ids += [config.vision_start_token_id, *placeholders, config.vision_end_token_id, 3]
    return SimpleNamespace(prompt_ids=ids, response_ids=response, images=list(images))


def make_samples(config) -> list[SimpleNamespace]:
    "One row: most image tokens stand in the first half, so in one rank's part"
    return [
        seeing(config, [5, 6], image(0, 4, 6), image(1, 2, 10)),
        TEXT,
        seeing(config, [4, 5, 6], image(2, 6, 2)),
        SimpleNamespace(prompt_ids=[3, 4, 2, 2, 7, 9, 9, 9], response_ids=[5], images=[]),
    ]


# ---------------------------------------------------------------- references, on the host


def objective(logps: list[torch.Tensor]) -> torch.Tensor:
    "A loss that weighs every sample differently"
    return -sum((1 + i) * logp.sum() for i, logp in enumerate(logps)) / 10


def hf_logprobs(hf, s: SimpleNamespace) -> torch.Tensor:
    return response_logp(hf, s, images=s.images)[0]


def hf_train(hf, samples) -> dict[str, torch.Tensor]:
    "Weights after some steps of plain AdamW"
    plain_adamw(hf, lambda: objective([hf_logprobs(hf, s) for s in samples]), OPTIM, STEPS)
    return {n: p.detach().clone() for n, p in hf.state_dict().items()}


def many_samples(folder: Path, config) -> list[SimpleNamespace]:
    "A question about each of 50 pictures: sizes and kinds of files that engines are tested with, too"
    from conformance import many_pictures, seeing_ids

    from cookbook_npu.data.images import ImageProcessor

    processor = ImageProcessor(folder)
    found = []
    for source in many_pictures():
        shown = processor.image(source)
        ids = seeing_ids(config, processor.tokens(shown.grid_thw))
        image = SimpleNamespace(pixel_values=shown.pixel_values, grid_thw=shown.grid_thw)
        found.append(SimpleNamespace(prompt_ids=ids, response_ids=[5, 6], images=[image]))
    return found


def reference(folder: Path) -> dict:
    from transformers import AutoModelForImageTextToText

    hf = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad():
        many = [hf_logprobs(hf, s) for s in many_samples(folder, hf.config)]
    samples = make_samples(hf.config)
    logps = [hf_logprobs(hf, s) for s in samples]
    objective(logps).backward()
    grads = {n: p.grad.clone() for n, p in hf.named_parameters()}
    hf.zero_grad()
    objective([hf_logprobs(hf, TEXT)]).backward()
    text_grads = {n: p.grad for n, p in hf.named_parameters() if p.grad is not None}
    return {
        "logps": [logp.detach() for logp in logps],
        "many": many,
        "grads": grads,
        "text_grads": {n: g.clone() for n, g in text_grads.items()},
        "norm": torch.stack([g.norm() for g in grads.values()]).norm().item(),
        "trained": hf_train(hf, samples),
    }


# ---------------------------------------------------------------- what the two processes do


def lay_out(model, samples):
    "The packed row of some samples, as the trainer makes it"
    from cookbook_npu.model.packing import pack
    from cookbook_npu.model.vision import vision_positions

    placed = []
    for s in samples:
        ids = [*s.prompt_ids, *s.response_ids]
        positions = vision_positions(ids, s.images, model.hf_config) if s.images else None
        placed.append(SimpleNamespace(**vars(s), positions=positions))
    return pack(placed, model.layout.row_multiple, model.layout.sequence_multiple)


def backward(model, samples) -> list[torch.Tensor]:
    "Forward and backward pass of one row; at TP 1 every copy keeps its own gradient"
    from cookbook_npu.model.logprobs import packed_logprobs

    batch = lay_out(model, samples)
    model.zero_grad()
    logps = batch.split(packed_logprobs(model, batch)[0])
    objective(logps).backward()
    if model.layout.tensor_size > 1:
        model.finish_gradients()
    return logps


def distances(model, samples, want: dict[str, torch.Tensor]) -> dict[str, float]:
    "How far every gradient is from Hugging Face's; one that it lacks is zero"
    backward(model, samples)
    return {n: far(g, want.get(n, torch.zeros(()))) for n, g in hf_gradients(model).items()}


def load(folder: Path, parallel: ParallelConfig, **model):
    from cookbook_npu.model.megatron import load_model

    return load_model(folder, ModelConfig(dtype="float32", **model), parallel)


def check_training(model, samples, want: dict) -> dict:
    "Some steps of the optimizer"
    from cookbook_npu.model import megatron
    from cookbook_npu.model.megatron import build_optimizer, export_weights

    with patch.object(megatron, "ADAM_EPS", ADAM_EPS):
        optimizer = build_optimizer(model, OPTIM, num_steps=100)
    before = digest(model.module.visual)
    norms = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model, samples)
        norms.append(optimizer.step()[1])
    trained = {n: far(t, want["trained"][n]) for n, t in export_weights(model)}
    return {
        "before": before,
        "after": digest(model.module.visual),
        "norms": norms,
        "far": trained,
    }


def check_frozen(folder: Path, parallel: ParallelConfig, samples, want: dict) -> dict:
    "The same with a frozen tower"
    from cookbook_npu.model.megatron import export_weights

    model = load(folder, parallel, freeze_vision_tower=True)
    trained = check_training(model, samples, want)
    saved = load_file(folder / "model.safetensors")
    changed = [n for n, t in export_weights(model) if not torch.equal(t.cpu(), saved[n])]
    return {"changed": changed, "same": trained["before"] == trained["after"]}


def check_fused(folder: Path, parallel: ParallelConfig, samples, want: dict) -> dict:
    "A tower in fused kernels: its values, its gradients, its kernels, its borders on the host"
    import torch_npu

    from cookbook_npu.model import vision

    model = load(folder, parallel, fused_kernels=True)
    calls = []
    kernel = torch_npu.npu_fusion_attention

    def counted(*args, **kwargs):
        calls.append(args[4])
        return kernel(*args, **kwargs)

    torch_npu.npu_fusion_attention = counted
    try:
        logps = backward(model, samples)
    finally:
        torch_npu.npu_fusion_attention = kernel
    tower = model.module.visual
    embedding = getattr(tower.visual, "visual", tower.visual).patch_embed  # behind a shim
    whole = copy.deepcopy(embedding)  # of whole numbers, whose sums are exact
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in whole.parameters():
            values = torch.randint(-3, 4, parameter.shape, generator=noise)
            parameter.copy_(values)
        pixels = torch.randint(-3, 4, (8, whole.proj.weight[0].numel()), generator=noise)
        pixels = pixels.float().to(whole.proj.weight.device)
        convolved = type(whole).forward(whole, pixels)
        multiplied = vision.embed_patches(whole, pixels)
    return {
        "calls": calls,
        "layers": len(getattr(tower.visual, "visual", tower.visual).blocks),
        "logps": max(far(a, b) for a, b in zip(logps, want["logps"], strict=True)),
        "grads": distances(model, samples, want["grads"]),
        "equal": bool(torch.equal(convolved, multiplied)),
    }


def kept_elements(model) -> int:
    "What a pass of the tower alone keeps for its backward pass"
    kept = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t.numel())
        return t

    shown = image(0, 8, 8)
    device = next(model.module.parameters()).device
    pixels = torch.from_numpy(shown.pixel_values).to(device)
    grid = torch.tensor([shown.grid_thw], device=device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model.module.visual.visual(pixels, grid_thw=grid)
    return sum(kept)


def without_shim(model, samples, want: dict) -> dict[str, float]:
    "The gradients once the repair is taken back"
    from cookbook_npu.npu.shims.registry import registry

    registry.undo(SHIM)
    return distances(model, samples, want["grads"])


def check(folder: Path, parallel: ParallelConfig, want: dict) -> dict:
    model = load(folder, parallel)
    samples = make_samples(model.hf_config)
    logps = backward(model, samples)
    result = {
        "logps": max(far(a, b) for a, b in zip(logps, want["logps"], strict=True)),
        "none": distances(model, samples, want["grads"]),
        "text": distances(model, [TEXT], want["text_grads"]),
        "kept": {"none": kept_elements(model)},
    }
    for kind in RECOMPUTE[1:]:
        again = load(folder, parallel, recompute=kind)
        result[kind] = distances(again, samples, want["grads"])
        result["kept"][kind] = kept_elements(again)
    result["fused"] = check_fused(folder, parallel, samples, want)
    if parallel.tensor > 1:
        result["trained"] = check_training(load(folder, parallel), samples, want)
        result["frozen"] = check_frozen(folder, parallel, samples, want)
        if folder.name == "qwen3_vl":
            result["without"] = without_shim(model, samples, want)
    return result


def as_batch(config, samples):
    "The rollout of two groups, as the driver hands it to the trainer"
    from cookbook_npu.data.sample import ImageInput
    from cookbook_npu.train.batch import make_batch

    graded, images = [], {}
    for i, s in enumerate(samples):
        names = [f"{i}.{k}.png" for k in range(len(s.images))]
        for reference, shown in zip(names, s.images, strict=True):
            images[reference] = ImageInput(reference=reference, **vars(shown))
        more = {"reward": float(i % 2), "images": names}
        graded.append(token_sample(i, s.prompt_ids, s.response_ids, **more))
    return make_batch(graded, 2, config.algorithm, len(graded), 8, images)


def check_trainer(rank: int, world_size: int, folder: Path, want: dict) -> dict:
    "The trainer role: micro-batches with their images, an update, a checkpoint, an export"
    from cookbook_npu.recipes import qwen3_4b_colocate
    from cookbook_npu.train.trainer import Trainer
    from cookbook_npu.weights.transport import read_buckets

    small = {
        "model.dtype": "float32",
        "parallel.tensor": 2,
        "placement.devices": 2,
        "rollout.prompts_per_step": 2,
        "rollout.samples_per_prompt": 2,
        "sampling.max_response_tokens": 8,
        "data.max_prompt_tokens": 24,
        "train.micro_batch_tokens": 32,
        "algorithm.use_reference": False,
        "model.recompute": "full",
        "train.megatron_args": {"recompute_num_layers": 2},
    }
    config = qwen3_4b_colocate(overrides=small)
    trainer = Trainer(rank, world_size, config, str(folder))
    batch = as_batch(config, make_samples(trainer.model.hf_config))
    first = trainer.logprobs(batch)
    found = {
        "passed on": trainer.model.config.recompute_num_layers,
        "micro_batches": len(trainer.micro_batches(batch, range(len(batch)))),
        "logps": [far(want["logps"][i], torch.from_numpy(v)) for i, v in first.items()],
    }
    many = as_batch(config, many_samples(folder, trainer.model.hf_config))
    of_many = trainer.logprobs(many)
    found["many"] = [far(want["many"][i], torch.from_numpy(v)) for i, v in of_many.items()]
    old = [logp.numpy() for logp in want["logps"]]
    ready = replace(batch, old_logprobs=old)
    found["grad_norm"] = trainer.train(ready).get("grad_norm", 0.0)
    root = folder.parent
    (root / "state").mkdir(exist_ok=True)
    torch.distributed.barrier()
    trainer.save_state(str(root / "state"))
    trainer.finish_state()
    held = digest(trainer.model.module.visual)
    manifest = trainer.weights.write(1)
    trainer.save(str(root / "export"), str(folder))
    if manifest is not None:
        sent = {name: t.clone() for name, t in read_buckets(manifest)}
        exported = load_file(root / "export" / "model.safetensors")
        found["names"] = set(sent) ^ set(want["grads"])
        found["unequal"] = [n for n in sent if not torch.equal(sent[n], exported[n])]
    trainer.weights.release()
    trainer.train(ready)
    moved = digest(trainer.model.module.visual)
    trainer.load_state(str(root / "state"))
    found["digests"] = (held, moved, digest(trainer.model.module.visual))
    return found


def both_layouts(rank: int, world_size: int, root: str, family: str) -> dict:
    from cookbook_npu.model.megatron import destroy_parallel, init_parallel

    folder = Path(root, family)
    want = torch.load(Path(root, "want.pt"), weights_only=False)
    results: dict = {"family": family}
    for name, tensor in zip(LAYOUTS, (2, 1), strict=True):
        parallel = ParallelConfig(tensor=tensor)
        layout = init_parallel(parallel, seed=0, timeout_s=300)
        assert layout.sequence == (tensor > 1)
        results[name] = check(folder, parallel, want)
        destroy_parallel()
    results["trainer"] = check_trainer(rank, world_size, folder, want)
    destroy_parallel()
    return results


# ---------------------------------------------------------------- the tests


FAMILIES = ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.lane("devices"))]


@pytest.fixture(scope="module", params=FAMILIES)
def results(tmp_path_factory, request) -> list[dict]:
    from cookbook_npu.data.tokenizer import build_tokenizer
    from cookbook_npu.model.tiny import build_tiny

    root = tmp_path_factory.mktemp("models")
    family = request.param
    shape = TinyConfig(family=family, hidden_size=64, ffn_size=128, **SHAPES[family])
    folder = build_tiny(shape, build_tokenizer(), root / family, seed=0)
    torch.save(reference(folder), root / "want.pt")
    return run_trainers(f"{__file__}:both_layouts", 2, root=str(root), family=family)


layouts = pytest.mark.parametrize("layout", LAYOUTS)


@layouts
def test_a_fused_tower_gives_the_same_values_and_gradients(results, layout):
    "One kernel for each layer and pass over all images; a patch embedding without a convolution"
    for rank in results:
        fused = rank[layout]["fused"]
        # one call for each layer of the tower and sample; text alone has an image of zeros, too
        assert set(fused["calls"]) == {"TND"} and not len(fused["calls"]) % fused["layers"]
        assert fused["logps"] <= TOLERANCE
        assert wrong(fused["grads"]) == {}
        assert fused["equal"]


def wrong(grads: dict[str, float]) -> dict[str, float]:
    return {n: d for n, d in grads.items() if d > TOLERANCE}


@layouts
def test_a_packed_row_with_images_equals_its_samples_one_by_one(results, layout):
    for rank in results:
        assert rank[layout]["logps"] <= TOLERANCE


@layouts
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_all_gradients_equal_hugging_face(results, layout, recompute):
    "Patch embedding, blocks, merger, mergers of deepstack, language model"
    for rank in results:
        grads = rank[layout][recompute]
        assert wrong(grads) == {}
        deepstack = any("deepstack_merger_list" in name for name in grads)
        assert deepstack == (rank["family"] == "qwen3_vl")
        assert any("visual.merger" in name for name in grads)


@layouts
def test_a_recomputed_tower_keeps_less(results, layout):
    for rank in results:
        kept = rank[layout]["kept"]
        assert kept["full"] < kept["none"] == kept["selective"], kept


@layouts
def test_text_alone_gives_the_tower_no_gradient(results, layout):
    for rank in results:
        assert wrong(rank[layout]["text"]) == {}


def test_training_equals_plain_adamw_and_the_ranks_keep_the_same_tower(results):
    first, second = (rank["TP2"]["trained"] for rank in results)
    assert first["after"] == second["after"] != first["before"]
    assert wrong(first["far"]) == {}


def test_a_frozen_tower_stays(results):
    for rank in results:
        frozen = rank["TP2"]["frozen"]
        assert frozen["same"]
        assert frozen["changed"] and not [n for n in frozen["changed"] if "visual" in n]


def test_without_the_shim_deepstack_gradients_are_too_small(results):
    "The mergers of deepstack and what lies under them, and nothing else"
    for rank in results:
        if rank["family"] != "qwen3_vl":
            continue
        found = wrong(rank["TP2"]["without"])
        assert max(found.values()) > 100 * TOLERANCE
        assert {".".join(n.split(".")[:2]) for n in found} == {"model.visual"}


def test_the_trainer_cuts_images_with_their_rows(results):
    "Log-probs of several micro-batches, each with the images of its samples"
    first = results[0]["trainer"]
    assert first["micro_batches"] > 1
    assert len(first["logps"]) == 4 and max(first["logps"]) <= TOLERANCE
    assert first["grad_norm"] > 0


def test_the_trainer_passes_its_megatron_arguments_on(results):
    "train.megatron_args, in the configuration of the model that the trainer holds"
    assert results[0]["trainer"]["passed on"] == 2


def test_every_picture_takes_its_tokens(results):
    "50 sizes and kinds of files in the trainer role, as `every_picture_takes_its_tokens` has them in engines"
    many = results[0]["trainer"]["many"]
    assert len(many) == 50 and max(many) <= TOLERANCE


def test_updates_exports_and_checkpoints_hold_the_tower(results):
    first, second = (rank["trainer"] for rank in results)
    assert first["names"] == set() and first["unequal"] == []
    held, moved, loaded = first["digests"]
    assert held == loaded != moved
    assert first["digests"] == second["digests"]
