"""Roles that die, hang or compute nonsense in the middle of a run: it goes on by itself where it may, and
says why where not.
"""

import shutil
from pathlib import Path

import pytest
from whole_runs import (
    STEPS,
    Driver,
    configure,
    events,
    forget_last_step,
    learned,
    rows,
    weights,
)

from cookbook_npu.runs.checkpoints import Checkpoints
from cookbook_npu.runs.folder import RunFolder

pytestmark = pytest.mark.lane("runs")


def disturbed(
    root: Path, faults: str, lasting: bool = False, **settings
) -> tuple[Driver, Path]:
    "A run whose devices fail as told, after its end; its folder"
    driver = Driver(configure(root, "run", **settings), faults, lasting=lasting)
    driver.end()
    return driver, root / "run"


def test_whatever_is_lost_is_started_again(undisturbed, tmp_path):
    "An engine dies, one hangs, a collective hangs, no checkpoint: the numbers are those of a quiet run"
    faults = "rollout0/generate#3/die; rollout1/generate#5/stall; "
    faults += "trainer/1/train#4/hang:all_reduce"
    settings = {"faults.hang_timeout_s": 15, "train.save_every": 0}
    driver, folder = disturbed(tmp_path, faults, **settings)
    assert driver.end() == 0, driver.text()
    workers = {line.split(":")[0] for line in driver.pids["status"]}
    assert workers == {
        "trainer rank 0",
        "trainer rank 1",
        "rollout0 rank 0",
        "rollout1 rank 0",
    }
    failures, restarts = events(folder, "failure"), events(folder, "restart")
    told = [
        "rollout0 rank 0 of 1: generate(): the process died",
        "rollout1 rank 0 of 1: generate() made no progress for 15 s",
        "trainer rank 0 of 2: train() made no progress for 15 s (late ranks: 0, 1)",
    ]
    assert all(
        words in failure["error"] for words, failure in zip(told, failures, strict=True)
    ), failures
    assert [(e.get("trainer", False), e["engines"]) for e in restarts] == [
        (False, [0]),
        (False, [1]),
        (True, []),
    ]
    assert [e["step"] for e in events(folder, "truncated")] == [0]
    assert [row["step"] for row in rows(folder / "truncated" / "001")] == [0, 1, 2, 3]
    hung = "\n".join(failures[1]["notes"])
    assert (
        "rollout1 rank 0: generate() for" in hung
        and "trainer rank 1: idle" in hung
        and "in stall" in hung
    )
    stacks = "\n".join(failures[2]["notes"])
    assert "trainer rank 1: train() for" in stacks and "where they wait" in stacks
    assert learned(folder) == learned(undisturbed)
    assert weights(folder) == weights(undisturbed)
    assert not list(Path("/dev/shm").glob(f"cookbook_npu_*cbn{driver.process.pid}x*")), (
        "tables of simulated devices outlive the run"
    )


def test_a_run_goes_on_without_what_it_may_leave_out(tmp_path):
    "The groups of a dead engine, an optimizer step that is not finite; and a slow rank is waited for"
    faults = "rollout0/generate#3/die; trainer/0/train#3/nan:3; trainer/1/slow:0.01"
    driver, folder = disturbed(
        tmp_path, faults, **{"faults.min_groups": 0.5, "faults.nonfinite": "skip"}
    )
    assert driver.end() == 0, driver.text()
    assert len(rows(folder)) == STEPS + 1 and [
        e.get("trainer", False) for e in events(folder, "restart")
    ] == [False]
    assert [(e["kept"], e["groups"]) for e in events(folder, "groups_dropped")] == [(2, 4)]
    assert [
        len(f.read_text().splitlines())
        for f in sorted((folder / "samples").glob("step_*.jsonl"))
    ] == [16, 8, 16, 16, 16, 16]
    (nan,) = events(folder, "not_finite")
    assert nan["step"] == 2 and Path(nan["samples"]).is_file()
    assert [row["step"] for row in rows(folder) if row.get("skipped_steps")] == [3]


def test_a_run_that_ends_says_why_and_can_be_resumed(tmp_path):
    "The policy is to fail: a lost device is named. Out of memory always ends a run: it says why"
    settings = {"faults.max_restarts": 0}
    driver, folder = disturbed(tmp_path, "trainer/1/train#2/lost:0", **settings)
    assert driver.end() != 0
    assert "npu:0 is lost" in driver.text(), driver.text()
    assert "faults.max_restarts is 0" in driver.text(), driver.text()
    assert events(folder, "failure") and not events(folder, "restart")

    driver, folder = disturbed(
        tmp_path, "trainer/0/train#2/oom:40", resume=True, **settings
    )
    assert driver.end() != 0
    assert (
        "ran out of simulated NPU memory" in driver.text() and "optimizer" in driver.text()
    ), driver.text()
    assert Checkpoints.of_run(RunFolder.open(folder)).newest_valid().step == 2 and [
        row["step"] for row in rows(folder)
    ] == [0, 1, 2]


@pytest.mark.parametrize("call", ["save_state", "load_state"])
def test_an_error_that_repeats_ends_the_run_at_once(undisturbed, tmp_path, call):
    "Each new trainer fails in the same call of the same step: the second time is the last of four"
    if call == "load_state":
        shutil.copytree(undisturbed, tmp_path / "run", symlinks=True)
        forget_last_step(tmp_path / "run")
    settings = {"resume": call == "load_state"}
    fault = f"trainer/1/{call}#1/lost:0"
    driver, folder = disturbed(tmp_path, fault, lasting=True, **settings)
    assert driver.end() != 0
    failures = events(folder, "failure")
    place = f"trainer rank 1 of 2: {call}() raised"
    assert [place in failure["error"] for failure in failures] == [True] * 2, failures
    assert "The same call raised the same error before" in driver.text(), driver.text()
    assert "npu:0 is lost" in driver.text(), driver.text()
    log = (folder / "logs" / "trainer-1.log").read_text()
    assert log.count("Traceback (most recent call last)") >= 2 and f"in {call}" in log
