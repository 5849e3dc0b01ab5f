"""Every notebook as a test, each in a process of its own: `pytest tests/notebooks.py -k 'train and memory'`

`nbdev_test` with several workers uses a process for many notebooks; ours load a device and patch torch, which is once per process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

FOUND = sorted(p.relative_to(ROOT / "nbs") for p in (ROOT / "nbs").rglob("*.ipynb"))
# other tests of this process import Ray, which sets variables
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
    "OMP_NUM_THREADS": "1"
}
NOTEBOOKS = [str(p) for p in FOUND if p.parent.name != ".ipynb_checkpoints"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_notebook(notebook):
    command = [
        str(Path(sys.executable).parent / "nbdev_test"),
        "--path",
        str(ROOT / "nbs" / notebook),
        "--n_workers",
        "0",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
