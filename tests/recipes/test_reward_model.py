"""A reward model in whole runs: it scores as transformers does, the policy learns it, and it resumes."""

import json
from pathlib import Path

import pytest
import torch
from metrics_page import explained
from test_distillation import rows, without_times
from transformers import AutoModelForSequenceClassification
from whole_runs import run

from cookbook_npu.config import save_config
from cookbook_npu.data.sample import Sample
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.model.tiny import build_tiny
from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.rl.algorithms import algorithm_overrides

pytestmark = pytest.mark.lane("runs")


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory) -> Path:
    "A classifier with random layers and a head that counts the sevens of a text"
    folder = tmp_path_factory.mktemp("reward") / "model"
    tokenizer = build_tokenizer()
    tiny = build_tiny(qwen3_4b_colocate().model.tiny, tokenizer, folder, seed=1)
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny, num_labels=1, dtype=torch.float32
    )
    seven = tokenizer("7")["input_ids"][0]
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(48, 58, (4096, 10), generator=generator)
    ids_BT[torch.rand(ids_BT.shape, generator=generator) < 0.3] = seven
    with torch.no_grad():
        hidden_BH = model.model(ids_BT).last_hidden_state[:, -1]
        count_B1 = (ids_BT == seven).float().sum(1, keepdim=True)
        fit = torch.linalg.lstsq(hidden_BH, count_B1).solution
        model.score.weight.copy_(fit.T)
    assert (hidden_BH @ fit - count_B1).pow(2).mean() < 0.5 * count_B1.var()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prepare(root: Path, folder: Path, steps: int, **overrides: object) -> Path:
    "The configuration file of a run, in `run`, whose reward is the score of the reward model alone"
    values = {
        "rollout.eval_every": 0,
        "train.save_every": 8,
        "train.export_hf": False,
        "optim.learning_rate": 3e-3,
        "reward.scorers": {"exact": 0.0},
        "reward_model.path": str(folder),
        "output.root": str(root),
        "output.name": "run",
        **overrides,
    }
    config = qwen3_4b_colocate(num_steps=steps, prompts_per_step=16, overrides=values)
    root.mkdir(exist_ok=True)
    save_config(config, root / f"{steps}.json")
    return root / f"{steps}.json"


def scored_as_by_transformers(run_folder: Path, folder: Path, coef: float) -> None:
    "Compare the rewards of the first step with the classifier's scores"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    file = sorted((run_folder / "samples").glob("step_*"))[0]
    samples = [Sample.from_json(line) for line in file.read_text().splitlines()]
    for sample in samples[:16]:
        ids_BT = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        with torch.no_grad():
            score = model(ids_BT).logits.item()
        assert sample.reward == pytest.approx(coef * score, abs=1e-4)


@pytest.mark.lane("runs")
def test_the_policy_learns_the_score_and_resumes_bit_for_bit(tmp_path, reward_folder):
    whole, halved = (tmp_path / name / "run" for name in ("whole", "halved"))
    run(prepare(whole.parent, reward_folder, 16))
    scored_as_by_transformers(whole, reward_folder, 1.0)
    found = rows(whole)
    scores = [row["reward/model_score"] for row in found]
    assert sum(scores[-4:]) / 4 > sum(scores[:4]) / 4 + 0.4, scores
    assert found[0]["raw_reward"] == pytest.approx(scores[0])
    for steps in (8, 16):
        more = {"output.resume": steps == 16}
        run(prepare(halved.parent, reward_folder, steps, **more))
    assert [without_times(row) for row in rows(halved)] == list(map(without_times, found))


def test_beside_a_critic_on_devices_apart_from_the_engines(tmp_path, reward_folder):
    own = {
        **algorithm_overrides("ppo"),
        "placement.mode": "split",
        "placement.devices": 3,
        "placement.trainer_devices": 2,
        "reward_model.coef": 0.5,
    }
    run(prepare(tmp_path, reward_folder, 2, **own))
    folder = tmp_path / "run"
    scored_as_by_transformers(folder, reward_folder, 0.5)
    text = (folder / "metrics.jsonl").read_text().splitlines()
    for row in explained([json.loads(line) for line in text]):
        assert row["time/reward_model"] > 0 and "critic/value_loss" in row
