"""Whole runs of the other families, text only: random weights, training, export, and a resume bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
from whole_runs import events, parameters, rows, run

from cookbook_npu.config import save_config
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.recipes import qwen3_4b_colocate, qwen3_5_9b_colocate
from cookbook_npu.runs.folder import RunFolder

pytestmark = pytest.mark.lane("runs")
SHAPE = {"hidden_size": 32, "num_layers": 2, "ffn_size": 64, "init_std": 0.1}
STEPS = 2


def prepare(root: Path, name: str, family: str, resume: bool = False) -> Path:
    "The configuration file of a run with a tiny model of a family"
    tiny = {f"model.tiny.{key}": value for key, value in SHAPE.items()}
    more = {"rollout.eval_every": 0, "model.tiny.family": family, **tiny}
    if family == "qwen3_5_moe":
        more |= {
            "parallel.expert": 2,
            "placement.destroy_process_groups": True,
            "rollout.routing_replay": True,
        }
    given = parameters(root, name, resume, **more) | {"num_steps": STEPS}
    recipe = qwen3_5_9b_colocate if family == "qwen3_5" else qwen3_4b_colocate
    save_config(recipe(**given), root / f"{name}.json")
    return root / f"{name}.json"


def export_of(folder: Path) -> Path:
    "The last export of a run"
    return folder / "checkpoints" / f"step_{STEPS:06d}" / "hf"


def read_export(folder: Path) -> tuple[set[str], list[int]]:
    "Weights that transformers misses in an exported folder, or does not know; what its tokenizer reads"
    import transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    kind = getattr(transformers, name)
    _, info = kind.from_pretrained(folder, output_loading_info=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return info["missing_keys"] | info["unexpected_keys"], tokenizer("12+34=").input_ids


LONG = ("qwen3_vl", "qwen3_5_moe")
FAMILIES = (
    "qwen3_5",
    *(pytest.param(name, marks=pytest.mark.lane("runs")) for name in LONG),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_exports_and_resumes(tmp_path, family):
    run(prepare(tmp_path, "whole", family))
    whole = tmp_path / "whole"
    trained = rows(whole)[1:]
    assert all(row["grad_norm"] > 0 for row in trained)
    assert all(row["train_rollout_logprob_abs_diff"] < 1e-4 for row in trained)
    if family == "qwen3_5_moe":  # 2 layers, 2 experts for each token but the last
        assert all(3 < row["routing_replay/bytes_per_token"] < 4 for row in trained)
    if (
        family == "qwen3_5"
    ):  # gated delta nets take packed rows here, and TIS weighs the tokens
        assert all(0.99 < row["tis"] < 1.01 for row in trained)
        assert RunFolder.open(whole).config().algorithm.rollout_is == "truncate"
        assert not events(whole, "note")
    exported = json.loads((export_of(whole) / "config.json").read_text())
    assert exported["model_type"] == family
    assert read_export(export_of(whole)) == (set(), build_tokenizer()("12+34=").input_ids)
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut, symlinks=True)
    shutil.rmtree(export_of(cut).parent)
    run(prepare(tmp_path, "cut", family, resume=True))
    assert rows(cut) == rows(whole)
    names = ("model.safetensors", "config.json")
    for name in names:
        assert (export_of(cut) / name).read_bytes() == (
            export_of(whole) / name
        ).read_bytes()
