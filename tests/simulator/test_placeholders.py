"""Placeholders of images and videos are never sampled, by a model that wants nothing else.

That engine and trainer mask them alike is tested where they are compared: `test_picture_turns.py` has the
same model.
"""

from pathlib import Path

import pytest
import torch
from conformance import many_pictures, seeing_ids
from placeholders import want_placeholders

from cookbook_npu.config import TinyConfig
from cookbook_npu.data.images import ImageProcessor
from cookbook_npu.data.tokenizer import build_tokenizer, unsampled_token_ids
from cookbook_npu.rollout.engine import Request, SamplingParams, derive_seed

pytestmark = pytest.mark.lane("devices")

ROWS = 1850
LIMIT = 64  # tokens of a row


@pytest.fixture(autouse=True)
def one_thread():
    "Threads of a small model wait for each other on a busy machine"
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    "A tiny Qwen3-VL whose head prefers placeholders"
    from cookbook_npu.model.tiny import build_tiny

    shape = TinyConfig(family="qwen3_vl", hidden_size=64, num_layers=2, ffn_size=128)
    root = tmp_path_factory.mktemp("model")
    made = build_tiny(shape, build_tokenizer(vision=True), root / "qwen3_vl", seed=0)
    return want_placeholders(made)


def sampled(folder: Path, kind, rows: int, limit: int) -> list[int]:
    "All tokens that an engine writes about five pictures"
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    processor = ImageProcessor(folder)
    images = [processor.image(source) for source in many_pictures()[-5:]]
    requests = []
    for n in range(rows):
        image = images[n % 5]
        ids = seeing_ids(config, processor.tokens(image.grid_thw))
        requests.append(
            Request(
                group_id=image.reference,
                index=n,
                prompt_ids=ids,
                seed=derive_seed(0, n),
                images=(image,),
            )
        )
    sampling = SamplingParams(temperature=1.0, max_response_tokens=limit)
    with kind(folder, dtype="float32", device="cpu", batch_size=500) as engine:
        written = engine.generate(requests, sampling)
    return [token for sample in written for token in sample.response_ids]


def test_no_placeholder_in_100_000_tokens(folder):
    from transformers import AutoConfig

    from cookbook_npu.rollout.transformers import TransformersEngine

    tokens = sampled(folder, TransformersEngine, ROWS, LIMIT)
    assert len(tokens) >= 100_000
    assert len(set(tokens)) > 200  # all of the vocabulary has its chance
    never = unsampled_token_ids(AutoConfig.from_pretrained(folder))
    assert len(never) == 2
    assert not set(tokens) & set(never)
