"""The wheel of this project, installed: recipes and types come with it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from reader import link_packages

from cookbook_npu.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
PIP = [sys.executable, "-m", "pip"]
pytestmark = pytest.mark.lane("packages")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    "The wheel of this tree"
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves its files where it ran
    for name in ("cookbook_npu", "recipes"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run([*PIP, *build], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path, *extras: str) -> str:
    "The interpreter of a new environment with the wheel and links to what it and its extras ask for"
    site = link_packages(folder, *extras)
    python = folder / "bin" / "python"
    words = ["--python", str(python), "install", "--no-deps", str(wheel)]
    subprocess.run([*PIP, *words], check=True, env=CLEAN)
    assert (site / "cookbook_npu" / "py.typed").is_file()
    return str(python)


@pytest.fixture(scope="module")
def command(wheel, tmp_path_factory) -> list[str]:
    python = install(wheel, tmp_path_factory.mktemp("whole"), "laptop")
    return [python, "-P", "-m", "cookbook_npu.cli"]


def output(command: list[str], folder: Path, *words: str) -> str:
    done = subprocess.run(
        [*command, *words], cwd=folder, env=CLEAN, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_recipes_come_with_it(command, tmp_path):
    listed = output(command, tmp_path, "recipes")
    assert all(f"\n{name}\n" in f"\n{listed}" for name in RECIPES)


def test_a_recipe_runs_in_an_empty_folder(command, tmp_path):
    said = output(command, tmp_path, "run", "qwen3_4b_colocate", "-p", "num_steps", "1")
    assert "step 1/1" in said and list((tmp_path / "runs").iterdir())


ALGORITHM = """
import importlib, pkgutil, sys
import cookbook_npu.data, cookbook_npu.rl

for room in (cookbook_npu.rl, cookbook_npu.data):
    for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
        importlib.import_module(module.name)

import torch
from cookbook_npu.data.graders import math
from cookbook_npu.rl.advantages import grpo

rewards = [math(text, "1/2", {}) for text in (r"\\boxed{0.5}", r"\\boxed{2}")]
print(rewards, [round(a, 3) for a in grpo(torch.tensor(rewards), ["a", "a"], 2).tolist()])
"""


def test_without_extras_the_algorithm_and_its_data_work(wheel, tmp_path):
    python = install(wheel, tmp_path / "light")
    said = output([python, "-P", "-c"], tmp_path, ALGORITHM)
    assert said == "[1.0, 0.0] [0.707, -0.707]\n"
    command = [python, "-P", "-m", "cookbook_npu.cli"]
    assert "4,022,468,096 parameters" in output(
        command, tmp_path, "plan", "qwen3_4b_colocate"
    )
    run = [*command, "run", "qwen3_4b_colocate"]
    done = subprocess.run(run, cwd=tmp_path, env=CLEAN, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'cookbook-npu[stack]'" in done.stderr
    assert not list(tmp_path.glob("runs/*"))


def test_the_environment_of_make_vllm_is_whole_for_other_programs(tmp_path):
    "torchvision is a CUDA build beside a CPU build of torch, where the index has no other"
    pytest.importorskip("vllm", reason="vLLM is not installed (make vllm)")
    module = "cookbook_npu.npu.shims.torchvision_ops"
    mend = f"from {module} import mend_environment; mend_environment()"
    for _ in range(2):
        output([sys.executable, "-P", "-c"], tmp_path, mend)
    program = "import peft, torchvision; from transformers import Qwen2VLImageProcessor"
    output([sys.executable, "-P", "-c"], tmp_path, program)
