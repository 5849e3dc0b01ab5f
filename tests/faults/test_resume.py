"""A run that is killed, and does not start lost workers again itself, goes on when resumed as if nothing had
happened: same metrics, same weights, each prompt trained once.
"""

import json
import os
import random
import shutil
import time
from itertools import pairwise
from pathlib import Path

import pytest
from whole_runs import (
    ONE_DEVICE,
    STEPS,
    Driver,
    configure,
    events,
    learned,
    prompts,
    rows,
    run,
    tell,
    wait_for,
    weights,
)

from cookbook_npu.runs.folder import RunFolder
from cookbook_npu.runs.metrics import load_spans
from cookbook_npu.runs.report import run_result

# random moments; test_recovery.py has the chosen ones
POINTS = int(os.environ.get("COOKBOOK_KILL_POINTS", "0"))
VICTIMS = ("engine", "raylet", "driver", "trainer")
pytestmark = pytest.mark.lane("runs")


def driven(folder: Path) -> list[int]:
    "Steps of which spans.jsonl has the driver's span, which follow each other on the run's clock"
    spans = [span for span in load_spans(folder) if span.phase == "step"]
    assert all(a.end <= b.start for a, b in pairwise(spans)), spans
    return [span.step for span in spans]


def anywhere(driver: Driver, chance: random.Random) -> None:
    "Some time after a step, reproducibly chosen, with another still to come"
    done = f'{{"step": {chance.randrange(1, STEPS)},'
    wait_for(lambda: any(line.startswith(done) for line in driver.lines), driver)
    time.sleep(chance.uniform(0.0, 0.5))


@pytest.mark.skipif(not POINTS, reason="COOKBOOK_KILL_POINTS=20")
@pytest.mark.parametrize("number", range(POINTS or 1))
def test_a_killed_run_goes_on_bit_for_bit(undisturbed, tmp_path, number):
    victim = VICTIMS[number % len(VICTIMS)]
    folder = tmp_path / "run"
    # a moment is short: a busy machine may miss it, and the run ends by itself
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        driver = Driver(configure(tmp_path, "run", **{"faults.max_restarts": 0}))
        assert driver.started.wait(600) and driver.pids, driver.text()
        anywhere(driver, random.Random(number))
        if driver.strike(victim):
            break
    assert driver.end() != 0, driver.text()
    run(configure(tmp_path, "run", resume=True))
    assert rows(folder) == rows(undisturbed)
    assert driven(folder) == driven(undisturbed) == list(range(1, STEPS + 1))
    assert prompts(folder) == prompts(undisturbed)
    assert weights(folder) == weights(undisturbed)


@pytest.mark.timeout(900)
def test_a_run_over_two_machines_outlives_one_of_them(undisturbed, tmp_path):
    """Ranks fill one machine after the other. The run names the lost one; resumed with another, it
    ends as on one machine. Trainer and engines are on different machines, so new weights are broadcast"""
    synchronous = {
        "placement.mode": "split",
        "placement.devices": 4,
        "rollout.depth": 0,
        "rollout.max_staleness": 0,
        # long enough for Ray to miss a machine before the last step
        "rollout.simulated_latency": 0.15,
    }
    found = tell("two_nodes_train.py", str(tmp_path), json.dumps(synchronous))
    first, second = found["slots"][0][0], found["slots"][2][0]
    assert first != second
    assert found["slots"] == [[node, n] for node in (first, second) for n in range(2)]
    assert found["ranks"] == [[rank, *slot] for rank, slot in enumerate(found["slots"])]
    assert found["code"] != 0, found["text"]
    assert "the process died" in found["text"], found["text"]
    rank = 0 if found["killed"] == first else 2
    failure = f"teller rank {rank} of 4: where(): the process died with its machine"
    assert failure in found["failure"], found["failure"]
    assert f"(Ray node {found['killed'][:8]})" in found["text"], found["text"]
    folder = tmp_path / "run"
    for event in events(folder, "broadcast_group"):
        assert event["members"] == ["trainer", "rollout0"], event
    assert len(events(folder, "broadcast_group")) == 2  # of the run, and of the resumed one
    own = ("async/", "staleness/")
    # memory apart: both machines are this one, where their first devices share one account
    of_run = [
        {k: v for k, v in row.items() if not k.startswith(own)} for row in learned(folder)
    ]
    assert of_run == learned(undisturbed)
    assert weights(tmp_path / "run") == weights(undisturbed)


def test_the_newest_checkpoint_is_damaged(undisturbed, tmp_path):
    "The one before it is taken, the event says why, and the result is the same"
    shutil.copytree(undisturbed, tmp_path / "run", symlinks=True)
    for step in (STEPS, STEPS - 1):
        state = tmp_path / "run" / "checkpoints" / f"step_{step:06d}" / "state"
        victim = next(state.glob("__0_*.distcp"))
        victim.write_bytes(victim.read_bytes()[:-7])
    run(configure(tmp_path, "run", resume=True))
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert events.count("checkpoint_skipped") == 2 and '"truncated"' in events
    assert rows(tmp_path / "run") == rows(undisturbed)
    assert driven(tmp_path / "run") == list(range(1, STEPS + 1))
    assert len(load_spans(tmp_path / "run" / "truncated" / "001" / "spans.jsonl")) > 2
    moved = {
        path.name for path in (tmp_path / "run" / "truncated" / "001").glob("step_*[0-9]")
    }
    assert moved == {f"step_{step:06d}" for step in (STEPS, STEPS - 1)}
    assert weights(tmp_path / "run") == weights(undisturbed)


def test_other_settings_are_refused_before_anything_is_touched(undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    driver = Driver(
        configure(tmp_path, "run", resume=True, **{"algorithm.clip_ratio_high": 0.3})
    )
    assert driver.end() != 0 and "algorithm.clip_ratio_high 0.28 -> 0.3" in driver.text()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_ungradable_labels_stay_ungradable(tmp_path):
    "A resumed run does not wait for them again: each is reported once"
    more = {
        "reward.scorers": {"run_driver:hangs": 1.0},
        "reward.correct_threshold": {},
        "reward.timeout_s": 0.3,
        "data.eval_prompts": 2,
        **ONE_DEVICE,
    }
    for steps in (1, 2):
        run(configure(tmp_path, "run", resume=steps > 1, steps=steps, **more))
    ungradable = [event["label"] for event in events(tmp_path / "run", "label_ungradable")]
    assert ungradable and len(set(ungradable)) == len(ungradable), ungradable
    # the run has grown: whatever reads the folder speaks of two steps
    assert dict(run_result(tmp_path / "run"))["steps"].startswith("2 of 2")
    assert RunFolder.open(tmp_path / "run").config().num_steps == 2
    (changed,) = events(tmp_path / "run", "settings_changed")
    assert changed["changed"] == {"num_steps": [1, 2]}
