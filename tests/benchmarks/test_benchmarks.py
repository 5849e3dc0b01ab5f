"""Every benchmark starts; `COOKBOOK_BENCHMARKS=all`: it measures, with the smallest sizes it takes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import TESTS
from whole_runs import preloaded

FOLDER = TESTS / "benchmarks"
NUMBER = r"([\d.,]+(?:e-?\d+)?)"
SMALL = {  # arguments, and where the measured number stands
    "async_reward": (
        "--seeds 1 --steps 2 --last 1 --prompts 4 --held-out 8",
        rf"reward, {NUMBER} seeds +[+-]\d",
    ),
    "async_speed": (
        "--steps 5 --rounds 1 --prompts 4 --latency 0.1",
        rf"asynchronous +{NUMBER}",
    ),
    "driver_overhead": ("--steps 3", f'"between_phases_ms_per_sample": {NUMBER}'),
    "engine_speed": (
        "--response 2 --prompts 2 --samples 2 --rounds 1",
        f"processor time: engine {NUMBER} tokens/s",
    ),
    "grpo_step": (
        "--repeats 1 --steps 1 --warm 1",
        f"processor time TRL / ours {NUMBER}",
    ),
    "long_responses": (
        "--tokens 8 --layers 1 --hidden 64 --prompts 1 --samples 2 --rounds 1",
        rf"training +thd +{NUMBER} tokens/s",
    ),
    "matmul": ("--rows 32 --seconds 0.1", f"median ratio {NUMBER}"),
    "ppo_learning": (
        "--steps 2 --last 1 --prompts 4",
        f"took {NUMBER} s",
    ),
    "reward_speed": ("--workers 1 --answers 20", f'"answers_per_s": {NUMBER}'),
    "scaling": (
        "--axes prompts --points 1 --steps 1 --figure scaling.svg",
        f"update_weights, ms +{NUMBER}",
    ),
    "simulator_overhead": ("", rf"training step, .*\n +cpu +{NUMBER} ms"),
    "sleep_wake": ("--layers 1 --rounds 1", f"blocks of 16 MiB +{NUMBER} s"),
    "soak": ("--steps 3", f"rss MiB +trainer 1 +{NUMBER}"),
    "start_up": (
        "--steps 1 --no-warm-up",
        f"trainer_cpu_s +{NUMBER}",
    ),
    "turns": (
        "--steps 1 --last 1 --prompts 4 --turns 2",
        rf"policy tokens.*\n.* {NUMBER}\n",
    ),
    "virtual_hours": (
        "--devices 8 --hours 0.5 --prompts 8",
        f"processor time: {NUMBER} s",
    ),
    "weight_update_speed": (
        "--layers 1 --every 1 --rounds 1",
        f"memcpy / .* = {NUMBER}",
    ),
}
# they end with 1 when what they measured is above their limit: in three steps, on a busy machine, it may be
WITH_LIMIT = ("driver_overhead", "soak", "start_up")
LEFT_BEHIND = r"left behind: .*|event: .*"


def what_is_wrong(name: str, code: int, output: str) -> str:
    "Why a benchmark that ended so did not work; empty when it did"
    if code not in ((0, 1) if name in WITH_LIMIT else (0,)):
        return f"it ended with {code}"
    if "Traceback" in output:
        return "it raised"
    left = re.search(LEFT_BEHIND, output)
    if left:
        return left[0]
    measured = re.search(SMALL[name][1], output)
    if not measured:
        return "it printed no result"
    return "" if float(measured[1].replace(",", "")) > 0 else f"it measured {measured[0]}"


def test_every_benchmark_is_here():
    assert set(SMALL) == {p.stem for p in FOLDER.glob("*.py")} - {
        "options",
        "qwen3_weights",
        "test_benchmarks",
    }


def test_every_benchmark_is_on_the_page():
    "With a command, and with a figure or the word that there is none"
    page = (TESTS.parent / ".docs/pages/reference/benchmarks.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for name in SMALL:
        command = f"`python tests/benchmarks/{name}.py"
        assert any(command in row for row in rows), f"{name} is in no row of benchmarks.md"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["sleep_wake", "weight_update_speed"])
def test_without_a_gpu_it_says_so(name):
    command = [
        sys.executable,
        str(FOLDER / f"{name}.py"),
        "--device",
        "cuda",
        "--model",
        "4B",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "this machine has no GPU that torch can use" in done.stderr


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_benchmark_that_does_nothing_is_red(name):
    assert what_is_wrong(name, 0, "") == "it printed no result"
    assert what_is_wrong(name, 2, "") == "it ended with 2"


@pytest.mark.parametrize(
    ("name", "output", "wrong"),
    [
        ("engine_speed", "processor time: engine 1,234 tokens/s, generate", ""),
        ("engine_speed", "processor time: engine 0 tokens/s", "it measured"),
        ("engine_speed", "processor time: engine nan tokens/s", "no result"),
        ("reward_speed", '{"answers_per_s": 0.0}', "it measured"),
        ("simulator_overhead", "training step, 2.0M:\n    cpu    12 ms", ""),
        ("soak", "rss MiB   trainer 1    681.2\nrss MiB of driver grew by 9.1", ""),
        ("soak", "rss MiB   trainer 1    681.2\nleft behind: ray::IDLE", "left behind"),
        ("soak", "rss MiB   trainer 1    681.2\nevent: role_lost", "event: role_lost"),
        ("soak", "rss MiB   trainer 1    681.2\nTraceback (most", "it raised"),
    ],
)
def test_a_broken_benchmark_is_red(name, output, wrong):
    found = what_is_wrong(name, int(name == "soak"), output)
    assert wrong in found and bool(found) == bool(wrong)


def start(name: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    "A benchmark, after its end"
    command = [sys.executable, str(FOLDER / f"{name}.py"), *words]
    return subprocess.run(
        command, capture_output=True, text=True, env=preloaded(), cwd=folder, timeout=500
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SMALL))
def test_it_starts(name, tmp_path):
    "What it imports exists, and it has the options of the small run"
    done = start(name, tmp_path, "--help")
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr[-3000:]
    options = [word for word in SMALL[name][0].split() if word.startswith("--")]
    assert not [word for word in options if word not in done.stdout]


@pytest.mark.slow
@pytest.mark.skipif(
    "COOKBOOK_BENCHMARKS" not in os.environ, reason="COOKBOOK_BENCHMARKS=all"
)
@pytest.mark.parametrize("name", sorted(SMALL))
def test_it_measures(name, tmp_path):
    arguments, _ = SMALL[name]
    if name == "grpo_step":
        pytest.importorskip("trl")
    done = start(name, tmp_path, *arguments.split())
    output = f"{done.stdout}\n{done.stderr}"
    assert not what_is_wrong(name, done.returncode, output), output[-8000:]
