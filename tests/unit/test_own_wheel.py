"""The wheel of this project, installed: recipes and types come with it."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from cookbook_npu.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
pytestmark = pytest.mark.lane("packages")


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> list[str]:
    "`cookbook-npu` of a new environment, which has only the wheel and links to its requirements"
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip"]
    source = folder / "source"  # a build leaves its files where it ran
    for name in ("cookbook_npu", "recipes"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True
    )
    python = folder / "env" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    install = ["--python", str(python), "install", "--no-deps", str(wheel)]
    subprocess.run([*pip, *install], check=True, env=CLEAN)
    site = next((folder / "env/lib").glob("python*")) / "site-packages"
    own = {"cookbook_npu", "__pycache__"}
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        named = path.name.startswith(("cookbook_npu", "__editable__"))
        if path.name not in own and not named and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    assert (site / "cookbook_npu" / "py.typed").is_file()
    return [str(python), "-P", "-m", "cookbook_npu.cli"]


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
