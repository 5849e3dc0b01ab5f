"""Split placement: whatever is lost, stopped or resumed, every draw is trained on once, nothing too old;
with no staleness allowed the run is that of a colocated one.
"""

import json
import os
import random
import signal
import time
from contextlib import suppress
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
    tell,
    wait_for,
    weights,
)

from cookbook_npu.runs.metrics import load_metrics, load_spans, metric_points

SPLIT = {
    "placement.mode": "split",
    "placement.devices": 4,
    "algorithm.rollout_is": "truncate",
    "train.save_every": 2,
}
SYNCHRONOUS = SPLIT | {
    "algorithm.rollout_is": "none",
    "rollout.depth": 0,
    "rollout.max_staleness": 0,
    "train.save_every": 1,
}
PER_STEP = 4  # prompts of a step
# random moments at which a process of a run is killed; each costs one or two short runs
POINTS = int(os.environ.get("COOKBOOK_KILL_POINTS", "0"))
VICTIMS = ("driver", "engine", "trainer", "raylet")


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


# by how much the log-probs of an engine, which depend on what else is in its batch, are rounded
ROUNDING = ("train_rollout_logprob", "tis", "mismatch_", "ess")


def check_equal(folder: Path, colocated: Path, apart_from: tuple[str, ...] = ()) -> None:
    "The same numbers and weights, bit for bit"
    own = ("async/", "staleness/", *apart_from)
    found = []
    for run_folder in (folder, colocated):
        found.append(
            [
                {k: v for k, v in row.items() if not k.startswith(own)}
                for row in learned(run_folder)
            ]
        )
    assert found[0] == found[1]
    assert weights(folder) == weights(colocated)
    check_ledger(folder, max_staleness=0)


@pytest.mark.lane("runs")
def test_without_staleness_it_is_the_colocated_run(undisturbed, tmp_path):
    "The same numbers and weights, bit for bit, with trainer and engines on devices of their own"
    run(configure(tmp_path, "run", **SYNCHRONOUS))
    check_equal(tmp_path / "run", undisturbed)


@pytest.mark.lane("runs")
def test_weights_by_broadcast_and_its_receiver_dies(undisturbed, tmp_path):
    """The trainer does not wait for one that hangs, or for one that dies: the next engine receives, the lost
    one comes back, one is removed and added, and what is learned is the same as in a quiet run"""
    more = {"placement.transfer_backend": "broadcast", "faults.hang_timeout_s": 50}
    config = configure(tmp_path, "run", **SYNCHRONOUS, **more)
    faults = "rollout0/receive_weights#1/hang:broadcast:1; rollout0/receive_weights#3/die"
    driver = Driver(config, faults, scale={3: 1, 4: 2})
    assert driver.end() == 0, driver.text()
    folder = tmp_path / "run"
    (failure,) = events(folder, "failure")
    died = "rollout0 rank 0 of 1: receive_weights(): the process died"
    assert died in failure["error"]
    why = [event["why"] for event in events(folder, "weight_update_retry")]
    assert " within 10 s" in why[0] and any(died in one for one in why[1:]), why
    members = [event["members"][1] for event in events(folder, "broadcast_group")]
    assert members[:3] == ["rollout0", "rollout0", "rollout1"], members
    assert [e["engines"] for e in events(folder, "engine_added")] == [[1]]
    spans = [span for span in load_spans(folder) if span.role == "engine 1"]
    assert spans[-1].version == STEPS, "the added engine does not sample"
    check_equal(folder, undisturbed, apart_from=ROUNDING)


