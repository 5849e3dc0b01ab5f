"""Each role is killed in each phase of a run, with checkpoints seldom or never: the run ends like an
undisturbed one, by itself or resumed, and nothing it wrote is lost.

A few cells of the table meet each role, each phase and each `save_every`; the variable COOKBOOK_KILL_MATRIX
asks for others: `all` of them, 105, or those it names, `trainer1-train-0,raylet-save-2`.
"""

import json
import os
import shutil
from itertools import product
from pathlib import Path

import psutil
import pytest
from whole_runs import (
    STEPS,
    Driver,
    configure,
    events,
    learned,
    living,
    prompts,
    run,
    weights,
)

pytestmark = pytest.mark.slow

VICTIMS = {
    "driver": ("driver", 0),
    "trainer0": ("trainer", 0),
    "trainer1": ("trainer", 1),
    "engine": ("engine", 0),
    "raylet": ("raylet", 0),
}
PHASES = ("start", "rollout", "logprobs", "train", "save", "update_weights", "eval")
SAVE_EVERY = (0, 2, 5)
CHOSEN = (
    "driver-save-2",
    "trainer0-update_weights-0",
    "trainer1-train-5",
    "trainer1-logprobs-2",
    "engine-eval-0",
    "engine-start-5",
    "raylet-rollout-2",
)
ALL = ["-".join(map(str, cell)) for cell in product(VICTIMS, PHASES, SAVE_EVERY)]


def cells() -> list[str]:
    "The cells to run"
    wanted = os.environ.get("COOKBOOK_KILL_MATRIX", "")
    named = ALL if wanted == "all" else [cell for cell in wanted.split(",") if cell]
    unknown = set(named) - set(ALL)
    assert not unknown, f"COOKBOOK_KILL_MATRIX: no cells {sorted(unknown)}"
    return named or list(CHOSEN)


def rows_before(phase: str, save_every: int) -> int:
    "The last step in metrics.jsonl when the blow falls; -1: none"
    if phase == "start":
        return -1
    if phase == "save":
        return {0: STEPS - 1, 2: 3, 5: 4}[save_every]  # the step whose end is saved
    # under 2 and 5 a checkpoint is there by then
    return {0: 3, 2: 3, 5: 5}[save_every]


def blow(cell: str) -> list:
    "What `run_driver.Strike` is told"
    victim, phase, save_every = cell.split("-")
    return [*VICTIMS[victim], phase, rows_before(phase, int(save_every))]


def struck(root: Path, *cells: str, **settings) -> tuple[Driver, list[dict]]:
    "A run in which processes are killed, after its end, and what was met"
    save_every = int(cells[0].split("-")[2])
    plan = {"blows": [blow(cell) for cell in cells], "record": str(root / "met.json")}
    (root / "strike.json").write_text(json.dumps(plan))
    config = configure(root, "run", **{"train.save_every": save_every, **settings})
    # a call is short: a busy machine may strike when it has just returned
    for _ in range(4):
        shutil.rmtree(root / "run", ignore_errors=True)
        (root / "met.json").unlink(missing_ok=True)
        driver = Driver(config, strike=root / "strike.json")
        driver.end()
        assert (root / "met.json").exists(), f"the moment never came:\n{driver.text()}"
        met = json.loads((root / "met.json").read_text())
        assert len(met) == len(cells), f"only {len(met)} moments came:\n{driver.text()}"
        if all(one["under_way"] for one in met):
            break
    for one, planned in zip(met, plan["blows"], strict=True):
        found = [one["role"], one["rank"], one["phase"], one["logged"]]
        assert found == planned, (found, planned)
        assert one["under_way"], f"{one['call']}() had returned when the blow fell"
    return driver, met


def written(folder: Path) -> tuple[list[dict], set[tuple[str, str]]]:
    "All rows and samples of a run folder, those that were moved aside included"
    rows = []
    for file in (folder / "metrics.jsonl", *folder.glob("cut/*/metrics.jsonl")):
        if file.exists():
            rows += [json.loads(line) for line in file.read_text().splitlines()]
    samples = set()
    for file in (*folder.glob("samples/step_*"), *folder.glob("cut/*/step_*")):
        samples.add((file.name, file.read_text()))
    return rows, samples


def check_nothing_lost(folder: Path, met: dict) -> None:
    "Every row and every sample that was there when the blow fell is there still"
    rows, samples = written(folder)
    for line in met["metrics"].splitlines():
        assert json.loads(line) in rows, line[:100]
    lost = set(met["samples"].items()) - samples
    assert not lost, sorted(name for name, _ in lost)


def check_equal(folder: Path, undisturbed: Path) -> None:
    "The run ended as if nothing had happened"
    assert learned(folder) == learned(undisturbed)
    assert prompts(folder) == prompts(undisturbed)
    assert weights(folder) == weights(undisturbed)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", cells())
def test_whoever_falls_whenever_the_run_ends_as_if_nothing_had_happened(
    undisturbed, tmp_path, cell
):
    folder = tmp_path / "run"
    driver, (met,) = struck(tmp_path, cell)
    check_nothing_lost(folder, met)
    if met["role"] in ("driver", "raylet"):
        assert driver.end() != 0
        _, left = psutil.wait_procs(living(met["below"]), timeout=150)
        assert not left, f"processes that outlive their run: {left}"
        assert (folder / "metrics.jsonl").exists() == bool(met["metrics"])
        save_every = int(cell.split("-")[2])
        run(configure(tmp_path, "run", resume=True, **{"train.save_every": save_every}))
        check_nothing_lost(folder, met)
    else:
        assert driver.end() == 0, driver.text()
        assert len(events(folder, "restart")) == 1, events(folder, "restart")
    check_equal(folder, undisturbed)


@pytest.mark.timeout(900)
def test_a_second_fall_on_the_way_back_leaves_the_run_as_it_was(tmp_path):
    "The new trainer falls when it sends its first weights: the run ends, says why, and has cut nothing"
    driver, (first, second) = struck(
        tmp_path,
        "trainer1-train-0",
        "trainer1-update_weights-0",
        **{"faults.max_restarts": 1},
    )
    folder = tmp_path / "run"
    assert driver.end() != 0
    assert "failure 2, faults.max_restarts is 1" in driver.text(), driver.text()
    assert first["metrics"] and second["metrics"] == first["metrics"]
    assert (folder / "metrics.jsonl").read_text() == first["metrics"]
    assert not (folder / "cut").exists()
    assert not events(folder, "truncated") and not events(folder, "restart")
