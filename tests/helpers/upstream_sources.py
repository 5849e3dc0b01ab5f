"""Where the tests find upstream's sources.

What the package index serves comes from its wheels, into the user's cache; the rest from COOKBOOK_UPSTREAM,
a folder of checkouts named Project@ref. tests/README.md says how to fill it.
"""

import os
from pathlib import Path

import package_index
import pytest

# all that tests ask for
CHECKOUTS = """Math-Verify@main Megatron-LM@core_v0.15.3 Megatron-LM@core_v0.16.1 Megatron-LM@3714d81d
MindSpeed@core_r0.15.3 MindSpeed@core_r0.16.0 MindSpeed@dev MindSpeed@fc63de5c slime@v0.2.2""".split()
REASON = "set COOKBOOK_UPSTREAM to a folder of upstream checkouts (see tests/README.md)"


def checkout(name: str) -> Path:
    "The folder of a checkout, or a folder in it; skips where it is not at hand"
    assert name.partition("/")[0] in CHECKOUTS, f"{name} is not in the list"
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
