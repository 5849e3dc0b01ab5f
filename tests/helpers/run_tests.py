"""`make test`: style and the fast tests, with the processor seconds of all their processes.

Every process that the tests start, and what those leave behind, is a descendant of this one and is
waited for by it, so that the kernel adds up their processor time. Its unit is a loop of pure
Python, measured on the same machine before and after: a slow machine counts as a fast one does.
"""

import ctypes
import os
import resource
import subprocess
import sys
import time
from xml.etree import ElementTree

from budgets import BUDGETS
from opt_in import LANES
from places import ROOT

PR_SET_CHILD_SUBREAPER = 36
UNIT = "TEST_LOOPS"  # in the table of budgets
MINUTES = 10.0  # of `make test`, on the machine of the lanes' record
MOST = 1.25  # times the budget: what a busy machine adds to processor time


def loop_seconds() -> float:
    "Return the processor seconds of 20 million additions, the best of three"
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        for number in range(20_000_000):
            number + 1
        best = min(best, time.process_time() - began)
    return best


def run_and_reap(command: list[str]) -> int:
    "Run a command, and wait for whatever ends meanwhile; return its exit code"
    started = subprocess.Popen(command, cwd=ROOT)
    while True:
        pid, status = os.wait()
        if pid == started.pid:
            started.returncode = os.waitstatus_to_exitcode(status)
            return started.returncode


def processor_seconds() -> float:
    "Return what all processes have used that were waited for"
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def outcome(report: str) -> str:
    "Return the counts of a JUnit file: 'N passed, N failed, N skipped'"
    counts = ElementTree.parse(report).find("testsuite").attrib
    total, skipped = int(counts["tests"]), int(counts["skipped"])
    failed = int(counts["failures"]) + int(counts["errors"])
    return f"{total - failed - skipped} passed, {failed} failed, {skipped} skipped"


def minutes(seconds: float) -> str:
    "Return a duration as people say it: 9 min 40 s"
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def left_out() -> str:
    "Return what `make test-all` runs besides, with its duration on the machine of the record"
    total = sum(lane.minutes for lane in LANES)
    names = ", ".join(f"{lane.name} {lane.minutes}" for lane in LANES)
    return f"make test-all runs besides, in about {total} minutes: {names}"


def main(arguments: list[str]) -> int:
    "Run style, then pytest; print the figures; return the exit code"
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    began, unit = time.monotonic(), loop_seconds()
    report = ROOT / "build" / "tests.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    code = run_and_reap(["make", "--no-print-directory", "style"])
    if code == 0:
        pytest = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
        code = run_and_reap(pytest)
    used, wall = processor_seconds(), time.monotonic() - began
    unit = (unit + loop_seconds()) / 2
    loops, allowed = used / unit, BUDGETS[UNIT]
    counts = outcome(str(report)) if report.exists() else "style failed: no test ran"
    (ROOT / "build" / "pace").write_text(f"{wall / 60 / MINUTES:.2f}\n")
    print(left_out())
    print(
        f"make test: {counts} in {minutes(wall)}; {used:.0f} processor seconds of all processes, "
        f"{loops:.0f} times a loop of {unit:.2f} s (budget {allowed})"
    )
    if code == 0 and loops > MOST * allowed:
        print(
            f"over the budget of {allowed}: see tests/helpers/budgets.py", file=sys.stderr
        )
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
