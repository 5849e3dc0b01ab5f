"""What the driver and its checkpoints cost: `python tests/benchmarks/driver_overhead.py [--steps 12] [--profile]`

One run of the recipe at laptop scale (simulated NPU), its own numbers compared with each other. The driver's share is what remains
of a step when the time in which it waits for a role or for the reward processes is taken away: requests, batches, records, metrics.
The aims: under 1 % of a step, under 2 ms for a sample; checkpoints under 3 % at an interval of 20 steps, the default of scale 910b.
"""

import argparse
import cProfile
import json
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cookbook_npu.cluster.roles import Pending
from cookbook_npu.presets import qwen3_4b_colocate
from cookbook_npu.runs.folder import append_line
from cookbook_npu.train.session import session

INTERVAL = 20
RECORD = Path(__file__).parents[2] / "nbs/tutorials/laptop_step.jsonl"


class Waiting:
    "Seconds spent inside some functions"

    def __init__(self):
        self.seconds = 0.0

    def around(self, function: Callable) -> Callable:
        def timed(*args, **kwargs):
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def measure(steps: int, every: int, profile: cProfile.Profile, record: Path | None) -> dict[str, float]:
    "Means over the steps after the first two, in seconds"
    roles, rewards = Waiting(), Waiting()
    Pending.result = roles.around(Pending.result)
    rows = []
    with tempfile.TemporaryDirectory() as root:
        settings = {"output.root": root, "train.save_every": every, "rollout.eval_every": 0}
        with session(qwen3_4b_colocate(num_steps=steps, overrides=settings)) as run:
            run.parts.rewards.score = rewards.around(run.parts.rewards.score)
            roles.take()
            for number, row in enumerate(run.steps()):
                waited, graded = roles.take(), rewards.take()
                if number == 1:
                    profile.enable()
                if record:
                    kept = {name: value for name, value in row.items() if name == "step" or name.startswith("time/")}
                    append_line(record, kept)
                if number > 1:
                    rows.append((row["time/step"], waited, graded, row.get("time/save", 0.0)))
            profile.disable()
        samples = run.parts.config.rollout_batch
    step, waited, graded, save = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    return {"step": step, "roles": waited, "rewards": graded, "driver": step - waited - graded, "save": save, "samples": samples}


def main() -> int:
    "Measure, print, compare with the aims"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--save-every", type=int, default=3, help="the cost of one checkpoint is spread over 20 steps")
    parser.add_argument("--record", action="store_true", help="replace the timings that nbs/tutorials/where_the_seconds_go shows")
    parser.add_argument("--profile", action="store_true", help="also print where the driver's time goes")
    args = parser.parse_args()
    profile = cProfile.Profile() if args.profile else argparse.Namespace(enable=lambda: None, disable=lambda: None)
    if args.record:
        RECORD.unlink(missing_ok=True)
    found = measure(args.steps, args.save_every, profile, RECORD if args.record else None)
    driver, step = found["driver"], found["step"]
    result = {
        "step_s": round(step, 3),
        "roles_s": round(found["roles"], 3),
        "rewards_s": round(found["rewards"], 3),
        "driver_s": round(driver, 4),
        "driver_share": round(driver / step, 4),
        "driver_ms_per_sample": round(1000 * driver / found["samples"], 3),
        "checkpoint_s": round(found["save"] * args.save_every, 3),
        "checkpoint_share": round(found["save"] * args.save_every / INTERVAL / (step - found["save"]), 4),
        "load": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
        "device": "simulated NPU",
    }
    print(json.dumps(result))
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    return int(driver / step > 0.01 or result["driver_ms_per_sample"] > 2 or result["checkpoint_share"] > 0.03)


if __name__ == "__main__":
    sys.exit(main())
