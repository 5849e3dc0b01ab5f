"""What does sampling beside training gain? `python tests/benchmarks/async_speed.py [--latency 0.5]`

The same recipe three times on simulated NPUs: colocated on 2, split synchronous on 4 (depth 0, staleness
0) and asynchronous on 4 (depth 1, staleness 2), in turns. Each decode step of an engine sleeps
`--latency` seconds, however many responses it goes on with, which stands for a device and burns no CPU.
By default that is most of a step, and an asynchronous run gains twice: it trains meanwhile, and the
responses of two rollouts share decode steps. With `--latency 0` all processes compete for
the same cores, where it can gain little.
Prints steps per second of each, and the ratios to split synchronous as median and range over the rounds.
The first steps of a run, which warm caches, are left out.
"""

import argparse
import json
import tempfile
import time
from statistics import median

from cookbook_npu.recipes import qwen3_5_9b_async
from cookbook_npu.train.session import session

WARM = 3  # steps that are left out
MODES = {
    "colocate": {"placement.mode": "colocate", "placement.devices": 2},
    "split synchronous": {"rollout.depth": 0, "rollout.max_staleness": 0},
    "asynchronous": {"rollout.depth": 1, "rollout.max_staleness": 2},
}


def steps_per_second(mode: str, root: str, name: str, args: argparse.Namespace) -> float:
    "One run"
    overrides = {
        "output.root": root,
        "output.name": name,
        "output.tensorboard": False,
        "rollout.eval_every": 0,
        "rollout.simulated_latency": args.latency,
        "train.save_every": 0,
        "warm_start.steps": args.warm_start,
        **json.loads(args.overrides),
        **MODES[mode],
    }
    config = qwen3_5_9b_async(
        num_steps=args.steps, prompts_per_step=args.prompts, overrides=overrides
    )
    times = []
    with session(config) as run:
        for _ in run.steps():
            times.append(time.perf_counter())
    timed = times[WARM - 1 :]
    return (len(timed) - 1) / (timed[-1] - timed[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="each mode runs once in each")
    parser.add_argument("--latency", type=float, default=0.5, help="of a decode step, s")
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument("--warm-start", type=int, default=250, help="supervised steps")
    parser.add_argument(
        "--overrides", default="{}", help="JSON, e.g. of sampling.max_response_tokens"
    )
    args = parser.parse_args()
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as root:
        for number in range(args.rounds):
            for mode in MODES:
                name = f"{mode.replace(' ', '-')}-{number}"
                found[mode].append(steps_per_second(mode, root, name, args))
    print(f"\nlatency {args.latency} s per decode step, {args.steps} steps, simulated NPU")
    print(f"{'':20} steps/s   against split synchronous")
    for mode, speeds in found.items():
        pairs = zip(speeds, found["split synchronous"], strict=True)
        ratios = [speed / base for speed, base in pairs]
        spread = f"{median(ratios):.2f}  ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{mode:20} {median(speeds):7.3f}   {spread}")


if __name__ == "__main__":
    main()
