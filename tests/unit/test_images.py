"""Prompts with images against transformers' own processor of Qwen3-VL, for 50 sizes."""

import importlib.util
import json
import random

import numpy as np
import pytest
from PIL import Image

from cookbook_npu.config import DataConfig
from cookbook_npu.data.images import processor_class
from cookbook_npu.data.prompts import image_processor, load_source
from cookbook_npu.data.tasks import build_tokenizer
from cookbook_npu.torchvision_ops import install_finder

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
    read = load_source(tmp_path / "geo.jsonl", config, tokenizer, processor=processor)
    theirs = reference(tokenizer)
    assert len(read.prompts) == 50
    for n, prompt in enumerate(read.prompts):
        with Image.open(tmp_path / f"{n}.png") as image:
            want = theirs(text=[prompt.text], images=[image], return_tensors="np")
        assert prompt.ids == want["input_ids"][0].tolist()
        (ours,) = prompt.images
        assert [list(ours.grid_thw)] == want["image_grid_thw"].tolist()
        assert np.array_equal(ours.pixel_values, want["pixel_values"])
