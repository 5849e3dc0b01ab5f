"""Prompts with images against transformers' own processor of Qwen3-VL, for 50 sizes and every kind of file.

Engines and trainer count the same tokens for the same 50: `every_picture_takes_its_tokens` of
`conformance`, and `simulator/test_vision_equality.py`.
"""

import importlib.util
import io
import json
import random

import numpy as np
import pytest
from conformance import PICTURE_KINDS, encoded_picture
from PIL import Image, ImageOps

from cookbook_npu.config import DataConfig
from cookbook_npu.data.images import ImageProcessor, processor_class
from cookbook_npu.data.prompts import PromptReader, image_processor
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.npu.shims.torchvision_ops import install_finder

SETTINGS = {
    "size": {"shortest_edge": 32**2, "longest_edge": 128**2},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def sizes() -> list[tuple[int, int]]:
    "50 widths and heights: the smallest, long strips, odd ones"
    rng = random.Random(0)
    drawn = [(rng.randint(4, 300), rng.randint(4, 300)) for _ in range(46)]
    return [(1, 1), (1, 20), (160, 5), (32, 32), *drawn]


def reference(tokenizer):
    "The processor that published examples use"
    install_finder()
    from transformers import Qwen3VLProcessor, Qwen3VLVideoProcessor

    return Qwen3VLProcessor(
        processor_class()(**SETTINGS),
        tokenizer,
        Qwen3VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="transformers' whole processor needs torchvision for its videos",
)
def test_ids_and_pixels_are_those_of_transformers(tmp_path):
    rng = np.random.default_rng(0)
    tokenizer = build_tokenizer(vision=True)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    records = []
    for n, (width, height) in enumerate(sizes()):
        noise = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{n}.png")
        record = {"problem": f"<image>What is {n}?", "answer": n, "images": [f"{n}.png"]}
        records.append(json.dumps(record))
    (tmp_path / "geo.jsonl").write_text("\n".join(records))
    config = DataConfig(apply_chat_template=True)
    processor = image_processor(tmp_path, config)
    read = PromptReader(config, tokenizer, processor).read(tmp_path / "geo.jsonl")
    theirs = reference(tokenizer)
    assert len(read.prompts) == 50
    for n, prompt in enumerate(read.prompts):
        with Image.open(tmp_path / f"{n}.png") as image:
            want = theirs(text=[prompt.text], images=[image], return_tensors="np")
        assert prompt.ids == want["input_ids"][0].tolist()
        (ours,) = prompt.images
        assert [list(ours.grid_thw)] == want["image_grid_thw"].tolist()
        assert np.array_equal(ours.pixel_values, want["pixel_values"])


@pytest.mark.parametrize("kind", PICTURE_KINDS)
def test_every_kind_is_what_transformers_makes_of_the_upright_picture(tmp_path, kind):
    "60 x 100 stored pixels; EXIF rotates one kind to 100 x 60"
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    content = encoded_picture(kind, 60, 100, seed=0)
    (tmp_path / "one").write_bytes(content)
    record = {"problem": "<image>What?", "answer": 1, "images": ["one"]}
    (tmp_path / "geo.jsonl").write_text(json.dumps(record))
    tokenizer = build_tokenizer(vision=True)
    processor = ImageProcessor(tmp_path)
    config = DataConfig(apply_chat_template=True)
    read = PromptReader(config, tokenizer, processor).read(tmp_path / "geo.jsonl")
    (shown,) = read.prompts[0].images
    with Image.open(io.BytesIO(content)) as image:
        upright = ImageOps.exif_transpose(image)
        size = (100, 60) if kind == "rotated" else (60, 100)
        assert upright.size == size
        if kind == "transparent":
            white = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(white, upright.convert("RGBA"))
        want = processor_class()(**SETTINGS)([upright.convert("RGB")], return_tensors="np")
    assert [list(shown.grid_thw)] == want["image_grid_thw"].tolist()
    assert np.array_equal(shown.pixel_values, want["pixel_values"])
    pads = read.prompts[0].ids.count(tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    assert pads == np.prod(shown.grid_thw) // 4
