"""Supervised fine-tuning in whole runs: learning, resume bit for bit, RL from its checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
import whole_runs
from metrics_page import explained
from test_recipe import command
from whole_runs import forget_last_step

from cookbook_npu.config import save_config
from cookbook_npu.recipes import RECIPES

pytestmark = pytest.mark.lane("runs")
TINY = {
    "data.eval_prompts": 16,
    "rollout.eval_every": 2,
    "train.save_every": 2,
    "optim.warmup_steps": 0,
    "optim.schedule": "constant",
}


def run(root: Path, recipe: str, name: str, overrides: dict, **parameters) -> str:
    "What a run prints"
    place = {"output.root": str(root), "output.name": name}
    config = RECIPES[recipe](overrides={**place, **overrides}, **parameters)
    save_config(config, root / f"{name}.json")
    return whole_runs.run(root / f"{name}.json")


def fine_tune(root: Path, steps: int = 4, name: str = "run", **overrides: object) -> str:
    "What a small run prints"
    sizes = dict(num_steps=steps, prompts_per_step=8)
    return run(root, "qwen3_4b_sft", name, {**TINY, **overrides}, **sizes)


def rows(folder: Path) -> list[dict]:
    text = (folder / "metrics.jsonl").read_text()
    found = explained([json.loads(line) for line in text.splitlines()])
    return [row for row in found if "sft_loss" in row]


def without_times(row: dict) -> dict:
    return {
        key: value
        for key, value in row.items()
        if not key.startswith(("time/", "perf/", "memory/")) and "per_s" not in key
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    fine_tune(root)
    return root / "run"


def test_it_learns_without_engines_and_resumes_bit_for_bit(whole, tmp_path):
    done = rows(whole)
    assert [row["step"] for row in done] == [1, 2, 3, 4]
    losses = [row["sft_loss"] for row in done]
    assert losses[-1] < losses[0] and all(row["grad_norm"] > 0 for row in done)
    assert done[3]["eval_loss"] < done[1]["eval_loss"]
    assert not {"raw_reward", "time/rollout", "time/update_weights"} & done[0].keys()
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut, symlinks=True)
    forget_last_step(cut)
    assert "from step 2" in fine_tune(tmp_path, name="cut", **{"output.resume": True})
    assert [without_times(r) for r in rows(cut)] == [without_times(r) for r in done]


def test_one_rank_learns_the_same_packed_or_padded(whole, tmp_path):
    alone = {"placement.devices": 1, "parallel.tensor": 1}
    fine_tune(tmp_path, **alone, **{"train.layout": "bshd"})
    for row, other in zip(rows(whole), rows(tmp_path / "run"), strict=True):
        assert row["sft_loss"] == pytest.approx(other["sft_loss"], rel=1e-4)


@pytest.mark.lane("runs")
def test_reinforcement_learning_starts_from_its_checkpoint(whole, tmp_path):
    (folder,) = whole.glob("checkpoints/step_*4/hf")
    sizes = dict(num_steps=1, prompts_per_step=2, samples_per_prompt=2)
    values = {"data.apply_chat_template": True, "rollout.eval_every": 0}
    values["reward.scorers"] = {"cookbook_npu.train.rehearsal:varied_reward": 1.0}
    run(tmp_path, "qwen3_4b_colocate", "rl", values, model=str(folder), **sizes)


def test_an_adapter_learns(tmp_path):
    fine_tune(tmp_path, steps=2, **{"lora.rank": 4})
    folder = tmp_path / "run"
    first, last = rows(folder)
    assert last["grad_norm"] > 0 and last["sft_loss"] != first["sft_loss"]
    assert next(folder.glob("checkpoints/step_*2/adapter/adapter_config.json"))


@pytest.mark.lane("runs")
def test_a_model_with_a_vision_tower_learns_from_pictures(tmp_path):
    shown = {"model.tiny.family": "qwen3_vl", "sampling.max_response_tokens": 16}
    shown |= {"data.prompt_data": "geometry", "data.task": {"level": 1, "per_level": 40}}
    fine_tune(tmp_path, 1, "seen", **shown)
    fine_tune(tmp_path, 1, "blank", **shown, **{"data.blank_images": True})
    (seen,), (unseen,) = rows(tmp_path / "seen"), rows(tmp_path / "blank")
    assert seen["grad_norm"] > 0 and seen["eval_loss"] > 0
    assert seen["sft_loss"] != unseen["sft_loss"]  # the pictures reach the model


def test_conversations_that_cannot_be_learned_are_refused(tmp_path):
    file = tmp_path / "chat.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    values = json.dumps({**TINY, "output.root": str(tmp_path / "runs")})
    done = command(
        "run", "qwen3_4b_sft", "-p", "prompt_data", str(file), "-p", "overrides", values
    )
    assert done.returncode and f"{file} line 1" in done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()
