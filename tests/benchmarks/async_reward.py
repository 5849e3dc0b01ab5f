"""Does sampling ahead cost reward? `python tests/benchmarks/async_reward.py [--seeds 5]`

The asynchronous recipe (depth 1, staleness 2) and the same run in step (depth 0, staleness 0), with the
same seeds. Prints for each seed the mean reward of the last steps and the accuracy on held-out prompts of
both, then the mean difference with a bootstrap interval over the seeds.
"""

import argparse
import random
import tempfile
from statistics import fmean

from cookbook_npu.recipes import qwen3_5_9b_async
from cookbook_npu.runs.metrics import load_metrics
from cookbook_npu.train.session import session

MODES = {
    "synchronous": {"rollout.depth": 0, "rollout.max_staleness": 0},
    "asynchronous": {"rollout.depth": 1, "rollout.max_staleness": 2},
}
RESAMPLES = 10_000


def measured(values: list[float | None]) -> list[float]:
    "The values of the steps that have one"
    return [value for value in values if value is not None]


def one_run(
    mode: str, seed: int, root: str, args: argparse.Namespace
) -> tuple[float, float]:
    "Mean reward of the last steps, and accuracy on held-out prompts after the last"
    overrides = {
        "output.root": root,
        "output.name": f"{mode}-{seed}",
        "output.tensorboard": False,
        "output.save_samples": False,
        "data.eval_prompts": args.held_out,
        "rollout.eval_every": args.steps,
        "train.save_every": 0,
        **MODES[mode],
    }
    config = qwen3_5_9b_async(
        num_steps=args.steps, prompts_per_step=args.prompts, seed=seed, overrides=overrides
    )
    with session(config) as run:
        for _ in run.steps():
            pass
        metrics = load_metrics(run.folder)
    reward = fmean(measured(metrics["raw_reward"])[-args.last :])
    return reward, measured(metrics["eval_accuracy"])[-1]


def interval(differences: list[float]) -> tuple[float, float]:
    "95 % bootstrap interval of the mean"
    chance = random.Random(0)
    means = []
    for _ in range(RESAMPLES):
        means.append(fmean(chance.choices(differences, k=len(differences))))
    means.sort()
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


def show(name: str, differences: list[float]) -> None:
    "One line of the result"
    low, high = interval(differences)
    print(
        f"{name:28} {fmean(differences):+.3f}   95 % of resampled means: {low:+.3f} to {high:+.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="pairs of runs")
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--last", type=int, default=10, help="steps whose reward counts")
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument(
        "--held-out", type=int, default=256, help="prompts of the evaluation"
    )
    args = parser.parse_args()
    rewards, accuracies = [], []
    with tempfile.TemporaryDirectory() as root:
        for seed in range(args.seeds):
            found = {mode: one_run(mode, seed, root, args) for mode in MODES}
            (in_step, accuracy), (ahead, accuracy_ahead) = found.values()
            rewards.append(ahead - in_step)
            accuracies.append(accuracy_ahead - accuracy)
            print(
                f"seed {seed}: reward of the last steps {in_step:.3f} in step, {ahead:.3f} ahead; "
                f"held out {accuracy:.3f}, {accuracy_ahead:.3f}",
                flush=True,
            )
    print(f"\nasynchronous minus synchronous, {args.steps} steps, simulated NPU")
    show(f"reward, {args.seeds} seeds", rewards)
    show(f"held-out accuracy, {args.held_out} prompts", accuracies)


if __name__ == "__main__":
    main()