def test_responses_go_on_under_new_weights(tmp_path):
    "Decoding slower than training: updates meet half-done responses, and every token says its version"
    # an engine is removed with half-done responses, which the other one goes on with
    slow = {"rollout.simulated_latency": 1.5}
    driver = Driver(configure(tmp_path, "run", **SPLIT, **slow), scale={2: 1, 3: 2, 4: 6})
    assert driver.end() == 0, driver.text()
    # a request that cannot be met leaves the run as it is
    assert "set_num_engines(6) changed nothing: 6 engines do not fit" in driver.text()
    assert "4 more NPU are wanted, the cluster has 0 free ones" in driver.text()
    assert "placement.devices 8" in driver.text()
    folder = tmp_path / "run"
    assert [e["engines"] for e in events(folder, "engine_added")] == [[1]]
    engines = [row["async/engines"] for row in rows(folder)[1:]]
    assert engines == [2, 2, 1, 2, 2, 2], engines
    check_ledger(folder, max_staleness=2)
    versions = []
    for file in sorted((folder / "samples").glob("step_*.jsonl")):
        versions += [json.loads(line)["versions"] for line in file.read_text().splitlines()]
    assert any(len(set(own)) > 1 for own in versions), "no response met an update"
    assert all(own == sorted(own) for own in versions)
    assert any(row["async/continued_groups"] > 0 for row in rows(folder)[1:])


@pytest.mark.lane("runs")
@pytest.mark.timeout(900)
def test_a_machine_joins_and_gets_an_engine(undisturbed, tmp_path):
    """The cluster is full at first, and says so; the machine that joins gets the third engine and its weights
    by a broadcast, and what is learned is the same as without it"""
    config = configure(tmp_path, "run", **SYNCHRONOUS)
    found = tell("two_nodes_grow.py", str(config), "2")
    assert "1 more NPU are wanted, the cluster has 0 free ones" in found["refused"]
    *first, joined = found["nodes"]
    assert len(first) == 4 and len(set(first)) == 1 and joined != first[0], found["nodes"]
    folder = tmp_path / "run"
    (added,) = events(folder, "engine_added")
    assert added["engines"] == [2]
    groups_made = [event["members"] for event in events(folder, "broadcast_group")]
    assert groups_made == [["trainer", "rollout2"]], groups_made
    own = [span for span in load_spans(folder) if span.role == "engine 2"]
    assert own[-1].version == STEPS, "the added engine does not sample"
    check_equal(folder, undisturbed, apart_from=ROUNDING)


@pytest.mark.lane("runs")
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
    # also that of the checkpoint, whose row was truncated
    accuracies = metric_points(load_metrics(folder), "eval_accuracy")
    assert [step for step, _ in accuracies] == [0, 2, 4, 6]


def strike_anywhere(driver: Driver, victim: str, chance: random.Random) -> None:
    "Kill a process some time after a step, with another still to come"
    done = f'{{"step": {chance.randrange(1, STEPS - 1)},'
    wait_for(lambda: any(line.startswith(done) for line in driver.lines), driver)
    time.sleep(chance.uniform(0.0, 0.5))
    pid = chance.choice(driver.pids[victim])
    with suppress(ProcessLookupError):  # the run has ended by itself
        os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not POINTS, reason="COOKBOOK_KILL_POINTS=20")
@pytest.mark.parametrize("number", range(POINTS or 1))
def test_whoever_is_killed_at_whatever_moment(undisturbed, tmp_path, number):
    """A run outlives its engines and its trainer; one that loses its driver or Ray is resumed. No draw
    is lost or comes twice, nothing is too old; every second run has no staleness and ends bit for bit"""
    chance = random.Random(number)
    victim = VICTIMS[number % len(VICTIMS)]
    synchronous = number // len(VICTIMS) % 2 == 1
    settings = SYNCHRONOUS if synchronous else SPLIT
    driver = Driver(configure(tmp_path, "run", **settings))
    strike_anywhere(driver, victim, chance)
    code = driver.end()
    folder = tmp_path / "run"
    if victim in ("engine", "trainer"):
        assert code == 0, driver.text()
    if code != 0:
        run(configure(tmp_path, "run", resume=True, **settings))
    if synchronous:
        check_equal(folder, undisturbed, apart_from=ROUNDING)
    check_ledger(folder, max_staleness=0 if synchronous else 2)
