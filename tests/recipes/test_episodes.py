"""Turns in whole runs: trainer and engine agree on them, a resume and a split run are bit for bit."""

import importlib.util
import json
from pathlib import Path

import pytest
from whole_runs import events, learned, more_vllm, parameters, rows, run, samples

from cookbook_npu.config import save_config
from cookbook_npu.recipes import RECIPES, qwen3_4b_colocate

pytestmark = pytest.mark.lane("runs")
STEPS = 2


def prepare(root: Path, name: str, resume: bool = False, **more) -> Path:
    "The configuration file of a small run with a calculator"
    overrides = {"rollout.eval_every": STEPS, **more}
    given = parameters(root, name, resume, STEPS, **overrides)
    config = qwen3_4b_colocate(prompt_data="calculator", **given)
    save_config(config, root / f"{name}.json")
    return root / f"{name}.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    "The folder of a run that nobody disturbs"
    root = tmp_path_factory.mktemp("episodes")
    run(prepare(root, "whole"))
    return root / "whole"


# by how much the log-probs of an engine, which depend on what else is in its batch, are rounded
ROUNDING = ("train_rollout", "tis", "mismatch_", "ess")


def test_without_staleness_streamed_episodes_are_those_of_turns_taken_together(
    whole, tmp_path
):
    "Tokens, rewards and gradients are equal, with trainer and engines on devices of their own"
    split = {"placement.mode": "split", "placement.devices": 4}
    split |= {"rollout.depth": 0, "rollout.max_staleness": 0}
    run(prepare(tmp_path, "split", **split))
    own = (*ROUNDING, "async/", "staleness/", "tokens_per_s")
    found = []
    for folder in (tmp_path / "split", whole):
        told: list = []
        for row in learned(folder):
            told.append({k: v for k, v in row.items() if not k.startswith(own)})
        for step in samples(folder):
            told += [[s["group_id"], s["response_ids"], s["loss_mask"]] for s in step]
        found.append(told)
    assert found[0] == found[1]


PICTURES = {"rollout.environment": "geo3k", "rollout.eval_every": 0, "train.save_every": 0}


def picture_run(root: Path, recipe: str, **more) -> list[dict]:
    "The steps of a small run with drawn triangles and turns; its samples"
    given = parameters(root, recipe, False, STEPS, **{**PICTURES, **more})
    save_config(RECIPES[recipe](**given), root / f"{recipe}.json")
    run(root / f"{recipe}.json")
    trained = rows(root / recipe)
    assert len(trained) == STEPS
    for row in trained:
        assert row["env/turns_mean"] > 1 and row["env/failed_groups"] == 0
        assert row["train_rollout_logprob_abs_diff"] <= 1e-5
        assert {"env/first_answer_reward_mean", "env/last_answer_reward_mean"} <= set(row)
    return trained


def test_grpo_with_pictures_and_turns_and_an_oracle(tmp_path):
    "The oracle is said to be one; what the policy read from the picture is reported beside what it was told"
    recipe = "qwen3_vl_8b_grpo"
    oracle = {"rollout.environment_arguments.oracle": True}
    trained = picture_run(tmp_path, recipe, **oracle)
    assert all(row["env/oracle_calls_mean"] > 0 for row in trained)
    (event,) = events(tmp_path / recipe, "oracle")
    assert "knows the label" in event["text"]
    lines = (tmp_path / recipe / "samples" / "step_000002.jsonl").read_text().splitlines()
    asked = [s for s in map(json.loads, lines) if 0 in s["loss_mask"]]
    assert asked and all(len(sample["images"]) == 1 for sample in asked)
    assert {sample["metadata"]["turn_texts"][1] for sample in asked} <= {
        "yes]",
        "no]",
        "?]",
    }


def test_ppo_with_pictures_and_turns(tmp_path):
    "A critic sees later turns, too; without the oracle nobody is told of one"
    more = {"critic.warmup_steps": 0}
    trained = picture_run(tmp_path, "qwen3_vl_8b_ppo", **more)
    assert all(row["env/oracle_calls_mean"] == 0 for row in trained)
    assert all(row["critic/grad_norm"] > 0 for row in trained)
    assert events(tmp_path / "qwen3_vl_8b_ppo", "oracle") == []


@more_vllm
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("vllm", "torchvision")),
    reason="vLLM reads models with a vision tower only beside torchvision",
)
def test_vllm_sees_the_picture_of_a_prompt_and_one_of_an_observation(tmp_path):
    "The recipe with pictures on vLLM: the trainer agrees on turns behind a second picture"
    more = {
        "rollout.engine": "vllm",
        "rollout.eval_every": 0,
        "rollout.environment": "run_environments:Shower",
        "rollout.max_turns": 2,
        "sampling.max_response_tokens": 24,
        "train.global_batch_size": None,
        "train.save_every": 0,
        "model.tiny.num_layers": 2,
    }
    given = parameters(tmp_path, "seen", steps=1, **more)
    save_config(RECIPES["qwen3_vl_8b_grpo"](**given), tmp_path / "seen.json")
    run(tmp_path / "seen.json")
    (row,) = rows(tmp_path / "seen")
    assert row["env/turns_mean"] > 1 and row["env/failed_groups"] == 0
    assert row["train_rollout_logprob_abs_diff"] < 1e-4
    assert row["grad_norm"] > 0
    talks = [s for s in samples(tmp_path / "seen")[0] if 0 in s["loss_mask"]]
    assert talks and all(len(sample["images"]) == 2 for sample in talks)
    assert all(s["images"][1].startswith("data:image/png;base64,") for s in talks)
