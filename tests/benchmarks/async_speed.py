"""What does sampling beside training gain? `python tests/benchmarks/async_speed.py [--latency 0.5]`

The same recipe three times on simulated NPUs: colocated on 2, split synchronous on 4 (depth 0, staleness
0) and asynchronous on 4 (depth 1, staleness 2), in turns. Each decode step of an engine sleeps
`--latency` seconds, however many responses it goes on with, which stands for a device and burns no CPU.
By default that is most of a step, and an asynchronous run gains twice: it trains meanwhile, and the
responses of two rollouts share decode steps. The first line of the result says how long sampling and
training were. With `--latency 0` all processes compete for the same cores, where it can gain little.
Prints steps per second of each, and the ratios to split synchronous as median and range over the rounds.
The first steps of a run, which warm caches, are left out. The last line compares the virtual clock with
reality: the asynchronous run is predicted from the times of the split synchronous one. The clock knows
nothing of cores that all roles share, so on a laptop it promises too much.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from cookbook_npu.plan.schedule import MeasuredRun, measure_run
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


def predicted(run: MeasuredRun) -> float:
    "Steps per second of the asynchronous run, from a split synchronous one"
    rows = {row.name: row.result for row in run.compare()}
    return 1 / rows["D 1, S 2"].seconds


def run_name(mode: str, number: int) -> str:
    "Name of a run's folder"
    return f"{mode.replace(' ', '-')}-{number}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="each mode runs once in each")
    parser.add_argument("--latency", type=float, default=0.5, help="of a decode step, s")
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument(
        "--overrides", default="{}", help="JSON, e.g. of sampling.max_response_tokens"
    )
    args = parser.parse_args()
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as root:
        for number in range(args.rounds):
            for mode in MODES:
                name = run_name(mode, number)
                found[mode].append(steps_per_second(mode, root, name, args))
        folders = [
            Path(root) / run_name("split synchronous", n) for n in range(args.rounds)
        ]
        runs = [measure_run(folder, WARM) for folder in folders]
        modelled = median(map(predicted, runs))
    sampling = median(run.step.sampling for run in runs)
    training = median(run.step.train for run in runs)
    print(f"\nlatency {args.latency} s per decode step, {args.steps} steps, simulated NPU")
    print(f"split synchronous: {sampling:.2f} s of sampling, {training:.2f} s of training")
    print(f"{'':20} steps/s   against split synchronous")
    for mode, speeds in found.items():
        pairs = zip(speeds, found["split synchronous"], strict=True)
        ratios = [speed / base for speed, base in pairs]
        spread = f"{median(ratios):.2f}  ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{mode:20} {median(speeds):7.3f}   {spread}")
    error = modelled / median(found["asynchronous"]) - 1
    print(
        f"{'asynchronous, predicted from split synchronous':47} {modelled:7.3f}   ({error:+.0%})"
    )


if __name__ == "__main__":
    main()
