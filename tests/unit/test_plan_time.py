"""The time of a plan: its rates, its total, and the published step next to it."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from cookbook_npu.cli import app, planned_config
from cookbook_npu.plan.memory import capacity_of
from cookbook_npu.plan.plan import make_plan
from cookbook_npu.plan.published import PUBLISHED_RUNS
from cookbook_npu.plan.time import error_text, phase_estimates, speeds_of
from cookbook_npu.recipes import RECIPES, run_command
from cookbook_npu.runs.metrics import STEP_PHASES

NAME = "qwen3_4b_colocate"
COMPARED = [run for run in PUBLISHED_RUNS if run.phases]


def seconds(speeds, soc="Ascend910B1"):
    config = planned_config(NAME, "910b", {})
    found = phase_estimates(config, speeds, capacity_of(config, soc))
    return {one.name: one.seconds for one in found}


def test_compute_follows_the_cores_of_the_chip_and_sampling_the_memory():
    fast, slow = (seconds(speeds_of(soc)) for soc in ("Ascend910B1", "Ascend910B3"))
    assert slow["actor_train"] / fast["actor_train"] == pytest.approx(24 / 20)
    assert slow["rollout"] == fast["rollout"]
    half = seconds(replace(speeds_of(), memory=0.8e12))
    assert fast["rollout"] < half["rollout"] < 2 * fast["rollout"]


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_step_takes_its_phases_or_the_longer_side(recipe):
    plan = make_plan(planned_config(recipe, "910b", {}))
    times = {one.name: one.seconds for one in plan.times}
    whole = sum(times.values())
    if plan.overlaps:
        assert max(times["rollout"], whole / 2) <= plan.step_seconds < whole
    else:
        assert plan.step_seconds == whole
    assert (plan.published is None) == plan.config.is_sft
    assert error_text("actor_train" if plan.config.is_sft else "step") in plan.time_text()


def test_the_text_fits_a_terminal_and_json_has_the_published_step():
    out = CliRunner().invoke(app, ["plan", NAME], env={"COLUMNS": "80"})
    assert max(map(len, out.output.splitlines())) <= 80
    words = " ".join(out.output.split())
    assert "nearest published step: Qwen3-4B, GRPO, 8 x Ascend910B1" in words
    out = CliRunner().invoke(app, ["plan", NAME, "--json"])
    shown = json.loads(out.output)["published"]
    assert shown["name"] == "vime-255" and shown["seconds"]["rollout"] == 344.5


def test_rows_have_a_link_and_those_that_are_compared_what_a_plan_needs():
    assert len({run.name for run in PUBLISHED_RUNS}) == len(PUBLISHED_RUNS) >= 49
    assert all(run.link.startswith("https://") for run in PUBLISHED_RUNS)
    for run in PUBLISHED_RUNS:
        assert {*run.seconds} <= {*STEP_PHASES, "step_async"}, run.name
        assert run.phases or run.note or run.left_open(), run.name
    for run in COMPARED:
        assert {*run.phases.split()} <= {*STEP_PHASES}, run.name
        assert {*run.seconds} & {"step", *run.phases.split()}, run.name
        known = run.soc, run.units, run.response, run.engine, run.tensor
        assert all(known) and None not in run.batch, run.name
        if run.trainer:
            assert run.trainer + run.engines == run.units, run.name


def test_building_a_recipe_for_other_prompts_prints_nothing(capsys):
    given = {"model": "/data/Qwen3-VL-8B", "prompt_data": "countdown"}
    config = RECIPES["qwen3_vl_8b_grpo"]("910b", **given)
    assert config.rollout.environment is None
    assert "rollout.max_turns" not in run_command(config)
    assert capsys.readouterr().err == ""
