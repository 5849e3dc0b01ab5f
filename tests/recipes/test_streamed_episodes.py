"""Whole runs with environments: one that fails, one beside the trainer that is stopped, and one with vLLM."""

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from run_environments import fails_on
from whole_runs import (
    Driver,
    check_turns,
    events,
    more_vllm,
    parameters,
    rows,
    run,
    samples,
    wait_for,
)

from cookbook_npu.config import save_config
from cookbook_npu.recipes import qwen3_4b_colocate, qwen3_5_9b_async

pytestmark = pytest.mark.lane("runs")
STEPS = 2
PER_STEP = 4  # prompts of a step
EVERY = 4  # prompts, of which one fails
# two data-parallel ranks, two engines, an environment that fails on some prompts
FAILING = {
    "parallel.tensor": 1,
    "rollout.environment": "run_environments:Talker",
    "rollout.environment_arguments": {"every": EVERY},
    "rollout.max_turns": 3,
    "sampling.max_response_tokens": 24,
}


def test_groups_whose_environment_fails_are_left_out(tmp_path):
    "Two engines, two data-parallel ranks: the others are trained on, and the evaluation goes on"
    given = parameters(tmp_path, "run", steps=STEPS, **FAILING)
    save_config(qwen3_4b_colocate(**given), tmp_path / "run.json")
    run(tmp_path / "run.json")
    failed = {event["group"] for event in events(tmp_path / "run", "environment_failed")}
    assert all(fails_on(name.split(":", 1)[1], EVERY) for name in failed)
    counts = []
    for number, step in enumerate(samples(tmp_path / "run")):
        groups = {sample["group_id"] for sample in step}
        lost = {name for name in failed if name.startswith(f"{number}.")}
        assert not groups & lost and len(groups | lost) == PER_STEP
        assert all(s["metadata"]["environment"]["turns"] == 2 for s in step)
        counts.append(len(lost))
    assert sum(counts) > 0, "no environment failed"
    told = rows(tmp_path / "run")
    assert sum(row.get("env/failed_groups", 0) for row in told) > 0
    assert told[0]["eval_accuracy"] >= 0 and told[-1]["grad_norm"] > 0
    assert all(row["train_rollout_logprob_abs_diff"] <= 1e-5 for row in told[1:])


def test_asynchronous_episodes_keep_their_bound_through_a_stop(tmp_path):
    "Each draw once, nothing too old, evaluations talk, too; a stop between steps, and on from there"
    steps = 4

    def configured(resume: bool) -> Path:
        # the tiny model that knows the calculator
        asking = qwen3_4b_colocate(prompt_data="calculator").model.tiny.model_dump()
        more = {f"model.tiny.{key}": value for key, value in asking.items()}
        more |= {"rollout.simulated_latency": 0.05}
        given = parameters(tmp_path, "run", resume, steps, **more)
        config = qwen3_5_9b_async(prompt_data="calculator", **given)
        save_config(config, tmp_path / "run.json")
        return tmp_path / "run.json"

    driver = Driver(configured(resume=False))
    wait_for(lambda: any('{"step": 1,' in line for line in driver.lines), driver)
    os.kill(driver.pids["driver"][0], signal.SIGTERM)
    assert driver.end() != 0, driver.text()
    folder = tmp_path / "run"
    (stopped,) = events(folder, "stopped")
    assert (folder / f"checkpoints/step_{stopped['step']:06d}").is_dir()
    run(configured(resume=True))
    told = rows(folder)
    ages = [row["staleness/age_max"] for row in told[1:]]
    assert len(ages) == steps and max(ages) <= 2, ages
    assert max(row["env/turns_mean"] for row in told[1:]) > 1
    evaluated = [row["step"] for row in told if "eval_accuracy" in row]
    assert evaluated[0] == 0 and evaluated[-1] == steps, evaluated
    draws = []
    for number, step in enumerate(samples(folder)):
        assert len(step) == PER_STEP * 4
        for sample in step:
            versions = sample["versions"]
            assert versions == sorted(versions)
            with_loss = zip(versions, sample["loss_mask"], strict=True)
            assert min(v for v, own in with_loss if own) >= number - 2
        for name in {sample["group_id"] for sample in step}:
            drawn, place = name.split(":")[0].split(".")
            draws.append(int(drawn) * PER_STEP + int(place))
    assert len(draws) == len(set(draws)) == steps * PER_STEP
    check_turns(folder)


@more_vllm
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="the vllm extra has no wheel here"
)
def test_vllm_takes_turns_with_an_environment(tmp_path):
    "Token ids are carried forward, each has its log-prob, and the trainer agrees"
    more = {"rollout.engine": "vllm", "rollout.eval_every": 0}
    given = parameters(tmp_path, "run", steps=1, **more)
    config = qwen3_4b_colocate(prompt_data="calculator", **given)
    save_config(config, tmp_path / "run.json")
    run(tmp_path / "run.json")
    for row in rows(tmp_path / "run"):
        assert row["env/turns_mean"] > 1 and row["env/failed_groups"] == 0
        assert row["train_rollout_logprob_abs_diff"] < 0.01
    check_turns(tmp_path / "run")
