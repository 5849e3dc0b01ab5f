"""Every test lane that `make test` leaves out, one after the other: `make test-all`.

Prints at the end which lane passed, failed, was skipped or left out, and why; exits with 1 where one failed.
`--until SECONDS --pace FACTOR`: leave out what would last longer, on a machine that takes FACTOR times
the recorded minutes, and stop a lane at that time. `.ci/run` asks so; `build/pace` holds the factor.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-rs")
SKIPPED = re.compile(r"^SKIPPED \[\d+\] (.+)$")


def always() -> str | None:
    "No reason to skip a lane"
    return None


@dataclass(frozen=True)
class Lane:
    "Tests that one command runs"

    name: str
    minutes: float  # on two idle cores
    last: str  # date of the last whole run that passed
    command: tuple[str, ...] = ()  # none: pytest with the tests of this lane's mark
    env: dict[str, str] = field(default_factory=dict)
    why_not: Callable[[], str | None] = always  # None: it can run

    @property
    def words(self) -> tuple[str, ...]:
        "The command"
        return self.command or (*PYTEST, "-n2", "--dist=loadfile", f"--lane={self.name}")


NEVER = "never whole"  # a lane of 2026-11-28
# in the order of what they protect: CI runs them in this order as far as its time reaches
LANES = (
    Lane("npu-wheel", 4, "2026-11-30", ("make", "test-npu-wheel")),
    Lane("runs", 12, "2026-11-30"),
    Lane("devices", 8, "2026-11-30"),
    Lane("notebooks", 4, "2026-11-30"),
    Lane("docs", 1, "2026-11-30"),
    Lane("910b", 15, "2026-11-30", ("make", "test-910b")),
    Lane("packages", 2, "2026-11-30"),
    Lane("schedulers", 1, "2026-11-30"),
    Lane("vllm-runs", 4, "2026-11-30"),
    Lane("verifiers", 5, "2026-11-30", (*PYTEST, "tests/contrib")),
    Lane("benchmarks", 3, "2026-11-30"),
    Lane("stacks", 10, NEVER, ("make", "test-stacks")),
    Lane(
        "rehearsals",
        12,
        "2026-11-30",
        (*PYTEST, "tests/simulator/test_launch.py", "-k", "rehearsal"),
        {"COOKBOOK_REHEARSAL_DEVICES": "8"},
    ),
    Lane(
        "random-kills",
        20,
        "2026-11-30",
        (*PYTEST, "tests/faults/test_resume.py", "tests/faults/test_async_faults.py"),
        {"COOKBOOK_KILL_POINTS": "20"},
    ),
    Lane(
        "kill-matrix",
        15,
        "2026-11-30",
        (*PYTEST, "tests/faults/test_recovery.py"),
        {"COOKBOOK_KILL_MATRIX": "all"},
    ),
    Lane("upstream", 5, NEVER),
    Lane("real-model", 6, "2026-11-29"),
    Lane(
        "tiny-models",
        3,
        "2026-11-30",
        (sys.executable, "tests/helpers/tiny_models.py", "--check", "arithmetic"),
    ),
)


@dataclass
class Result:
    "How a lane ended"

    lane: Lane
    state: str  # passed, exit N, skipped, left out
    why: str
    skipped: set[str] = field(default_factory=set)  # reasons of its tests

    def lines(self) -> list[str]:
        "Return one line, and one for each reason of a skipped test"
        head = f"{self.lane.name:14} {self.state:9} {self.why}"
        return [head, *(f"{'':14} skipped   {why}" for why in sorted(self.skipped))]


def run_lane(lane: Lane, deadline: float) -> Result:
    "Run a lane until a moment of the monotonic clock; its output is printed"
    print(f"== {lane.name}: {' '.join(lane.words)}", flush=True)
    began = time.monotonic()
    command = subprocess.Popen(
        lane.words,
        cwd=ROOT,
        env=os.environ | lane.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        os.killpg(command.pid, signal.SIGTERM)

    watch = threading.Timer(min(deadline - began, threading.TIMEOUT_MAX), stop)
    watch.start()
    reasons = set()

    def show() -> None:
        for line in command.stdout or ():
            print(line, end="", flush=True)
            if found := SKIPPED.match(line.strip()):
                reasons.add(found[1])

    # a process that a stopped lane left behind may keep the pipe open
    reader = threading.Thread(target=show, daemon=True)
    reader.start()
    code = command.wait()
    reader.join(10)
    watch.cancel()
    took = f"{time.monotonic() - began:.0f} s"
    if stopped.is_set():
        return Result(lane, "left out", f"stopped after {took}: the time was over", reasons)
    return Result(lane, f"exit {code}" if code else "passed", took, reasons)


def run_all(
    lanes: Iterable[Lane],
    until: float = float("inf"),  # seconds from now
    pace: float = 1.0,  # times the recorded minutes
) -> int:
    "Run lanes as far as time reaches, print how each ended; 1: one failed"
    deadline = time.monotonic() + until
    results = []
    for lane in lanes:
        left, needed = deadline - time.monotonic(), lane.minutes * 60 * pace
        if why := lane.why_not():
            results.append(Result(lane, "skipped", why))
        elif needed > left:
            why = f"takes {needed / 60:.0f} minutes here, {max(left, 0) / 60:.0f} are left"
            results.append(Result(lane, "left out", f"{why}; last run {lane.last}"))
        else:
            results.append(run_lane(lane, deadline))
    print("\n".join(["", *(line for one in results for line in one.lines())]))
    return int(any(one.state.startswith("exit") for one in results))


def main() -> int:
    "Run the lanes of the command line, or all"
    by_name = {lane.name: lane for lane in LANES}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(by_name))
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--pace", type=float, default=1.0, help="times the minutes")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in by_name]:
        sys.exit(f"no lane {', '.join(unknown)}; there are {', '.join(by_name)}")
    lanes = [by_name[name] for name in asked.names] or LANES
    return run_all(lanes, asked.until, asked.pace)


if __name__ == "__main__":
    sys.exit(main())
