"""Each benchmark measures something with its smallest sizes."""

import re
import subprocess
import sys

import pytest
from places import TESTS

pytestmark = pytest.mark.lane("benchmarks")
FOLDER = TESTS / "benchmarks"
NUMBER = r"([\d.,]+)"
SMALL = {  # arguments, and where the measured number stands
    "engine_speed": (
        "--response 2 --prompts 2 --samples 2 --rounds 1",
        f"processor time: engine {NUMBER} tokens/s",
    ),
    "grpo_step": ("--repeats 1 --steps 1 --warm 1", f"processor time TRL / ours {NUMBER}"),
    "start_up": ("--steps 1 --no-warm-up", f"trainer_cpu_s +{NUMBER}"),
    "weight_update_speed": ("--layers 1 --every 1 --rounds 1", f"memcpy / .* = {NUMBER}"),
}


def test_every_benchmark_is_here_and_on_the_page():
    programs = {path.stem for path in FOLDER.glob("*.py")}
    assert set(SMALL) == programs - {"options", "test_benchmarks"}
    page = (TESTS.parent / ".docs/pages/reference/benchmarks.md").read_text("utf-8")
    found = re.findall(r"`python tests/benchmarks/(\w+)\.py", page)
    assert set(found) == set(SMALL)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_it_measures(name, tmp_path):
    if name == "grpo_step":
        pytest.importorskip("trl")
    arguments, measured = SMALL[name]
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments.split()]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=500
    )
    assert done.returncode == 0, done.stderr[-8000:]
    number = re.search(measured, done.stdout)
    assert number, done.stdout
    assert float(number[1].replace(",", "")) > 0
