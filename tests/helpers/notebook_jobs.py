"""What the process of a notebook runs: `nbdev_test`, in a fork of a server that has done its imports."""

import sys

from nbdev.test import nbdev_test


def execute(notebook: str) -> None:
    "Run a notebook as `nbdev_test --path NOTEBOOK --n_workers 0` does; ends the process"
    sys.argv = ["nbdev_test"]
    nbdev_test(path=notebook, n_workers=0)
