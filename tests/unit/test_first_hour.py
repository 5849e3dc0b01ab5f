"""What the page about the first hour on a 910B quotes is what the program prints."""

import json

import pytest
from machines import recorded
from places import ROOT

from cookbook_npu.cluster.environment import worker_env
from cookbook_npu.npu.stack.doctor import examine, write_bundle
from cookbook_npu.plan.plan import make_plan
from cookbook_npu.plan.roles import environment_text
from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.runs.smoke import SMOKE_LAYOUTS, smoke_config


@pytest.fixture(scope="module")
def prose() -> str:
    page = json.loads((ROOT / "nbs/tutorials/first_hour_910b.ipynb").read_text("utf-8"))
    return "".join("".join(cell["source"]) for cell in page["cells"])


def test_the_doctor(prose, tmp_path):
    fine = examine(recorded("910b1_recommended", tmp_path / "fine"))
    assert fine.exit_code == 0
    assert "\n".join(fine.as_text().splitlines()[:4]) in prose
    other = examine(recorded("910b1_seed", tmp_path / "other")).as_text()
    assert next(line for line in other.splitlines() if line.startswith("similar")) in prose
    names = write_bundle(tmp_path / "report.zip", fine, {})
    assert ", ".join(f"`{name}`" for name in names) in prose


def test_figures_of_the_recipe(prose):
    reported = qwen3_4b_colocate.reference.metrics
    diffs = reported["train_rollout_logprob_abs_diff"].values()
    norms = reported["grad_norm"].values()
    assert f"{min(diffs)} to {max(diffs)}" in prose
    assert f"{min(norms):.2f} to {max(norms):.2f} were reported" in prose
    aime = {"data.eval_data": "/data/aime-2024/aime-2024.jsonl", "data.eval_prompts": 30}
    hundred = dict(model="/data/Qwen3-4B", prompt_data="d", num_steps=100, overrides=aime)
    plan = make_plan(qwen3_4b_colocate("910b", **hundred))
    hours, times = plan.run_seconds() / 3600, plan.count_evaluations()
    assert f"{hours:.0f} hours for 100 steps and {times} evaluations of 30" in prose


def test_layouts_of_the_smoke_run(prose):
    for name in SMOKE_LAYOUTS:
        assert (f"`{name}`" if name != "tp" else "-p layout tp ") in prose
        config = smoke_config(name, "910b", model="/data/m", prompt_data="d")
        assert config.sampling.max_response_tokens == 256


def test_variables_of_a_role(prose):
    shell = {
        "HCCL_BUFFSIZE": "200",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "TMS_HOOK_MODE": "preload",
    }
    config = qwen3_4b_colocate("910b", model="m", prompt_data="d")
    shown = environment_text(config, worker_env({}, shell), shell).splitlines()
    block = prose[prose.index("environment of trainer\n") :].split("```")[0].splitlines()
    assert set(block) <= set(shown)
