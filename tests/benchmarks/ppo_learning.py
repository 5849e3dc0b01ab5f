"""Does PPO's critic learn? `python tests/benchmarks/ppo_learning.py [--steps 40] [--seed 0]`

`--recipe qwen3_vl_8b_ppo` asks the recipe with pictures, as it stands; else:

The recipe qwen3_4b_colocate with PPO in place of GRPO, at laptop scale (simulated NPU). Prints what the
critic explained of the variance of the returns in the first and in the last steps, and the accuracy on
held-out prompts before and after.

The prompts are of two kinds, sums that the policy learns and words to sort that it does not, so there is
something that a critic can know beforehand. With one kind alone (`--prompt-data arithmetic`), what is left
of the variance when the policy has learned it is nearly all chance.
"""

import argparse
import json
import os
import tempfile
import time
from statistics import fmean

from cookbook_npu.recipes import find_recipe
from cookbook_npu.rl.algorithms import algorithm_overrides
from cookbook_npu.runs.metrics import load_metrics
from cookbook_npu.train.session import session

EXPLAINED = "critic/explained_variance"
PICTURES = "qwen3_vl_8b_ppo"  # a recipe that is PPO on two kinds of drawings


def measured(values: list[float | None]) -> list[float]:
    "The values of the steps that have one"
    return [value for value in values if value is not None]


def kinds_of_prompts(names: str) -> dict[str, object]:
    "Keys for one generated task, or for several in equal parts"
    kinds = names.split(",")
    if len(kinds) == 1:
        return {"data.prompt_data": kinds[0]}
    # sorting holds out 65 problems
    return {"data.mixture": dict.fromkeys(kinds, 1.0), "data.eval_prompts": 64}


def own_prompts(args: argparse.Namespace) -> dict[str, object]:
    "PPO and two kinds of prompts, for a recipe that has neither"
    if args.recipe == PICTURES and args.prompt_data is None:
        return {}
    names = args.prompt_data or "arithmetic,sorting"
    return {**algorithm_overrides("ppo"), **kinds_of_prompts(names)}


def train(root: str, args: argparse.Namespace) -> dict:
    "The metrics of a run"
    overrides = {
        "output.root": root,
        "output.name": "ppo",
        "output.tensorboard": False,
        "train.save_every": 0,
        **own_prompts(args),
        **json.loads(args.overrides),
    }
    config = find_recipe(args.recipe)(
        num_steps=args.steps,
        prompts_per_step=args.prompts,
        seed=args.seed,
        overrides=overrides,
    )
    with session(config) as run:
        for row in run.steps():
            if args.rows:
                print(json.dumps(row), flush=True)
        return load_metrics(run.folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="qwen3_4b_colocate", help="of the run")
    parser.add_argument("--steps", type=int, default=None, help="of the run")
    parser.add_argument("--last", type=int, default=10, help="steps at each end that count")
    parser.add_argument("--prompts", type=int, default=None, help="of a step")
    parser.add_argument(
        "--prompt-data",
        default=None,
        help="generated tasks, in equal parts; none: arithmetic,sorting, or the recipe's own",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the run")
    parser.add_argument("--overrides", default="{}", help="further keys, as JSON")
    parser.add_argument("--rows", action="store_true", help="print every step")
    args = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        metrics = train(root, args)
    explained = measured(metrics.get(EXPLAINED, []))
    accuracy = measured(metrics["eval_accuracy"])
    reward = measured(metrics["raw_reward"])
    print(f"\n{len(reward)} steps, simulated NPU, {os.cpu_count()} cores")
    if explained:
        first, last = fmean(explained[: args.last]), fmean(explained[-args.last :])
        print(f"explained variance, first steps {first:.3f}, last steps {last:.3f}")
    else:
        print("explained variance: in no step did the returns differ")
    print(f"held-out accuracy, before {accuracy[0]:.3f}, after {accuracy[-1]:.3f}")
    print(
        f"reward, first steps {fmean(reward[: args.last]):.3f}, last {fmean(reward[-args.last :]):.3f}"
    )
    print(f"took {time.perf_counter() - began:.1f} s, its start included")


if __name__ == "__main__":
    main()
