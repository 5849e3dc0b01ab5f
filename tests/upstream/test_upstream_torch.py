"""The records of shims.torch, shims.distributed and shims.checkpoints against the real sources of slime
and Megatron-LM.
"""

import os

import pytest
from places import HELPERS
from proof import SIMULATED_CUDA
from ranks import run_ranks
from upstream_sources import checkout

pytestmark = pytest.mark.lane("upstream")


def run(
    function,
    ranks=1,
    bootstrap=SIMULATED_CUDA,
    first="",
    **kwargs,
):
    env = {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(first), str(HELPERS), os.environ.get("PYTHONPATH", "")])
        )
    }
    return run_ranks(
        f"upstream_torch_jobs:{function}",
        ranks,
        bootstrap=bootstrap,
        kwargs=kwargs,
        env=env,
        timeout=300,
    )


def test_slime_builds_its_private_group_with_nccl():
    assert (
        run("slime_private_group", 2, checkout=str(checkout("slime@v0.2.2")))
        == [(2.0, "hccl")] * 2
    )


def test_slime_fingerprints_its_backups():
    assert run("slime_fingerprints", checkout=str(checkout("slime@v0.2.2"))) == [
        (True, True)
    ]


def test_slime_gives_pinned_memory_back():
    ((before, after),) = run("slime_clear_memory", checkout=str(checkout("slime@v0.2.2")))
    assert before >= 8 << 20 and after == 0


@pytest.mark.parametrize(
    "ref, lacking", [("core_v0.15.3", "Signals"), ("core_v0.16.1", ""), ("3714d81d", "")]
)
def test_checkpoint_records(ref, lacking):
    core = checkout(f"Megatron-LM@{ref}")
    found = run(
        "checkpoint_records", bootstrap="upstream_torch_jobs:bootstrap_core", first=core
    )[0]
    where, states, verified, undone = found
    assert where.startswith(str(core)), (
        "the installed Megatron was imported instead of the checkout"
    )
    state, detail = states["megatron.safe_globals"]
    assert (state, lacking in detail) == ("applied" if lacking else "not needed", True), (
        detail
    )
    assert (
        states["megatron.safe_objects"][0]
        == states["megatron.safe_metadata"][0]
        == "applied"
        and verified
    )
    assert undone["megatron.safe_objects"] == undone["megatron.safe_metadata"] == "undone"
