"""Base models, padded vocabularies, and weights with a NaN: both engines treat them alike."""

import tempfile
from pathlib import Path

import pytest
from ranks import run_ranks

from cookbook_npu.config import TinyConfig
from cookbook_npu.rollout.vllm import missing_reason

pytestmark = pytest.mark.lane("devices")

PADDED = 320  # rows of the vocabulary; the tokenizer has 264 tokens
# <|endoftext|> of the generation settings, <|im_end|> of the template, and one of the run's own
ENDS = {256, 257, 33}


def run_engine(rank: int, world_size: int, engine: str) -> dict[str, object]:
    "What an engine does with the folder of a base model; runs in a process of its own"
    import torch
    from transformers import GenerationConfig

    from cookbook_npu.data.tokenizer import build_tokenizer
    from cookbook_npu.errors import NumericsError
    from cookbook_npu.model.tiny import hf_config, random_model, save_model
    from cookbook_npu.recipes import qwen3_4b_colocate
    from cookbook_npu.rollout.engine import Request, SamplingParams
    from cookbook_npu.train.rollout_worker import make_engine

    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"  # so <|im_end|> is known by the template alone
    shape = TinyConfig(hidden_size=64, num_layers=2, ffn_size=192, init_std=0.1)
    config = hf_config(shape, tokenizer)
    config.vocab_size = PADDED
    model = random_model(config, 0)
    model.generation_config = GenerationConfig(eos_token_id=256)
    weights = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    sampling = SamplingParams(max_response_tokens=300)
    requests = [
        Request(group_id="g", index=i, prompt_ids=[1, 2], seed=i) for i in range(32)
    ]
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder))
        tokenizer.save_pretrained(folder)
        settings = {
            "rollout.engine": engine,
            "rollout.stop_token_ids": [33],
            "sampling.max_response_tokens": 300,
        }
        with make_engine(qwen3_4b_colocate(overrides=settings), folder) as built:
            samples = built.generate(requests, sampling)
            good = weights["model.norm.weight"].clone()
            weights["model.norm.weight"][0] = float("nan")
            built.update_weights(7, weights.items())
            try:
                built.generate(requests, sampling)
                error = "none"
            except NumericsError as e:
                error = e.what
            built.update_weights(8, (weights | {"model.norm.weight": good}).items())
            again = built.generate(requests, sampling)
    ids = [s.response_ids for s in samples]
    return {
        "past": sum(token in ENDS for response in ids for token in response[:-1]),
        "ends": {
            r[-1] for s, r in zip(samples, ids, strict=True) if s.finish_reason == "stop"
        },
        "beyond": sum(token >= 264 for response in ids for token in response),
        "error": error,
        "recovered": [s.response_ids for s in again] == ids,
    }


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_base_model_with_a_padded_vocabulary_and_a_bad_update(engine):
    if engine == "vllm" and missing_reason():
        pytest.skip(missing_reason())
    # an engine of vLLM never shares its process with the simulated NPU
    bootstrap = None if engine == "vllm" else "rollout"
    target = f"{__file__}:run_engine"
    (found,) = run_ranks(target, 1, {"engine": engine}, timeout=300, bootstrap=bootstrap)
    assert found["past"] == 0
    assert found["ends"] == ENDS
    assert found["beyond"] == 0
    assert found["error"].startswith(
        "weight version 7 gives logits that are not finite, for 32 of"
    )
    assert found["recovered"]
