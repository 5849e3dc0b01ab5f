"""Evaluations and a chat in a process that holds an engine, for test_trained_policy.py."""

from pathlib import Path

from cookbook_npu.policy.chat import ChatSettings, chat_with_run
from cookbook_npu.policy.evaluate import EvalSettings, evaluate_run


def ask(rank: int, world_size: int, run: str, steps: list[int], lines: list[str]) -> dict:
    "The evaluation of some steps, a greedy one twice, and replies to some lines"
    path = Path(run)
    greedy = EvalSettings(temperature=0.0)
    replies: list[str] = []
    chat_with_run(path, steps[-1], ChatSettings(), lines, replies.append)
    return {
        "own": {step: evaluate_run(path, step) for step in steps},
        "greedy": [evaluate_run(path, steps[-1], greedy) for _ in range(2)],
        "replies": replies,
    }


def evaluate(rank: int, world_size: int, run: str) -> dict:
    "The run's last evaluation once more"
    return evaluate_run(Path(run))
