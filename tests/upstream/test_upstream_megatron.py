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


@pytest.mark.parametrize(
    "mindspeed, ref",
    [
        ("fc63de5c", "3714d81d"),
        ("core_r0.15.3", "core_v0.15.3"),
        ("core_r0.16.0", "core_v0.16.1"),
    ],
)
def test_mindspeed_grouped_linears_are_split_along_their_axis(mindspeed, ref):
    folders = checkout(f"MindSpeed@{mindspeed}"), megatron(ref)
    for found in run("grouped", 2, folders[1], folder=str(folders[0])):
        assert found["shapes"] == [(4, 4), (4, 4)] and found["state"] == "applied"
        assert found["axes"] == ([1, 0], [0, 1], [1, 0])
