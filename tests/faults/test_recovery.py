"""Each role is killed in each phase of a run, with checkpoints seldom or never: the run ends like an
undisturbed one, by itself or resumed, and nothing it wrote is lost.

A cell is a role, a phase and a `save_every`; several cells of one run are joined by a plus. A few of them
meet each role, each phase and each `save_every`. The variable COOKBOOK_KILL_MATRIX asks for others: `all`,
105 of them, or those it names, `trainer1-train-0,engine-start-2+raylet-save-2`.
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

VICTIMS = {
    "driver": ("driver", 0),
    "trainer0": ("trainer", 0),
    "trainer1": ("trainer", 1),
    "engine": ("engine", 0),
    "raylet": ("raylet", 0),
}
END_THE_RUN = ("driver", "raylet")  # started by the run itself, on one machine
# phases in the order in which their blows fall, see `rows_before`
PHASES = {
    0: ("start", "rollout", "logprobs", "train", "update_weights", "eval", "save"),
    2: ("start", "rollout", "logprobs", "train", "save", "update_weights", "eval"),
    5: ("start", "save", "rollout", "logprobs", "train", "update_weights", "eval"),
}
CHOSEN = (
    "trainer1-train-5",
    "engine-start-2+raylet-rollout-2+trainer1-logprobs-2+driver-save-2",
    "trainer0-update_weights-0+engine-eval-0",
)


# so that the log-probs are a phase of every step, and that a blow finds generate under way
TWO_OPTIMIZER_STEPS = {"train.global_batch_size": 8, "rollout.simulated_latency": 0.02}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    "The folder of a run that nothing befalls"
    root = tmp_path_factory.mktemp("undisturbed")
    run(configure(root, "run", **TWO_OPTIMIZER_STEPS))
    return root / "run"


def runs_of(save_every: int) -> list[str]:
    "Runs that meet every role in every phase"
    phases = PHASES[save_every]
    runs = []
    for first in range(len(phases)):
        three = []
        for i, role in enumerate(("trainer0", "trainer1", "engine")):
            place = (first + 2 * i) % len(phases)
            three.append((place, f"{role}-{phases[place]}-{save_every}"))
        runs.append("+".join(cell for _, cell in sorted(three)))
    for role in END_THE_RUN:
        runs.append("+".join(f"{role}-{phase}-{save_every}" for phase in phases))
    return runs


def selected() -> list:
    "The runs to make"
    wanted = os.environ.get("COOKBOOK_KILL_MATRIX", "")
    everything = [cells for save_every in PHASES for cells in runs_of(save_every)]
    known = {f"{r}-{p}-{s}" for r, s in product(VICTIMS, PHASES) for p in PHASES[s]}
    if wanted == "all":
        return everything
    named = [cells for cells in wanted.split(",") if cells]
    unknown = {cell for cells in named for cell in cells.split("+")} - known
    assert not unknown, f"COOKBOOK_KILL_MATRIX: no cells {sorted(unknown)}"
    first, *others = CHOSEN
    return named or [
        first,
        *(pytest.param(one, marks=pytest.mark.lane("runs")) for one in others),
    ]


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


def strike(root: Path, cells: list[str], **settings) -> tuple[Driver, list[dict]]:
    "A run in which processes are killed, after its end, and what was met"
    plan = {"blows": [blow(cell) for cell in cells], "record": str(root / "met.json")}
    (root / "strike.json").write_text(json.dumps(plan))
    (root / "met.json").unlink(missing_ok=True)
    config = configure(
        root, "run", **{"train.save_every": int(cells[0].split("-")[2]), **settings}
    )
    driver = Driver(config, strike=root / "strike.json")
    driver.end()
    assert (root / "met.json").exists(), f"the moment never came:\n{driver.text()}"
    met = json.loads((root / "met.json").read_text())
    assert len(met) == len(cells), f"only {len(met)} moments came:\n{driver.text()}"
    for one, planned in zip(met, plan["blows"], strict=True):
        found = [one["role"], one["rank"], one["phase"], one["logged"]]
        assert found == planned, (found, planned)
    return driver, met


def struck(root: Path, cells: list[str], **settings) -> tuple[Driver, list[dict]]:
    "The same, again where a busy machine struck when a short call had just returned"
    folder, before = root / "run", root / "before"
    if folder.exists():
        shutil.copytree(folder, before, symlinks=True)
    for _ in range(4):
        driver, met = strike(root, cells, **settings)
        if all(one["under_way"] for one in met):
            break
        shutil.rmtree(folder)
        if before.exists():
            shutil.copytree(before, folder, symlinks=True)
    for one in met:
        assert one["under_way"], f"{one['call']}() had returned when the blow fell"
    shutil.rmtree(before, ignore_errors=True)
    return driver, met


def written(folder: Path) -> tuple[list[dict], set[tuple[str, str]]]:
    "All rows and samples of a run folder, those that were moved aside included"
    rows = []
    for file in (folder / "metrics.jsonl", *folder.glob("truncated/*/metrics.jsonl")):
        if file.exists():
            rows += [json.loads(line) for line in file.read_text().splitlines()]
    samples = set()
    for file in (*folder.glob("samples/step_*"), *folder.glob("truncated/*/step_*")):
        samples.add((file.name, file.read_text()))
    return rows, samples


def check_nothing_lost(folder: Path, met: dict) -> None:
    "Every row and every sample that was there when the blow fell is there still"
    rows, samples = written(folder)
    for line in met["metrics"].splitlines():
        assert json.loads(line) in rows, line[:100]
    lost = set(met["samples"].items()) - samples
    assert not lost, sorted(name for name, _ in lost)


def check_ended(folder: Path, driver: Driver, met: dict) -> None:
    "The run is over, nothing of it lives, and its folder holds what it held when the blow fell"
    assert driver.end() != 0
    if met["role"] == "raylet":
        assert "resume with: cookbook-npu run --resume" in driver.text(), driver.text()
    _, left = psutil.wait_procs(living(met["below"]), timeout=400)
    assert not left, f"processes that outlive their run: {left}"
    kept = folder / "metrics.jsonl"
    assert (kept.read_text() if kept.exists() else "").startswith(met["metrics"])
    check_nothing_lost(folder, met)


def sessions(cells: list[str]) -> list[list[str]]:
    "The blows of each process that drives the run; after a fatal one there is another process"
    parts = [[]]
    for cell in cells:
        parts[-1].append(cell)
        if cell.startswith(END_THE_RUN):
            parts.append([])
    return parts


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("cells", selected())
def test_whoever_falls_whenever_the_run_ends_as_if_nothing_had_happened(
    undisturbed, tmp_path, cells
):
    folder = tmp_path / "run"
    save_every = {"train.save_every": int(cells.split("-")[-1])}
    settings = save_every | TWO_OPTIMIZER_STEPS
    everything = []
    for part in sessions(cells.split("+")):
        resume = bool(everything)
        if not part:
            run(configure(tmp_path, "run", resume=resume, **settings))
            continue
        driver, met = struck(tmp_path, part, resume=resume, **TWO_OPTIMIZER_STEPS)
        everything += met
        if met[-1]["role"] in END_THE_RUN:
            check_ended(folder, driver, met[-1])
        else:
            assert driver.end() == 0, driver.text()
    for one in everything:
        check_nothing_lost(folder, one)
    alone = [one for one in everything if one["role"] not in END_THE_RUN]
    assert len(events(folder, "restart")) == len(alone)
    assert learned(folder) == learned(undisturbed)
    assert prompts(folder) == prompts(undisturbed)
    assert weights(folder) == weights(undisturbed)


@pytest.mark.lane("runs")
@pytest.mark.timeout(900)
def test_a_second_fall_on_the_way_back_leaves_the_run_as_it_was(tmp_path):
    "The new trainer falls when it sends its first weights: the run ends, says why, and has cut nothing"
    driver, (first, second) = struck(
        tmp_path,
        ["trainer1-train-0", "trainer1-way_back-0"],
        **{"faults.max_restarts": 1},
    )
    folder = tmp_path / "run"
    assert driver.end() != 0
    assert "failure 2 within 100 steps, faults.max_restarts is 1" in driver.text(), (
        driver.text()
    )
    assert first["metrics"] and second["metrics"] == first["metrics"]
    assert (folder / "metrics.jsonl").read_text() == first["metrics"]
    assert not (folder / "truncated").exists()
    assert not events(folder, "truncated") and not events(folder, "restart")
