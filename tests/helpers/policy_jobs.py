"""Evaluations in a process that holds an engine, for test_trained_policy.py."""

from pathlib import Path

from cookbook_npu.policy.evaluate import EvalSettings, evaluate_run


def ask(rank: int, world_size: int, run: str, steps: list[int]) -> dict:
    "The evaluation of some steps, and a greedy one twice"
    path = Path(run)
    greedy = EvalSettings(temperature=0.0)
    return {
        "own": {step: evaluate_run(path, step) for step in steps},
        "greedy": [evaluate_run(path, steps[-1], greedy) for _ in range(2)],
    }


def evaluate(rank: int, world_size: int, run: str) -> dict:
    "The run's last evaluation once more"
    return evaluate_run(Path(run))
