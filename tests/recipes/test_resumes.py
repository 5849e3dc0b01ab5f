"""Whole runs of single features: each trains, and ends bit for bit the same when its last step is redone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from test_recipe import command
from transformers import AutoModelForSequenceClassification
from whole_runs import Driver, check_turns, learned, parameters, rows, run

from cookbook_npu.config import save_config
from cookbook_npu.data.tokenizer import build_tokenizer, read_tokenizer
from cookbook_npu.model.tiny import build_tiny
from cookbook_npu.recipes import RECIPES, qwen3_4b_opd
from cookbook_npu.rl.algorithms import algorithm_overrides

pytestmark = pytest.mark.lane("runs")
STEPS = 3
NO_REWARD = {"reward.scorers": {"exact": 0.0}, "reward.correct_threshold": {}}
SMALL = {"hidden_size": 32, "num_layers": 2, "ffn_size": 64, "init_std": 0.1}
SMALL = {f"model.tiny.{name}": value for name, value in SMALL.items()}
# feature -> recipe, its settings, metrics that are positive in each step
CASES = {
    "LoRA": ("qwen3_4b_colocate", {"lora.rank": 4, "lora.dropout": 0.1}, ()),
    "PPO critic": (
        "qwen3_4b_colocate",
        {**algorithm_overrides("ppo"), "critic.warmup_steps": 1},
        ("critic/grad_norm", "critic/value_loss"),
    ),
    "distillation": ("qwen3_4b_opd", {}, ("teacher/reverse_kl",)),
    "reward model": ("qwen3_4b_colocate", NO_REWARD, ("grad_norm",)),
    "SFT": ("qwen3_4b_sft", {}, ("sft_loss", "grad_norm")),
    "turns": (
        "qwen3_4b_colocate",
        {"data.prompt_data": "calculator"},
        ("env/turns_mean", "env/observation_tokens_mean"),
    ),
    "mixture of sources": (
        "qwen3_4b_colocate",
        {"data.mixture": {"arithmetic": 0.7, "counting": 0.3}},
        (),
    ),
    "delta nets": ("qwen3_5_9b_colocate", SMALL, ("tis",)),
    "pictures": ("qwen3_4b_colocate", {**SMALL, "model.tiny.family": "qwen3_vl"}, ()),
    "mixture of experts": (
        "qwen3_4b_colocate",
        {
            **SMALL,
            "model.tiny.family": "qwen3_5_moe",
            "parallel.expert": 2,
            "placement.destroy_process_groups": True,
            "rollout.routing_replay": True,
        },
        ("routing_replay/bytes_per_token",),
    ),
}


def reward_model(folder: Path) -> str:
    "A random classifier with the tokenizer of the policy"
    tokenizer = build_tokenizer()
    tiny = RECIPES["qwen3_4b_colocate"]().model.tiny
    model = AutoModelForSequenceClassification.from_pretrained(
        build_tiny(tiny, tokenizer, folder, seed=1), num_labels=1, dtype=torch.float32
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def prepare(root: Path, feature: str, name: str, resume: bool = False) -> Path:
    "The configuration file of a small run"
    recipe, own, _ = CASES[feature]
    own = {"rollout.eval_every": 0, **own}
    if feature == "reward model":
        own["reward_model.path"] = reward_model(root / "model")
    given = parameters(root, name, resume, STEPS, **own)
    if feature == "SFT":  # no engine samples
        given.pop("samples_per_prompt")
        for key in ("reward.scorers", "reward.correct_threshold"):
            given["overrides"].pop(key)
    save_config(RECIPES[recipe](**given), root / f"{name}.json")
    return root / f"{name}.json"


@pytest.mark.parametrize("feature", CASES)
def test_it_trains_and_resumes_bit_for_bit(tmp_path, feature):
    run(prepare(tmp_path, feature, "whole"))
    whole = tmp_path / "whole"
    trained = [row for row in rows(whole) if "grad_norm" in row or "critic/warmup" in row]
    assert [row["step"] for row in trained] == [1, 2, 3]
    for row in trained:
        assert all(row[name] > 0 for name in CASES[feature][2]), row
        assert row.get("train_rollout_logprob_abs_diff", 0) < 1e-4
    if feature == "turns":
        check_turns(whole)
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut, symlinks=True)
    shutil.rmtree(cut / "checkpoints" / f"step_{STEPS:06d}")
    assert f"from step {STEPS - 1}" in run(prepare(tmp_path, feature, "cut", resume=True))
    assert learned(cut) == learned(whole)


def test_a_teacher_with_other_tokens_is_refused_before_the_workers_start(tmp_path):
    config = qwen3_4b_opd()
    teacher = build_tiny(config.model.tiny, build_tokenizer(), tmp_path / "teacher", seed=1)
    tokenizer = read_tokenizer(teacher)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(teacher)
    values = {"distill.teacher": str(teacher), "output.root": str(tmp_path)}
    save_config(qwen3_4b_opd(overrides=values), tmp_path / "run.json")
    driver = Driver(tmp_path / "run.json")
    assert driver.end() != 0
    assert "id 264 is '<new>' there and None in" in driver.text()
    assert "all are up" not in driver.text()


def test_conversations_that_cannot_be_learned_are_refused(tmp_path):
    file = tmp_path / "chat.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    values = json.dumps({"output.root": str(tmp_path / "runs")})
    done = command(
        "run", "qwen3_4b_sft", "-p", "prompt_data", str(file), "-p", "overrides", values
    )
    assert done.returncode and f"{file} line 1" in done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()
