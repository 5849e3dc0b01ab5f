"""A LoRA adapter on every model family: TP 1 against TP 2, peft, merged weights, state at another TP."""

from pathlib import Path

import lora_jobs
import pytest
import torch
from lora_jobs import IDS, lora_of
from model_values import hf_model
from ranks import run_trainers

from cookbook_npu.config import TinyConfig
from cookbook_npu.data.tokenizer import build_tokenizer, read_tokenizer
from cookbook_npu.model.tiny import build_tiny
from cookbook_npu.plan.dimensions import dimensions_of_folder
from cookbook_npu.plan.memory import adapter_parameters

FAMILIES = ("qwen3", "qwen3_5", "qwen3_vl")
SHAPE = {"hidden_size": 64, "num_layers": 4, "ffn_size": 128}
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[dict[str, Path], dict[int, dict]]:
    "The model folder of each family, and what its adapter became at TP 1 and 2"
    folders = {}
    for family in FAMILIES:
        root = tmp_path_factory.mktemp(family)
        tokenizer = build_tokenizer(vision=family != "qwen3")
        folders[family] = root / "first"
        build_tiny(TinyConfig(family=family, **SHAPE), tokenizer, root / "first", seed=0)
    paths = {family: str(path) for family, path in folders.items()}
    return folders, {
        tensor: run_trainers(f"{lora_jobs.__file__}:at_tp{tensor}", tensor, folders=paths)[
            0
        ]
        for tensor in (2, 1)
    }


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_of_an_adapter_has_its_tokenizer_and_no_model(trained, family):
    adapter = trained[0][family].parent / "adapter1"
    names = {path.name for path in adapter.iterdir()}
    assert {"adapter_config.json", "tokenizer_config.json", "tokenizer.json"} <= names
    assert not {"config.json", "model.safetensors"} & names
    assert (
        read_tokenizer(adapter).get_vocab()
        == read_tokenizer(trained[0][family]).get_vocab()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_adapter_is_trained(trained, family):
    for tensor in (1, 2):
        one = trained[1][tensor][family]
        assert one["frozen"] and one["reference"]
        assert one["losses"] == sorted(one["losses"], reverse=True)
        planned = adapter_parameters(
            dimensions_of_folder(trained[0][family]), lora_of(family), tensor
        )
        assert one["trained"] == planned
        # two moments and the weights themselves, no more than padding beside them
        assert one["optimizer"] <= 3 * one["trained"] + 4096


@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallelism_changes_nothing(trained, family):
    one, two = (trained[1][tensor][family] for tensor in (1, 2))
    assert one["losses"] == pytest.approx(two["losses"], rel=1e-5)
    # a half of the adapter that every rank holds counts once in the norm
    assert one["norms"][0] == pytest.approx(two["norms"][0], rel=1e-4)
    # Adam amplifies rounding where a gradient is almost zero
    assert one["norms"] == pytest.approx(two["norms"], rel=1e-2)
    assert (one["logits"] - two["logits"]).abs().max() < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_loads_at_another_tp(trained, family):
    resumed = trained[1][1][family]["resumed"]
    assert (resumed - trained[1][2][family]["logits"]).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tensor", (1, 2))
def test_transformers_with_peft_and_the_merged_model_compute_the_same(
    trained, family, tensor
):
    import peft

    folder = trained[0][family]
    want = trained[1][tensor][family]["logits"]
    adapter = folder.parent / f"adapter{tensor}"
    served = logits_of(peft.PeftModel.from_pretrained(hf_model(folder), adapter))
    merged = logits_of(hf_model(folder.parent / f"merged{tensor}"))
    vocab = served.shape[-1]
    assert (served - want[..., :vocab]).abs().max() < TOLERANCE
    assert (merged - served).abs().max() < TOLERANCE
    assert (served - logits_of(hf_model(folder))).abs().max() > 1e-2
