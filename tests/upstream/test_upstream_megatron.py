"""Records of Megatron that the common contract test does not exercise, on real sources."""

import os

import pytest
from places import HELPERS
from proof import SIMULATED_CUDA
from ranks import run_ranks
from upstream_sources import checkout, wheel

pytestmark = pytest.mark.lane("upstream")

TARGETS = HELPERS / "upstream_megatron_targets.py"
MEGATRON = ("core_v0.15.3", "core_v0.16.1", "3714d81d")


def megatron(ref):
    "The sources of a Megatron: a release from its wheel"
    if ref.startswith("core_v"):
        return wheel("megatron-core", ref.removeprefix("core_v"))
    return checkout(f"Megatron-LM@{ref}")


def run(function, ranks, *folders, bootstrap="trainer", **kwargs):
    env = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    return run_ranks(
        f"{TARGETS}:{function}",
        ranks,
        kwargs=kwargs,
        bootstrap=bootstrap,
        env=env,
        timeout=300,
    )


@pytest.mark.parametrize("ref", MEGATRON)
def test_nothing_of_megatron_stays_compiled(ref):
    (found,) = run(
        "fuser",
        1,
        megatron(ref),
        bootstrap=SIMULATED_CUDA,
    )
    assert found["before"] == found["without"] > 20 and found["needed_again"]
    assert found["state"] == "applied" and found["with"] == 0
    assert found["closures"] == "identity_decorator" and found["shape"] == (2, 4)
