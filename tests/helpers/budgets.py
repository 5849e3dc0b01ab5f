"""What the house may measure: a change that needs more deletes as much, or says in its commit why."""

import ast
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import typer
from places import PACKAGE, ROOT, TESTS

from cookbook_npu.cli import app
from cookbook_npu.config import config_keys

# reached on 2026-11-30, and 1 % more where a number is large
BUDGETS: dict[str, int] = {
    "lines of front": 4262,
    "lines of cluster": 2376,
    "lines of config": 2604,
    "lines of contrib": 720,
    "lines of data": 7562,
    "lines of model": 3521,
    "lines of npu": 12805,
    "lines of plan": 3180,
    "lines of policy": 810,
    "lines of rl": 1382,
    "lines of rollout": 3860,
    "lines of runs": 4925,
    "lines of targets": 235,
    "lines of train": 7531,
    "lines of weights": 975,
    "lines of the package": 56730,
    "notebooks": 151,
    "configuration keys": 150,
    "configuration errors": 56,
    "commands": 17,
    "options of commands": 65,
    "lines of tests": 33185,
    "lines of notebook examples": 24310,
    "TEST_LOOPS": 1400,
}


def lines_of(files: Iterator[Path]) -> int:
    "Return how many lines files have together"
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def modules() -> list[Path]:
    "Return the modules of the package; nbdev's index is none"
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p.name != "_modidx.py"]


def notebooks() -> list[Path]:
    "Return the source notebooks and the recipes"
    found = sorted([*(ROOT / "nbs").rglob("*.ipynb"), *ROOT.glob("recipes/*.ipynb")])
    return [path for path in found if ".ipynb_checkpoints" not in path.parts]


def room(module: Path) -> str:
    "Return the subpackage of a module; 'front' for the modules at the root"
    inside = module.relative_to(PACKAGE).parts
    return inside[0] if len(inside) > 1 else "front"


def example_lines() -> int:
    "Return the lines of code that notebooks run and do not export"
    cells = [
        c for path in notebooks() for c in json.loads(path.read_text("utf-8"))["cells"]
    ]
    sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    return sum(len(s.splitlines()) for s in sources if not s.startswith("#| export"))


def config_errors() -> int:
    "Return how often the configuration raises an error of its own"
    sources = [p.read_text(encoding="utf-8") for p in (PACKAGE / "config").glob("*.py")]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    raised = [n.exc for n in nodes if isinstance(n, ast.Raise)]
    calls = [e.func for e in raised if isinstance(e, ast.Call)]
    return sum(isinstance(f, ast.Name) and f.id.endswith("Error") for f in calls)


def measured() -> dict[str, int]:
    "Return what the house measures now, under the names of the budgets"
    rooms = Counter[str]()
    for module in modules():
        rooms[f"lines of {room(module)}"] += lines_of(iter([module]))
    commands = typer.main.get_command(app).commands.values()
    options = [p for c in commands for p in c.params if p.param_type_name == "option"]
    return dict(rooms) | {
        "lines of the package": sum(rooms.values()),
        "notebooks": len(notebooks()),
        "configuration keys": len(list(config_keys())),
        "configuration errors": config_errors(),
        "commands": len(commands),
        "options of commands": len(options),
        "lines of tests": lines_of(TESTS.rglob("*.py")),
        "lines of notebook examples": example_lines(),
    }


if __name__ == "__main__":
    for name, value in measured().items():
        print(f'    "{name}": {value},')
