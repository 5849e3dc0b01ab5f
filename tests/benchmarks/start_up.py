"""What a run costs before its first step and after its last one:
`python tests/benchmarks/start_up.py [--steps 40] [--rounds 1] [--fresh]`

The command `cookbook-npu run qwen3_4b_colocate` at laptop scale (simulated NPU): an
unmeasured run of one step comes first. Each worker says in its log how much processor time it took until it
was ready; the wall times are those at which the command printed its lines.
`--fresh` also measures workers that are fresh interpreters (COOKBOOK_NPU_PRELOAD=0), in pairs.
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from options import option_parser

READY = re.compile(r"ready after ([\d.]+) CPU s: (.*), (\d+) modules")
STEP = re.compile(r"^step +(\d+)/")


def command(root: Path, name: str, steps: int) -> list[str]:
    "The command of a run"
    overrides = json.dumps({"output.root": str(root), "output.name": name})
    run = ["-m", "cookbook_npu.cli", "run", "qwen3_4b_colocate"]
    return [
        sys.executable,
        *run,
        "-p",
        "num_steps",
        str(steps),
        "-p",
        "overrides",
        overrides,
    ]


def children_cpu_s() -> float:
    "Processor time of the children of this process that have ended, and of theirs"
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ready_lines(folder: Path) -> dict[str, tuple[float, str, int]]:
    "Processor time, way of starting and modules of each worker"
    found = {}
    for log in sorted((folder / "logs").glob("*.log")):
        said = READY.search(log.read_text(errors="replace"))
        if said:
            found[log.stem] = (float(said[1]), said[2], int(said[3]))
    return found


def seconds_in_steps(folder: Path) -> float:
    "Sum of the steps, without the evaluations between them"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return sum(json.loads(line).get("time/step", 0.0) for line in lines)


def measure(root: Path, name: str, steps: int, env: dict[str, str]) -> dict[str, float]:
    "One run, in seconds"
    before = children_cpu_s()
    began = time.monotonic()
    times = []
    process = subprocess.Popen(
        command(root, name, steps), env=env, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if STEP.match(line):
            times.append(time.monotonic())
    code = process.wait()
    ended = time.monotonic()
    assert not code, f"the run ended with {code}"
    workers = ready_lines(root / name)
    for worker, (cpu, how, modules) in workers.items():
        print(f"    {worker:12} ready after {cpu:5.1f} CPU s, {how}, {modules} modules")
    in_steps = seconds_in_steps(root / name)
    return {
        "trainer_cpu_s": max(cpu for w, (cpu, *_) in workers.items() if "trainer" in w),
        "engine_cpu_s": max(cpu for w, (cpu, *_) in workers.items() if "rollout" in w),
        "until_first_line_s": times[0] - began,
        "after_last_step_s": ended - times[-1],
        "in_steps_s": in_steps,
        "command_s": ended - began,
        "command_over_steps": (ended - began) / in_steps,
        "command_cpu_s": children_cpu_s() - before,
    }


def show(kind: str, rounds: list[dict[str, float]]) -> None:
    "Print the medians of some rounds"
    print(f"{kind}, median of {len(rounds)} (simulated NPU, {os.cpu_count()} cores)")
    for name in rounds[0]:
        print(f"    {name:20} {median(r[name] for r in rounds):7.2f}")


def main() -> None:
    "Measure and print"
    parser = option_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="also workers without forks")
    parser.add_argument(
        "--no-warm-up", action="store_true", help="the first run is measured, too"
    )
    args = parser.parse_args()
    kinds = {"forks": {"COOKBOOK_NPU_PRELOAD": "1"}}
    if args.fresh:
        kinds["fresh interpreters"] = {"COOKBOOK_NPU_PRELOAD": "0"}
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if not args.no_warm_up:
            measure(root, "warm", 1, dict(os.environ))
        for number in range(args.rounds):
            for place, (kind, more) in enumerate(kinds.items()):
                name = f"run{number}-{place}"
                found[kind].append(measure(root, name, args.steps, os.environ | more))
    for kind, rounds in found.items():
        show(kind, rounds)


if __name__ == "__main__":
    main()
