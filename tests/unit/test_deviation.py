"""Phases beside the plan: planted slow phases of runs on NPUs are named, published speeds are no alarm."""

import json

import pytest
from typer.testing import CliRunner

from cookbook_npu.cli import app
from cookbook_npu.plan.deviation import CAUSES, PhaseDeviation, plan_table, usual_causes
from cookbook_npu.plan.fit import leave_one_out
from cookbook_npu.plan.published import published_runs
from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.runs.folder import RunFolder, append_line
from cookbook_npu.runs.metrics import STEP_PHASES
from cookbook_npu.runs.report import write_report

VIME = next(run for run in published_runs() if run.name == "vime-255")


def recorded(root, slow=None, times=10.0):
    "A run folder at scale 910b with the seconds of vime #255, one phase slower"
    config = qwen3_4b_colocate(
        "910b",
        model="Qwen3-4B",
        prompt_data="arithmetic",
        overrides={"algorithm.use_reference": True, "output.root": str(root)},
    )
    seconds = dict(VIME.seconds)
    if slow:
        seconds["step"] += (times - 1) * seconds[slow]
        seconds[slow] *= times
    with RunFolder.create(config) as run:
        for step in range(1, 4):
            row = {"step": step, "raw_reward": 0.5, "tokens": 256 * 8392.0}
            row |= {f"time/{name}": value for name, value in seconds.items()}
            append_line(run.metrics_file, row)
        return run.path


def test_a_published_speed_is_no_alarm():
    for one in leave_one_out(published_runs()):
        assert not PhaseDeviation(one.phase, one.measured, one.predicted).off


@pytest.mark.parametrize("slow", ["rollout", "ref_logprobs", "actor_train"])
def test_the_command_names_the_slow_phase_and_the_report_shows_it(tmp_path, slow):
    path = recorded(tmp_path, slow)
    asked = ["compare", str(path), "--against", "plan", "--soc", "Ascend910B1"]
    out = CliRunner().invoke(app, [*asked, "--json"])
    assert out.exit_code == 1, out.output
    (found,) = json.loads(out.output)
    phases = {one["phase"]: one for one in found["phases"]}
    assert [name for name in VIME.phases if phases[name]["off"]] == [slow]
    assert phases[slow]["causes"]
    text = CliRunner().invoke(app, asked, env={"COLUMNS": "80"}).output
    assert f"{slow} takes" in text and max(map(len, text.splitlines())) <= 80
    page = write_report(path, plan=plan_table(path, "Ascend910B1")).read_text()
    assert "Measured and planned" in page and f"{slow} takes" in page


def test_a_usual_run_is_not_off(tmp_path):
    out = CliRunner().invoke(
        app,
        ["compare", str(recorded(tmp_path)), "--against", "plan", "--soc", "Ascend910B1"],
    )
    assert out.exit_code == 0 and "no phase is off" in out.output, out.output


def test_a_laptop_run_is_not_compared_with_the_plan(tmp_path):
    with RunFolder.create(
        qwen3_4b_colocate(overrides={"output.root": str(tmp_path)})
    ) as run:
        append_line(run.metrics_file, {"step": 1, "grad_norm": 1.0, "time/step": 1.0})
    assert (
        "Measured and planned"
        not in write_report(run.path, plan=plan_table(run.path)).read_text()
    )
    out = CliRunner().invoke(app, ["compare", str(run.path), "--against", "plan"])
    assert "whose seconds say nothing about an NPU" in str(out.exception)


def test_every_judged_phase_has_a_cause_when_it_is_slow():
    assert {name for cause in CAUSES for name in cause.phases} == {*STEP_PHASES}
    for phase in STEP_PHASES:
        assert usual_causes(PhaseDeviation(phase, 9.0, 1.0), None)
