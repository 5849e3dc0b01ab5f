"""The time of a plan: its rates, its total, and the published step next to it."""

from dataclasses import replace

import pytest

from cookbook_npu.cli import planned_config
from cookbook_npu.plan.memory import capacity_of
from cookbook_npu.plan.plan import make_plan
from cookbook_npu.plan.time import error_text, phase_estimates, speeds_of
from cookbook_npu.recipes import RECIPES

NAME = "qwen3_4b_colocate"


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
    # of the same model, devices, batch and length
    assert (plan.published is not None) == (recipe in ("qwen3_4b_colocate", "wordle_grpo"))
    assert error_text("actor_train" if plan.config.is_sft else "step") in plan.time_text()
