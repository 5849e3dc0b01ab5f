"""What the process of a notebook runs: `nbdev_test`, in a fork of a server that has done its imports."""

import json
import os
import sys
from pathlib import Path

import nbdev.test
from execnb.shell import CaptureShell
from fastcore.xtras import obj2dict
from places import ROOT

EXECUTED = ROOT / "build" / "executed"  # where `make docs` looks for results


class KeepingShell(CaptureShell):
    "A shell that keeps the notebook it has run, with its outputs"

    ran = None

    def run_all(self, nb, **options) -> None:
        "Run every cell"
        super().run_all(nb, **options)
        KeepingShell.ran = nb


def execute(notebook: str) -> None:
    "Run a notebook as `nbdev_test --path NOTEBOOK --n_workers 0` does; ends the process"
    sys.argv = ["nbdev_test"]
    nbdev.test.CaptureShell = KeepingShell
    nbdev.test.nbdev_test(path=notebook, n_workers=0)
    save_executed(Path(notebook), KeepingShell.ran)


def save_executed(notebook: Path, ran) -> None:
    "Write the notebook with the outputs of its run: nbdev takes directives out of what it runs"
    page = json.loads(notebook.read_text(encoding="utf-8"))
    for cell in ran.cells:
        if cell.get("outputs"):
            page["cells"][cell.idx_]["outputs"] = obj2dict(cell.outputs)
    target = EXECUTED / notebook.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(page, indent=1), encoding="utf-8")
    aside.replace(target)
