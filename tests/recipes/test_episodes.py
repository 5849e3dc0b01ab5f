"""Turns in a whole run: trainer and engine agree on them, and a resume is bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
from whole_runs import learned, parameters, rows, run

from cookbook_npu.config import save_config
from cookbook_npu.presets import qwen3_4b_colocate

pytestmark = pytest.mark.slow
STEPS = 2


def prepare(root: Path, name: str, resume: bool = False) -> Path:
    "The configuration file of a small run with a calculator"
    overrides = {"rollout.eval_every": 0, "warm_start.steps": 60}
    given = parameters(root, name, resume, STEPS, **overrides)
    config = qwen3_4b_colocate(prompt_data="calculator", **given)
    save_config(config, root / f"{name}.json")
    return root / f"{name}.json"


def test_episodes_are_trained_on_and_resume_bit_for_bit(tmp_path):
    "The last step is done again, and is the same"
    run(prepare(tmp_path, "whole"))
    whole = rows(tmp_path / "whole")
    assert len(whole) == STEPS
    for row in whole:
        assert row["env/turns_mean"] > 1 and row["env/observation_tokens_mean"] > 0
        assert row["train_rollout_logprob_abs_diff"] <= 1e-5
        assert row["grad_norm"] > 0 and row["env/failed_groups"] == 0
    samples = (tmp_path / "whole" / "samples").glob("step_*.jsonl")
    told = [json.loads(line) for f in samples for line in f.read_text().splitlines()]
    talks = [s for s in told if 0 in s["loss_mask"]]
    assert talks
    for sample in talks:
        mask, texts = sample["loss_mask"], sample["metadata"]["turn_texts"]
        assert mask.count(0) == sum(map(len, texts[1::2]))
    step = f"step_{STEPS:06d}"
    shutil.copytree(tmp_path / "whole", tmp_path / "cut", symlinks=True)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / step)
    run(prepare(tmp_path, "cut", resume=True))
    assert learned(tmp_path / "cut") == learned(tmp_path / "whole")
