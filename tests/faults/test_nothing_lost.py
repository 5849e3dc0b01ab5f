"""What was done stays done: a checkpoint that is pending when something else fails, steps without loss."""

import json
from pathlib import Path

import pytest
from whole_runs import ONE_DEVICE, STEPS, Driver, configure, events, rows, run

from cookbook_npu.runs.checkpoints import Checkpoints
from cookbook_npu.runs.folder import RunFolder

pytestmark = pytest.mark.lane("runs")

SPLIT = {
    "placement.mode": "split",
    "placement.devices": 4,
    "algorithm.rollout_is": "truncate",
}


def checkpoints(folder: Path) -> list[int]:
    "The steps of the finished checkpoints"
    with RunFolder.open(folder) as opened:
        return sorted(c.step for c in Checkpoints.of_run(opened).finished())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(ONE_DEVICE, id="colocate"),
        pytest.param(SPLIT, id="split", marks=pytest.mark.lane("runs")),
    ],
)
def test_a_checkpoint_outlives_the_failure_of_a_later_step(tmp_path, monkeypatch, settings):
    "Each step saves in the background; 16 samples a step, so the scorer breaks in the fifth"
    count = tmp_path / "count"
    monkeypatch.setenv("COOKBOOK_NPU_TEST_COUNT", str(count))
    settings = settings | {
        "rollout.eval_every": 0,
        "reward.scorers": {"run_driver:breaks": 1.0},
        "reward.correct_threshold": {},
        "reward.workers": 1,
        "output.save_samples": True,
    }
    driver = Driver(configure(tmp_path, "run", **settings))
    assert driver.end() != 0
    assert "the scorer broke" in driver.text(), driver.text()
    trained = [row["step"] for row in rows(tmp_path / "run") if row["step"]]
    assert trained and checkpoints(tmp_path / "run")[-1] == trained[-1], trained
    if not settings.get("placement.mode"):
        return  # resumed runs of this placement: test_recovery.py
    count.write_text("-1000")
    run(configure(tmp_path, "run", resume=True, **settings))
    # only records of a step that had not ended are set aside
    assert {e["step"] for e in events(tmp_path / "run", "truncated")} <= {trained[-1]}
    assert [row["step"] for row in rows(tmp_path / "run") if row["step"]] == [
        *range(1, STEPS + 1)
    ]


def test_steps_without_loss_are_counted_and_resumed(tmp_path):
    "Nearly all responses are truncated and masked; a step has two optimizer steps"
    settings = {
        **ONE_DEVICE,
        "algorithm.mask_truncated": True,
        "sampling.max_response_tokens": 1,
        "train.global_batch_size": 8,
        "optim.schedule": "linear",
        "rollout.eval_every": 0,
        "reward.scorers": {"exact": 1.0},
        "reward.correct_threshold": {},
    }
    driver = Driver(configure(tmp_path, "run", **settings))
    driver.end()
    folder = tmp_path / "run"
    counts = [row.get("no_loss_steps", 0.0) for row in rows(folder)[-STEPS:]]
    assert counts[0] == 2.0 and len(events(folder, "no_loss")) == sum(map(bool, counts))
    saved = checkpoints(folder)
    assert saved == [*range(1, STEPS + 1)], driver.text()
    state = folder / "checkpoints" / "step_000001" / "state" / "untrained.json"
    assert json.loads(state.read_text()) == {"steps": 2}
    assert "had no token with loss" in driver.text()
