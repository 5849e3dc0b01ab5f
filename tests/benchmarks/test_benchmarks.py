"""Every benchmark still runs: with the smallest sizes it takes, for what it prints, not for its numbers."""

import os
import re
import subprocess
import sys

import pytest
from places import TESTS
from whole_runs import preloaded

FOLDER = TESTS / "benchmarks"
SMALL = {  # arguments, and a word of the result
    "driver_overhead": (["--steps", "3"], '"driver_alone_share": '),
    "engine_speed": (
        "--response 2 --prompts 2 --samples 2 --rounds 1".split(),
        "processor time: ",
    ),
    "grpo_step": ("--repeats 1 --steps 1 --warm 1".split(), "processor time TRL / ours"),
    "reward_speed": ("--workers 1 --answers 20".split(), '"answers_per_s": '),
    "simulator_overhead": ([], "training step, "),
    "sleep_wake": ("--share 0.03 --rounds 1".split(), "blocks of 16 MiB"),
    "soak": (["--steps", "3"], "threads  .*trainer 1"),
    "weight_update_speed": ("--layers 1 --every 1 --rounds 1".split(), "memcpy / .* = 0"),
}
CODES = {"soak": (0, 1)}  # 1: something grew, as everything does in three steps


def test_every_benchmark_is_here():
    assert set(SMALL) == {p.stem for p in FOLDER.glob("*.py")} - {"test_benchmarks"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SMALL))
def test_it_runs(name, tmp_path):
    arguments, word = SMALL[name]
    if name == "grpo_step":
        pytest.importorskip("trl")
    env = os.environ if name == "soak" else preloaded()  # it watches the processes below it
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=500
    )
    output = done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode in CODES.get(name, (0,)), output
    assert re.search(word, done.stdout), output
