"""Trained policies of all families, read by plain transformers, against the trainer's own logits."""

from pathlib import Path

import export_jobs
import pytest
import torch
from export_jobs import IDS, STEP
from model_values import hf_model
from ranks import run_trainers
from typer.testing import CliRunner

from cookbook_npu.cli import app
from cookbook_npu.config import TinyConfig
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.model.tiny import build_tiny
from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.runs.folder import RunFolder
from cookbook_npu.train.recovery import save_base_model

pytestmark = pytest.mark.lane("devices")
FAMILIES = ("qwen3", "qwen3_5", "qwen3_vl")
SHAPE = {"hidden_size": 64, "num_layers": 2, "ffn_size": 128, "init_std": 0.1}
TOLERANCE = 1e-6  # of the largest logit: TP 2 adds in another order


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, tuple[Path, torch.Tensor]]:
    "family -> run folder, and the logits of its trainer at TP 2"
    root = tmp_path_factory.mktemp("export")
    runs = []
    for family in FAMILIES:
        tiny = TinyConfig(family=family, **SHAPE)
        tokenizer = build_tokenizer(vision=family != "qwen3")
        build_tiny(tiny, tokenizer, root / f"first_{family}", seed=0)
        overrides = {
            "model.dtype": "float32",
            "parallel.tensor": 2,
            "placement.devices": 2,
            "output.root": str(root),
            "output.name": family,
        }
        config = qwen3_4b_colocate(model=str(root / f"first_{family}"), overrides=overrides)
        with RunFolder.create(config) as run:
            save_base_model(run, str(config.model.path), family)
            runs.append((config.model.path, str(run.path)))
    logits = run_trainers(f"{export_jobs.__file__}:every_family", 2, runs=runs)[0]
    return {
        family: (root / family, own) for family, own in zip(FAMILIES, logits, strict=True)
    }


def difference(folder: Path, logits: torch.Tensor) -> float:
    with torch.no_grad():
        found = hf_model(folder)(input_ids=IDS).logits
    return ((found - logits).abs().max() / logits.abs().max()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_transformers_computes_what_the_trainer_does(trained, family, tmp_path):
    run, logits = trained[family]
    out = CliRunner().invoke(app, ["export", str(run), "--to", str(tmp_path / "hf")])
    assert out.exit_code == 0, out.exception
    assert str(tmp_path / "hf") in out.output
    assert difference(tmp_path / "hf", logits) < TOLERANCE
    # the weights have moved: the first ones compute something else
    assert difference(run.parent / f"first_{family}", logits) > 1e-2


def test_a_state_without_an_export_is_converted(trained, tmp_path):
    "As a run with train.export_hf off leaves it: TP 2 is read by one device"
    run, logits = trained["qwen3_5"]
    words = ["export", str(run), "--step", str(STEP - 1), "--to", str(tmp_path / "hf")]
    out = CliRunner().invoke(app, words)
    assert out.exit_code == 0, out.exception
    assert difference(tmp_path / "hf", logits) < TOLERANCE
    assert not list(run.glob(".policy-*"))


def test_an_image_goes_through_the_exported_processor(trained, tmp_path):
    from PIL import Image
    from transformers import AutoProcessor

    run, _ = trained["qwen3_vl"]
    assert (
        CliRunner()
        .invoke(app, ["export", str(run), "--to", str(tmp_path / "hf")])
        .exit_code
        == 0
    )
    processor = AutoProcessor.from_pretrained(tmp_path / "hf")
    content = [{"type": "image"}, {"type": "text", "text": "How long?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}])
    image = Image.new("RGB", (64, 64), "white")
    inputs = processor(text=[text], images=[image], return_tensors="pt")
    answer = hf_model(tmp_path / "hf").generate(**inputs, max_new_tokens=2)
    assert answer.shape[1] > inputs["input_ids"].shape[1]
