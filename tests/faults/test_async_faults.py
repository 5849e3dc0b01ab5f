"""Split placement: whatever is lost, stopped or resumed, every draw is trained on once, nothing too old;
with no staleness allowed the run is that of a colocated one.
"""

import json
import os
import random
import signal
from pathlib import Path

import pytest
from whole_runs import (
    STEPS,
    Driver,
    configure,
    events,
    learned,
    rows,
    run,
    wait_for,
    weights,
)

pytestmark = pytest.mark.slow

SPLIT = {
    "placement.mode": "split",
    "placement.devices": 4,
    "algorithm.rollout_is": "truncate",
    "train.save_every": 2,
}
PER_STEP = 4  # prompts of a step
# random moments at which a run is killed; each costs two short runs
POINTS = int(os.environ.get("COOKBOOK_KILL_POINTS", "1"))


def groups(folder: Path) -> list[list[str]]:
    "The groups that each step was trained on"
    found = []
    for file in sorted((folder / "samples").glob("step_*.jsonl")):
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        found.append(list(dict.fromkeys(s["group_id"] for s in samples)))
    return found


def check_ledger(folder: Path, max_staleness: int) -> None:
    "Whole steps, each draw once and none left out, nothing too old"
    by_step = groups(folder)
    assert [len(step) for step in by_step] == [PER_STEP] * STEPS
    draws = []
    for name in sum(by_step, []):
        step, place = name.split(":")[0].split(".")
        draws.append(int(step) * PER_STEP + int(place))
    assert len(set(draws)) == len(draws), "a draw was trained on twice"
    # the last steps may have overtaken a draw that nobody needed any more
    assert set(range(STEPS * PER_STEP - PER_STEP)) <= set(draws), sorted(draws)
    ages = [row["staleness/age_max"] for row in rows(folder)[1:]]
    assert len(ages) == STEPS and max(ages) <= max_staleness, ages


def test_without_staleness_it_is_the_colocated_run(undisturbed, tmp_path):
    "The same numbers and weights, bit for bit, with trainer and engines on devices of their own"
    synchronous = SPLIT | {
        "algorithm.rollout_is": "none",
        "rollout.depth": 0,
        "rollout.max_staleness": 0,
        "train.save_every": 1,
    }
    run(configure(tmp_path, "run", **synchronous))

    def common(folder: Path) -> list[dict]:
        own = ("async/", "staleness/")
        return [
            {k: v for k, v in row.items() if not k.startswith(own)}
            for row in learned(folder)
        ]

    assert common(tmp_path / "run") == common(undisturbed)
    assert weights(tmp_path / "run") == weights(undisturbed)
    check_ledger(tmp_path / "run", max_staleness=0)


def test_responses_go_on_under_new_weights(tmp_path):
    "Decoding slower than training: updates meet half-done responses, and every token says its version"
    slow = {"rollout.simulated_latency": 0.3, "rollout.decode_steps": 1}
    run(configure(tmp_path, "run", **SPLIT, **slow))
    folder = tmp_path / "run"
    check_ledger(folder, max_staleness=2)
    versions = []
    for file in sorted((folder / "samples").glob("step_*.jsonl")):
        versions += [json.loads(line)["versions"] for line in file.read_text().splitlines()]
    assert any(len(set(own)) > 1 for own in versions), "no response met an update"
    assert all(own == sorted(own) for own in versions)
    assert any(row["async/continued_groups"] > 0 for row in rows(folder)[1:])


def test_an_engine_and_then_the_trainer_are_lost(tmp_path):
    "The engine's groups go to the other one, the trainer back to its checkpoint"
    faults = "rollout0/collect#2/die; trainer/1/train#4/die"
    driver = Driver(configure(tmp_path, "run", **SPLIT), faults)
    assert driver.end() == 0, driver.text()
    folder = tmp_path / "run"
    told = [failure["error"] for failure in events(folder, "failure")]
    assert len(told) == 2, told
    assert "rollout0 rank 0 of 1: collect(): the process died" in told[0]
    assert "trainer rank 1 of 2" in told[1]
    restarts = events(folder, "restart")
    assert [0] in [restart["engines"] for restart in restarts]
    assert any(restart.get("trainer") for restart in restarts)
    check_ledger(folder, max_staleness=2)


@pytest.mark.parametrize("number", range(POINTS))
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_was_ended_goes_on(tmp_path, sent, number):
    "At a moment that nobody chose; a stop writes a checkpoint, after a kill the last one counts"
    chance = random.Random(number)
    driver = Driver(configure(tmp_path, "run", **SPLIT))
    done = f'{{"step": {chance.randrange(1, STEPS - 1)},'
    wait_for(lambda: any(line.startswith(done) for line in driver.lines), driver)
    os.kill(driver.pids["driver"][0], sent)
    assert driver.end() != 0, driver.text()
    folder = tmp_path / "run"
    if sent == signal.SIGTERM:
        (stopped,) = events(folder, "stopped")
        assert (folder / f"checkpoints/step_{stopped['step']:06d}").is_dir()
    run(configure(tmp_path, "run", resume=True, **SPLIT))
    check_ledger(folder, max_staleness=2)
