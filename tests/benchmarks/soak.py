"""Does a long run keep its size? `python tests/benchmarks/soak.py [--steps 200] [--engine transformers]`

A run at laptop scale (simulated NPU) with checkpoints, evaluations and weight updates, watched after every
step: host memory of every process, device memory, open files, sockets, threads, processes, shared
memory. For each it fits a line over the steps after the first third (caches fill until then) and prints
a table. Exits with 1 when something grows by more than its noise (three standard deviations around the
line) and more than a floor, when the host memory of a process of the run leaves a band of 1 % after step
100, or when anything is left when the run has ended.
"""

import json
import os
import re
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import psutil
from options import option_parser

from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.train.session import session

FLOORS = {
    "rss MiB": 4.0,
    "device MiB": 0.5,
    "fds": 2,
    "sockets": 2,
    "threads": 2,
    "processes": 0.5,
    "/dev/shm": 0.5,
}
SHM = Path("/dev/shm")
SETTLED = 100  # steps until caches are full
# its 16 samples of a step are all right once the task is learned
NO_FAULTS = ("zero_advantages",)
BAND = 0.01  # of host memory, afterwards


def configuration(root: str, steps: int, engine: str):
    "A small run that does everything a long one does"
    overrides = {
        "output.root": root,
        "output.name": "soak",
        "train.save_every": 10,
        "rollout.eval_every": 20,
        "data.eval_prompts": 8,
        "reward.scorers": {"math": 0.5, "exact": 0.5},
    }
    return qwen3_4b_colocate(
        num_steps=steps,
        prompts_per_step=4,
        samples_per_prompt=4,
        engine=engine,
        overrides=overrides,
    )


def segments(processes: dict[int, float]) -> list[str]:
    "Shared memory named after one of these processes (id -> start) and written since that started"
    found = []
    for path in SHM.iterdir():
        starts = [
            processes[pid]
            for n in re.findall(r"\d+", path.name)
            if (pid := int(n)) in processes
        ]
        # ids are used again: an older segment belongs to an earlier process of that id
        if starts and path.stat().st_mtime >= min(starts) - 1:
            found.append(path.name)
    return found


def is_server(process: psutil.Process) -> bool:
    "Whether workers are forked from it: it ends with this process, or with the tests"
    try:
        words = process.cmdline()
    except (
        psutil.NoSuchProcess
    ):  # it has ended; one that nobody waited for still has a name
        return False
    return any("fork_server" in word for word in words)


class Watcher:
    "Measures the processes of a run"

    def __init__(self, run):
        roles = {
            f"{g.name} {rank}": pid
            for g in run.state.workers.cluster.worker_groups
            for rank, pid in enumerate(g.pids)
        }
        self.named = {"driver": os.getpid(), **roles}
        self.series: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.seen: dict[int, float] = {}  # process id -> start, seconds since the epoch

    def look(self, row: dict) -> None:
        "One measurement of everything"
        everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
        below = {p.pid for p in everyone}
        # a worker may be the fork of a server that is not below this process
        everyone += [psutil.Process(pid) for pid in self.named.values() if pid not in below]
        self.seen |= {p.pid: p.create_time() for p in everyone}
        name_of = {pid: name for name, pid in self.named.items()}
        for process in everyone:
            if name := name_of.get(process.pid) or {
                "raylet": "raylet",
                "gcs_server": "gcs",
            }.get(process.name()):
                self.measure(name, process)
        self.series["all", "processes"].append(len(everyone))
        self.series["all", "/dev/shm"].append(len(segments(self.seen)))
        for key, value in row.items():
            if key.startswith("memory/") and "free" not in key:
                self.series[key.removeprefix("memory/"), "device MiB"].append(value / 2**20)

    def left(self) -> list[str]:
        "What is there after the run: processes, and shared memory"
        below = psutil.Process().children(recursive=True)
        found = [process.name() for process in below if not is_server(process)]
        for name, pid in self.named.items():
            if name != "driver" and psutil.pid_exists(pid):
                found.append(name)
        return found + segments(self.seen)

    def measure(self, name: str, process: psutil.Process) -> None:
        "Memory, files, sockets and threads of one process"
        with process.oneshot():
            self.series[name, "rss MiB"].append(process.memory_info().rss / 2**20)
            self.series[name, "fds"].append(process.num_fds())
            self.series[name, "threads"].append(process.num_threads())
        self.series[name, "sockets"].append(len(process.net_connections("all")))


def trend(values: list[float]) -> tuple[float, float, float, float]:
    "(first, last, growth along the fitted line, standard deviation around it) after the first third"
    steady = np.array(values[len(values) // 3 :], dtype=float)
    steps = np.arange(len(steady))
    slope, start = np.polyfit(steps, steady, 1)
    return (
        steady[0],
        steady[-1],
        slope * (len(steady) - 1),
        float(np.std(steady - (slope * steps + start))),
    )


def report(watcher: Watcher) -> list[str]:
    "Print the table; what grows"
    grows = []
    print(
        f"{'what':22} {'of':16} {'first':>9} {'last':>9} {'per step':>10} {'growth':>9} {'noise':>8}"
    )
    for (name, kind), values in sorted(
        watcher.series.items(), key=lambda item: (item[0][1], item[0][0])
    ):
        first, last, growth, noise = trend(values)
        bad = bool(growth > max(FLOORS[kind], 3 * noise))
        per_step = growth / max(1, len(values) - len(values) // 3 - 1)
        print(
            f"{kind:22} {name:16} {first:9.1f} {last:9.1f} {per_step:10.4f} "
            f"{growth:9.2f} {noise:8.2f} {'GROWS' if bad else ''}"
        )
        grows += [f"{kind} of {name} grew by {growth:.1f}"] * bad
    return grows


def unsettled(watcher: Watcher) -> list[str]:
    "Print the host memory of every process of the run at eleven steps; which leave the band"
    wrong = []
    print(f"\n{'rss MiB at step':22}", end="")
    count = len(watcher.series["all", "processes"])
    steps = np.linspace(0, count - 1, 11).astype(int)
    print(*(f"{step:7}" for step in steps))
    for name in watcher.named:
        values = watcher.series[name, "rss MiB"]
        print(f"{name:22}", *(f"{values[step]:7.1f}" for step in steps))
        settled = values[SETTLED:] or values[-1:]
        spread = (max(settled) - min(settled)) / max(settled)
        if spread > BAND:
            wrong.append(f"rss of {name} spreads over {spread:.1%} after step {SETTLED}")
    return wrong


def main() -> int:
    "Run, watch, judge"
    parser = option_parser(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--engine", default="transformers", choices=("transformers", "vllm")
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        with session(configuration(root, args.steps, args.engine)) as run:
            watcher = Watcher(run)
            for row in run.steps():
                watcher.look(row)
        left = watcher.left()
        events = Path(root, "soak", "events.jsonl")
        told = (
            [json.loads(line)["kind"] for line in events.read_text().splitlines()]
            if events.exists()
            else []
        )
    print(
        f"\n{args.steps} steps, simulated NPU, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; "
        f"events: {dict(Counter(told)) or 'none'}"
    )
    wrong = (
        report(watcher)
        + unsettled(watcher)
        + [f"left behind: {name}" for name in left]
        + [f"event: {kind}" for kind in told if kind not in NO_FAULTS]
    )
    print(*(wrong or ["nothing grows, nothing is left"]), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
