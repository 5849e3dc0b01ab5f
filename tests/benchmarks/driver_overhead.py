"""What the driver and its checkpoints cost:
`python tests/benchmarks/driver_overhead.py [--steps 14] [--record] [--profile]`

One run of the recipe at laptop scale (simulated NPU), its own numbers compared with each other.
*Between phases* is a step without its worker phases, the sum of the spans in its record; *driver alone*
is stricter, the part of a step in which no call on a worker is under way: requests, grading, batches,
records, serialization, metrics. The aims: under 1 % of a step between phases, driver alone under 2 ms for
a sample, and checkpoints at the laptop's default interval (one, at the end of 40 steps) under 2 % of the
time in steps, which is half of the whole command: 1 % of that.
"""

import argparse
import cProfile
import json
import os
import pstats
import sys
import tempfile
import time
from pathlib import Path

from options import option_parser

from cookbook_npu.cluster.worker_group import RayFuture, RayWorkerGroup
from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.runs.folder import append_line
from cookbook_npu.train.session import session

INTERVAL = 40
RECORD = Path(__file__).parents[2] / "nbs/tutorials/laptop_step.jsonl"


class Roles:
    "Seconds in which at least one call on a role was under way"

    def __init__(self):
        self.seconds, self.began, self.running = 0.0, 0.0, set()
        start, result = RayWorkerGroup._start_on, RayFuture.result

        def started(*args, **kwargs):
            call = start(*args, **kwargs)
            self.began = self.began if self.running else time.perf_counter()
            self.running.add(id(call))
            return call

        def ended(call, *args, **kwargs):
            try:
                return result(call, *args, **kwargs)
            finally:
                self.running.discard(id(call))
                self.seconds += 0.0 if self.running else time.perf_counter() - self.began

        RayWorkerGroup._start_on, RayFuture.result = started, ended

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def measure(
    steps: int, every: int, profile: cProfile.Profile, record: Path | None
) -> dict[str, float]:
    "Means over the steps after the first two, in seconds"
    roles, rows = Roles(), []
    with tempfile.TemporaryDirectory() as root:
        settings = {"output.root": root, "train.save_every": every, "rollout.eval_every": 0}
        with session(qwen3_4b_colocate(num_steps=steps, overrides=settings)) as run:
            roles.take()
            for number, row in enumerate(run.steps()):
                busy = roles.take()
                if number == 1:
                    profile.enable()
                if record:
                    kept = {
                        name: value
                        for name, value in row.items()
                        if name == "step" or name.startswith("time/")
                    }
                    append_line(record, kept | {"load": round(os.getloadavg()[0], 1)})
                if number > 1:
                    phases = sum(
                        v
                        for k, v in row.items()
                        if k.startswith("time/") and k != "time/step"
                    )
                    rows.append((row["time/step"], phases, busy, row.get("time/save", 0.0)))
            profile.disable()
        samples = run.state.config.rollout_batch
    step, phases, busy, save = (
        sum(column) / len(rows) for column in zip(*rows, strict=True)
    )
    return {
        "step": step,
        "between": step - phases,
        "alone": step - busy,
        "save": save,
        "samples": samples,
    }


def main() -> int:
    "Measure, print, compare with the aims"
    parser = option_parser(__doc__)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument(
        "--save-every",
        type=int,
        default=3,
        help="the cost of one checkpoint is spread over 40 steps",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="replace the timings that nbs/tutorials/where_the_seconds_go shows",
    )
    parser.add_argument(
        "--profile", action="store_true", help="also print where the driver's time goes"
    )
    args = parser.parse_args()
    profile = (
        cProfile.Profile()
        if args.profile
        else argparse.Namespace(enable=lambda: None, disable=lambda: None)
    )
    if args.record:
        RECORD.unlink(missing_ok=True)
    found = measure(args.steps, args.save_every, profile, RECORD if args.record else None)
    step, checkpoint = found["step"], found["save"] * args.save_every
    result = {
        "step_s": round(step, 3),
        "between_phases_share": round(found["between"] / step, 4),
        "between_phases_ms_per_sample": round(
            1000 * found["between"] / found["samples"], 3
        ),
        "driver_alone_share": round(found["alone"] / step, 4),
        "driver_alone_ms_per_sample": round(1000 * found["alone"] / found["samples"], 3),
        "checkpoint_s": round(checkpoint, 3),
        "checkpoint_share": round(checkpoint / INTERVAL / (step - found["save"]), 4),
        "load": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
        "device": "simulated NPU",
    }
    print(json.dumps(result))
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    return int(
        result["between_phases_share"] > 0.01
        or result["driver_alone_ms_per_sample"] > 2
        or result["checkpoint_share"] > 0.02
    )


if __name__ == "__main__":
    sys.exit(main())
