"""Where the tests find upstream's sources.

What the package index serves comes from its wheels, into the user's cache; the rest from COOKBOOK_UPSTREAM,
a folder of checkouts named Project@ref.
"""

import os
from pathlib import Path

import package_index
import pytest

REASON = "set COOKBOOK_UPSTREAM to a folder of upstream checkouts (see nbs/testing/03_proof.ipynb)"


def checkout(name: str) -> Path:
    "The folder of a checkout; skips where it is not at hand"
    folder = os.environ.get("COOKBOOK_UPSTREAM")
    if not folder:
        pytest.skip(REASON)
    path = Path(folder) / name
    if not path.is_dir():
        pytest.skip(f"{folder} has no {name}")
    return path


def wheel(name: str, version: str, suffix: str = "") -> Path:
    """The unpacked wheel of a release, or its files whose names end so; skips where the index does not answer
    and nothing is in the cache"""
    try:
        return package_index.sources(name, version, suffix)
    except OSError as error:
        pytest.skip(f"the wheel of {name} {version} cannot be had: {error}")
