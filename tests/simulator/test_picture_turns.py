"""Turns with pictures: every turn sees the prompt's picture and those shown since, and engine, trainer and
plain transformers agree on positions and log-probs. The model wants nothing but placeholders, which all of
them leave out alike.
"""

import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from placeholders import want_placeholders
from ranks import run_trainers

from cookbook_npu.config import TinyConfig
from cookbook_npu.data.environments import Environment, Observation
from cookbook_npu.data.images import ImageProcessor, ImageSource
from cookbook_npu.data.messages import TurnFormat
from cookbook_npu.data.sample import Prompt, Sample
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.rollout.engine import Request, SamplingParams
from cookbook_npu.rollout.episodes import EpisodeRunner

pytestmark = pytest.mark.lane("devices")

TOLERANCE = 1e-5
SIZES = ((64, 96), (48, 64))  # height and width of the prompts' pictures


class Shows(Environment):
    "Says something after a first turn, and shows the picture's left half after a second"

    turns = 0

    def reset(self, prompt, seed):
        self.prompt = prompt
        self.turns = 0

    def step(self, text):
        self.turns += 1
        content = [{"type": "text", "text": "look "}]
        if self.turns == 2:
            picture = self.prompt.images[0].processor.picture(self.prompt.images[0])
            half = picture.crop((0, 0, picture.width // 2, picture.height))
            content.append({"type": "image", "image": half})
        return Observation(messages=[{"role": "user", "content": content}])


@cache
def model_folder(root: Path) -> Path:
    "A tiny Qwen3-VL with random weights whose head prefers placeholders"
    from cookbook_npu.model.tiny import build_tiny

    shape = TinyConfig(family="qwen3_vl", hidden_size=64, num_layers=2, ffn_size=128)
    made = build_tiny(shape, build_tokenizer(vision=True), root / "qwen3_vl", seed=0)
    return want_placeholders(made)


def prompts_of(turns: TurnFormat) -> list[Prompt]:
    "A question about each picture"
    found = []
    for n, (height, width) in enumerate(SIZES):
        noise = np.random.default_rng(n).integers(0, 255, (height, width, 3), np.uint8)
        source = ImageSource(
            reference=f"p{n}",
            key=f"p{n}",
            place=f"p{n}",
            open=lambda noise=noise: Image.fromarray(noise),
        )
        image = turns.processor.image(source)
        messages = [{"role": "user", "content": "<image>a="}]
        ids = turns.prompt_ids(messages, images=[image])
        found.append(
            Prompt(
                prompt_id=f"p{n}",
                ids=ids,
                text="a=",
                label="1",
                images=[image],
                content="<image>a=",
            )
        )
    return found


def seeing(folder: Path, chat: bool = True) -> TurnFormat:
    "How turns are written for the tiny model"
    return TurnFormat(build_tokenizer(vision=True), chat, ImageProcessor(folder))


def episodes(folder: Path, make=Shows) -> list[Sample]:
    "Three turns about each picture, twice; every turn of the policy has four tokens"
    from cookbook_npu.rollout.transformers import TransformersEngine

    turns = seeing(folder)
    prompts = prompts_of(turns)
    requests = [
        Request(
            group_id=prompt.prompt_id,
            index=k,
            prompt_ids=prompt.ids,
            seed=k,
            images=tuple(prompt.images),
        )
        for prompt in prompts
        for k in range(2)
    ]
    runner = EpisodeRunner(make, turns, max_turns=3)
    batch = runner.begin(requests, {p.prompt_id: p for p in prompts}, 200)
    sampling = SamplingParams(temperature=0.8, max_response_tokens=200)
    with TransformersEngine(folder, dtype="float32", device="cpu") as engine:
        while batch.requests:
            asked = [with_room_for_four(request) for request in batch.requests]
            written = engine.generate(asked, sampling)
            batch.take([replace(sample, finish_reason="stop") for sample in written])
    runner.close()
    assert not batch.failures, batch.failures
    return batch.samples


def with_room_for_four(request: Request) -> Request:
    "A turn that ends after four tokens"
    before = len(request.partial.response_ids) if request.partial else 0
    return replace(request, max_response_tokens=before + 4)


def images_of(sample: Sample, turns: TurnFormat) -> list:
    "The pictures of a sample by their names, as the driver finds them"
    known = {image.reference: image for p in prompts_of(turns) for image in p.images}
    return [known.get(name) or turns.picture(name) for name in sample.images]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def samples(folder) -> list[Sample]:
    return episodes(folder)


def test_positions_of_all_turns_are_those_of_hugging_face(folder, samples):
    "get_rope_index of the model itself, on the whole conversation"
    from conformance import reference_model

    from cookbook_npu.model.vision import vision_positions

    turns = seeing(folder)
    model = reference_model(folder)
    for sample in samples:
        images = images_of(sample, turns)
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        grids = torch.tensor([image.grid_thw for image in images])
        types = (ids == model.config.image_token_id).int()
        want, _ = model.model.get_rope_index(
            ids, mm_token_type_ids=types, image_grid_thw=grids
        )
        found = vision_positions(ids[0].tolist(), images, model.config)
        assert torch.equal(found, want[:, 0])
        # a picture in the response moves what follows it
        assert int(want.max()) + 1 < ids.shape[1]


def policy_gap(sample: Sample, logp_T: torch.Tensor) -> float:
    "How far log-probs are from the engine's, where the policy wrote"
    mask_T = torch.tensor(sample.loss_mask, dtype=torch.bool)
    return (logp_T - torch.tensor(sample.logprobs))[mask_T].abs().max().item()


def test_the_engine_sees_in_every_turn_what_a_whole_pass_sees(folder, samples):
    "Log-probs of all three turns are those of one pass over the conversation"
    from conformance import teacher_forced

    turns = seeing(folder)
    for sample in samples:
        images = images_of(sample, turns)
        assert policy_gap(sample, teacher_forced(folder, sample, 0.8, images)) <= TOLERANCE


def trainer_logprobs(rank: int, world_size: int, root: str) -> dict[int, list[float]]:
    "Log-probs of the trainer role, TP 2, for samples as the driver hands them over"
    from cookbook_npu.data.sample import ImageInput
    from cookbook_npu.recipes import qwen3_4b_colocate
    from cookbook_npu.train.batch import make_batch
    from cookbook_npu.train.trainer import Trainer

    folder = Path(root) / "qwen3_vl"
    samples = pickle.loads((Path(root) / "samples").read_bytes())
    turns = seeing(folder)
    images = {}
    for sample in samples:
        for name, image in zip(sample.images, images_of(sample, turns), strict=True):
            images[name] = ImageInput(
                reference=name, pixel_values=image.pixel_values, grid_thw=image.grid_thw
            )
    config = qwen3_4b_colocate(
        overrides={
            "model.dtype": "float32",
            "parallel.tensor": 2,
            "placement.devices": 2,
            "rollout.prompts_per_step": 2,
            "rollout.samples_per_prompt": 2,
            "sampling.temperature": 0.8,
            "sampling.max_response_tokens": 200,
            "data.max_prompt_tokens": 64,
            "algorithm.use_reference": False,
        }
    )
    trainer = Trainer(rank, world_size, config, str(folder))
    batch = make_batch(samples, 2, config.algorithm, len(samples), 200, images)
    found = trainer.logprobs(batch)
    ready = replace(batch, old_logprobs=batch.rollout_logprobs)
    norm = trainer.train(ready).get("grad_norm", 0.0)
    return {"norm": norm, **{i: logp.tolist() for i, logp in found.items()}}


def test_the_trainer_agrees_with_the_engine(folder, samples):
    "Packed rows on two ranks, with a picture in the prompt and one in an observation"
    graded = [replace(s, reward=float(s.index)) for s in samples]
    (folder.parent / "samples").write_bytes(pickle.dumps(graded))
    first, _ = run_trainers(f"{__file__}:trainer_logprobs", 2, root=str(folder.parent))
    assert first.pop("norm") > 0
    assert len(first) == len(samples)
    for i, logp in first.items():
        assert policy_gap(samples[int(i)], torch.tensor(logp)) <= TOLERANCE
