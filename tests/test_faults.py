"""Roles that die or hang in the middle of a run: it goes on by itself, with the numbers of a run that nobody disturbed."""

import json
import os
import signal
from pathlib import Path

import pytest
from whole_runs import STEPS, Driver, configure, rows, wait_for, weights

pytestmark = pytest.mark.slow


def events(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "events.jsonl").read_text().splitlines() if (folder / "events.jsonl").exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def disturbed(root: Path, victim: str, how: signal.Signals, **settings) -> tuple[int, Driver]:
    "A run in which a signal meets one process after the second step; its exit code"
    driver = Driver(configure(root, "run", **settings))
    assert driver.started.wait(600) and driver.pids, driver.text()
    wait_for(lambda: (root / "run" / "checkpoints" / "step_000001").exists(), driver)
    os.kill(driver.pids[victim][0], how)
    return driver.end(), driver


def same(folder: Path, undisturbed: Path) -> bool:
    """The same learning. Memory is left out: processes that came later start with other caches."""

    def learned(path):
        return [{k: v for k, v in row.items() if not k.startswith("memory/")} for row in rows(path)]

    return learned(folder) == learned(undisturbed) and weights(folder) == weights(undisturbed)


@pytest.mark.parametrize("victim", ["engine", "trainer"])
def test_a_dead_role_is_started_again(undisturbed, tmp_path, victim):
    code, driver = disturbed(tmp_path, victim, signal.SIGKILL)
    assert code == 0, driver.text()
    (restart,) = events(tmp_path / "run", "restart")
    assert restart.get("trainer", False) == (victim == "trainer")
    assert "the process died" in events(tmp_path / "run", "failure")[0]["error"]
    assert same(tmp_path / "run", undisturbed)


def test_a_role_that_no_longer_answers_is_found_within_its_deadline(undisturbed, tmp_path):
    code, driver = disturbed(tmp_path, "engine", signal.SIGSTOP, **{"placement.call_timeout_s": 45})
    assert code == 0, driver.text()
    assert "did not return within 45 s" in events(tmp_path / "run", "failure")[0]["error"]
    assert same(tmp_path / "run", undisturbed)


def test_a_rollout_may_go_on_without_the_groups_of_a_dead_engine(tmp_path):
    code, driver = disturbed(tmp_path, "engine", signal.SIGKILL, **{"faults.min_groups": 0.5})
    assert code == 0, driver.text()
    folder = tmp_path / "run"
    assert len(rows(folder)) == STEPS + 1 and events(folder, "restart")
    dropped = events(folder, "groups_dropped")
    short = [r for f in sorted((folder / "samples").glob("*.jsonl")) if (r := len(f.read_text().splitlines())) < 16]
    assert len(dropped) == len(short) <= 1, "a kill between rollouts drops nothing; one inside a rollout drops half of it"
    assert all(event["kept"] == 2 and event["groups"] == 4 for event in dropped)


def test_the_policy_can_be_to_fail(tmp_path):
    code, driver = disturbed(tmp_path, "trainer", signal.SIGKILL, **{"faults.on_failure": "fail"})
    assert code != 0 and "trainer rank 0 of 2" in driver.text() and "process died" in driver.text()
    assert events(tmp_path / "run", "failure") and not events(tmp_path / "run", "restart")
