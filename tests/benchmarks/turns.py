"""Do turns help? `python tests/benchmarks/turns.py [--steps 10] [--turns 1 2] [--seed 0]`

The recipe qwen3_4b_colocate on the calculator's sums at laptop scale (simulated NPU), with one turn and with
two: the same first weights, prompts, steps, and tokens of a response, observations included. With one turn
a call of the calculator ends the episode. Prints a table.
"""

import argparse
import json
import os
import tempfile
import time
from statistics import fmean

from cookbook_npu.config import RunConfig
from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.runs.metrics import load_metrics
from cookbook_npu.train.session import session

COLUMNS = {  # heading -> how a number is written
    "turns": "7d",
    "accuracy before": "15.3f",
    "after": "7.3f",
    "reward first": "12.3f",
    "last": "7.3f",
    "calls": "7.2f",
    "policy tokens": "13.1f",
    "seconds": "9.1f",
}


def measured(values: list[float | None]) -> list[float]:
    "The values of the steps that have one"
    return [value for value in values if value is not None]


def configure(root: str, turns: int, args: argparse.Namespace) -> RunConfig:
    "A run that differs from the others in its turns alone"
    overrides = {
        "output.root": root,
        "output.name": f"turns_{turns}",
        "output.tensorboard": False,
        "train.save_every": 0,
        "rollout.max_turns": turns,
        **json.loads(args.overrides),
    }
    return qwen3_4b_colocate(
        num_steps=args.steps,
        prompts_per_step=args.prompts,
        prompt_data="calculator",
        seed=args.seed,
        overrides=overrides,
    )


def play(config: RunConfig, last: int) -> dict[str, float]:
    "One row of the table"
    began = time.perf_counter()
    with session(config) as run:
        for _ in run.steps():
            pass
        metrics = {k: measured(v) for k, v in load_metrics(run.folder).items()}
    told = fmean(metrics["env/observation_tokens_mean"])
    reward = metrics["raw_reward"]
    return {
        "turns": config.rollout.max_turns,
        "accuracy before": metrics["eval_accuracy"][0],
        "after": metrics["eval_accuracy"][-1],
        "reward first": fmean(reward[:last]),
        "last": fmean(reward[-last:]),
        "calls": fmean(metrics["env/tool_calls_mean"]),
        "policy tokens": fmean(metrics["response_length_mean"]) - told,
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2], help="of each run")
    parser.add_argument("--last", type=int, default=3, help="steps at each end that count")
    parser.add_argument("--prompts", type=int, default=None, help="of a step")
    parser.add_argument("--seed", type=int, default=0, help="of all runs")
    parser.add_argument("--overrides", default="{}", help="further keys, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        found = [play(configure(root, turns, args), args.last) for turns in args.turns]
    limit = configure("", 2, args).sampling.max_response_tokens
    print(f"\n{args.steps} steps, at most {limit} tokens of all turns and observations")
    print(f"simulated NPU, {os.cpu_count()} cores")
    widths = {name: int(form.split(".")[0].rstrip("d")) for name, form in COLUMNS.items()}
    print("  ".join(name.rjust(width) for name, width in widths.items()))
    for row in found:
        print("  ".join(f"{row[name]:{form}}" for name, form in COLUMNS.items()))


if __name__ == "__main__":
    main()
