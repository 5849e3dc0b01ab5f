"""PPO in whole runs: a resume bit for bit, and rollouts beside the training."""

import shutil
from pathlib import Path

import pytest
from whole_runs import learned, parameters, rows, run

from cookbook_npu.config import save_config
from cookbook_npu.recipes import RECIPES
from cookbook_npu.rl.algorithms import algorithm_overrides

pytestmark = pytest.mark.lane("runs")
STEPS = 3


def prepare(
    root: Path,
    name: str,
    resume: bool = False,
    recipe: str = "qwen3_4b_colocate",
    steps: int = STEPS,
    **more,
) -> Path:
    "The configuration file of a small PPO run; in its first step only the critic is trained"
    overrides = {
        "rollout.eval_every": 0,
        "critic.warmup_steps": 1,
        **algorithm_overrides("ppo"),
        **more,
    }
    given = parameters(root, name, resume, steps, **overrides)
    save_config(RECIPES[recipe](**given), root / f"{name}.json")
    return root / f"{name}.json"


def test_ppo_resumes_bit_for_bit(tmp_path):
    "Critic, its optimizer and its first steps come back: the last step is done again, and is the same"
    run(prepare(tmp_path, "whole"))
    whole = rows(tmp_path / "whole")
    trained = [row for row in whole if "critic/value_loss" in row]
    assert [row["critic/warmup"] for row in trained] == [1.0, 0.0, 0.0]
    assert ["pg_loss" in row for row in trained] == [False, True, True]
    assert all(row["critic/grad_norm"] > 0 for row in trained)
    assert all(row["critic/explained_variance"] <= 1 for row in trained)
    step = f"step_{STEPS:06d}"
    assert (tmp_path / "whole" / "checkpoints" / step / "state" / "critic").is_dir()
    shutil.copytree(tmp_path / "whole", tmp_path / "cut", symlinks=True)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / step)
    run(prepare(tmp_path, "cut", resume=True))
    assert learned(tmp_path / "cut") == learned(tmp_path / "whole")


def test_the_asynchronous_recipe_runs_ppo(tmp_path):
    "With rollouts beside the training, on the family with padded micro-batches"
    run(prepare(tmp_path, "run", recipe="qwen3_5_9b_async", steps=2))
    trained = [row for row in rows(tmp_path / "run") if "critic/value_loss" in row]
    assert [row["critic/warmup"] for row in trained] == [1.0, 0.0]
    assert all(row["critic/grad_norm"] > 0 for row in trained)
    assert trained[1]["grad_norm"] > 0
