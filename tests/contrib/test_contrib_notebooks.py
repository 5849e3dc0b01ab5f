"""The notebooks of contrib, which tests/notebooks leaves out."""

import subprocess
import sys

import pytest
from places import ROOT


@pytest.mark.parametrize("number", ["00", "01"])
def test_notebook(number):
    (notebook,) = (ROOT / "nbs" / "contrib").glob(f"{number}_*.ipynb")
    code = f"from notebook_jobs import execute; execute({str(notebook)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)
