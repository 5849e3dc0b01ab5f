"""Tenants of one model: bitwise isolation, memory, and what each of them saves."""

from pathlib import Path

import pytest
import tenant_jobs
import torch
from ranks import run_trainers

from cookbook_npu.config import TinyConfig
from cookbook_npu.data.tokenizer import build_tokenizer, read_tokenizer, unsampled_token_ids
from cookbook_npu.model.tiny import build_tiny
from cookbook_npu.plan.dimensions import dimensions_of_folder
from cookbook_npu.plan.memory import adapter_parameters, trainer_state

pytestmark = pytest.mark.lane("devices")
INTERLEAVINGS = 20
SHAPE = TinyConfig(hidden_size=64, num_layers=2, ffn_size=128, init_std=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return build_tiny(
        SHAPE, build_tokenizer(), tmp_path_factory.mktemp("tenants") / "tiny", 0
    )


def run(function: str, ranks: int = 1, **kwargs):
    return run_trainers(f"{tenant_jobs.__file__}:{function}", ranks, **kwargs)


@pytest.mark.parametrize("tensor", (1, 2))
def test_a_tenant_is_bitwise_what_it_is_alone(folder, tensor):
    found = run(
        "interleavings", tensor, folder=str(folder), tensor=tensor, count=INTERLEAVINGS
    )
    assert found == [[True] * INTERLEAVINGS] * tensor


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 16), ("bfloat16", 18)])
def test_the_memory_of_a_slot_is_the_planned_one(folder, dtype, limit):
    found = run("adapter_bytes", folder=str(folder), dtype=dtype)[0]
    config = tenant_jobs.shared_config(
        1, **{"model.dtype": dtype, "lora.rank": 16, "lora.dropout": 0.0}
    )
    dimensions = dimensions_of_folder(folder)
    assert found["parameters"] == adapter_parameters(dimensions, config.lora, 1)
    assert 0.9 * limit < found["per_parameter"] <= 1.05 * limit
    planned = {}
    for slots in (1, 2):
        lora = config.lora.model_copy(update={"slots": slots})
        one = config.model_copy(update={"lora": lora})
        planned[slots] = sum(part.nbytes for part in trainer_state(dimensions, one))
    assert planned[2] - planned[1] == limit * found["parameters"]


def test_each_tenant_saves_what_it_samples_with(folder, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    found = run("verbs", folder=str(folder), out=str(tmp_path))[0]
    assert "start new Tenants" in found.pop("second")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    excluded = list(unsampled_token_ids(base.config, read_tokenizer(folder)))

    def logprobs(model, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0]
        logits[:, excluded] = float("-inf")
        return logits.log_softmax(-1)

    for name, samples in found.items():
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "whole" if name == "whole" else folder, dtype=torch.float32
        )
        if name != "whole":
            model = peft.PeftModel.from_pretrained(model, tmp_path / name)
        for prompt, response, found_logprobs in samples:
            ids = torch.tensor([prompt + response])
            rows = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
            got, first = (
                logprobs(m, ids)[rows, ids[0, len(prompt) :]] for m in (model, base)
            )
            assert (got - torch.tensor(found_logprobs)).abs().max() < 1e-4
            assert (first - got).abs().max() > 1e-3
    assert found["a"] != found["b"]
