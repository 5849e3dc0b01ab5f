"""Every test lane that `make test` leaves out, one after the other: `make test-all`.

Prints at the end which lane passed, failed or was skipped, and why; exits with 1 where one failed.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-rs")
SKIPPED = re.compile(r"^SKIPPED \[\d+\] (.+)$")


def always() -> str | None:
    "No reason to skip a lane"
    return None


def no_checkouts() -> str | None:
    "Why there is no upstream source to test against"
    folder = os.environ.get("COOKBOOK_UPSTREAM")
    if not folder:
        return "COOKBOOK_UPSTREAM names no folder of checkouts (nbs/testing/03_proof.ipynb)"
    return None if Path(folder).is_dir() else f"COOKBOOK_UPSTREAM={folder} does not exist"


def no_job_server() -> str | None:
    "Why Ray's job server cannot start"
    return None if find_spec("aiohttp_cors") else "pip install 'cookbook-npu[jobs]'"


@dataclass(frozen=True)
class Lane:
    "Tests that one command runs"

    name: str
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    why_not: Callable[[], str | None] = always  # None: it can run


LANES = (
    Lane("upstream", (*PYTEST, "tests/upstream"), why_not=no_checkouts),
    Lane(
        "kill-matrix",
        (*PYTEST, "tests/faults/test_recovery.py"),
        {"COOKBOOK_KILL_MATRIX": "all"},
    ),
    Lane(
        "random-kills",
        (*PYTEST, "tests/faults/test_resume.py", "tests/faults/test_async_faults.py"),
        {"COOKBOOK_KILL_POINTS": "20"},
    ),
    Lane(
        "dry-runs",
        (*PYTEST, "tests/unit/test_stacks.py"),
        {"COOKBOOK_DRY_RUN": "1"},
    ),
    Lane(
        "rehearsals",
        (*PYTEST, "tests/simulator/test_launch.py", "-k", "rehearsal"),
        {"COOKBOOK_REHEARSAL_DEVICES": "8", "COOKBOOK_LONG": "all"},
    ),
    Lane(
        "job-server",
        (*PYTEST, "tests/simulator/test_launch.py", "-k", "job_server"),
        {"COOKBOOK_JOB_SERVER": "1"},
        no_job_server,
    ),
    Lane(
        "verifiers",
        (*PYTEST, "tests/unit/test_verifiers.py"),
        {"COOKBOOK_VERIFIERS": "all"},
    ),
    Lane(
        "vllm-runs", (*PYTEST, "tests/recipes", "-k", "vllm"), {"COOKBOOK_VLLM_RUNS": "all"}
    ),
    Lane("long", (*PYTEST, "-n2", "--dist=loadfile", "-mlong"), {"COOKBOOK_LONG": "all"}),
    Lane(
        "tiny-models",
        (sys.executable, "tests/helpers/tiny_models.py", "--check", "arithmetic"),
    ),
    Lane("benchmarks", (*PYTEST, "tests/benchmarks"), {"COOKBOOK_BENCHMARKS": "all"}),
    Lane("stacks", ("make", "test-stacks")),
    Lane("npu-wheel", ("make", "test-npu-wheel")),
    Lane("910b", ("make", "test-910b")),
)


def run_lane(lane: Lane) -> tuple[int, set[str]]:
    "Exit code of a lane, whose output is printed, and the reasons of tests that were skipped"
    command = subprocess.Popen(
        lane.command,
        cwd=ROOT,
        env=os.environ | lane.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    reasons = set()
    assert command.stdout is not None
    for line in command.stdout:
        print(line, end="", flush=True)
        if found := SKIPPED.match(line.strip()):
            reasons.add(found[1])
    return command.wait(), reasons


def run_all(lanes: Iterable[Lane]) -> int:
    "Run lanes, print one line each and the skipped tests; 1: one failed"
    lines = []
    failed = False
    for lane in lanes:
        why = lane.why_not()
        if why:
            lines.append(f"{lane.name:14} skipped  {why}")
            continue
        print(f"== {lane.name}: {' '.join(lane.command)}", flush=True)
        began = time.monotonic()
        code, reasons = run_lane(lane)
        failed |= code != 0
        state = f"exit {code}" if code else "passed"
        lines.append(f"{lane.name:14} {state:8} {time.monotonic() - began:.0f} s")
        lines += [f"{'':14} skipped  {reason}" for reason in sorted(reasons)]
    print("\n".join(["", *lines]))
    return int(failed)


if __name__ == "__main__":
    wanted = sys.argv[1:]
    names = [lane.name for lane in LANES]
    if unknown := [name for name in wanted if name not in names]:
        sys.exit(f"no lane {', '.join(unknown)}; there are {', '.join(names)}")
    sys.exit(run_all(lane for lane in LANES if not wanted or lane.name in wanted))
