"""Every record against real upstream sources: probe, apply, verify, undo (tests/README.md
says how).
"""

import os

import pytest
from places import HELPERS
from ranks import run_ranks
from upstream_sources import checkout

from cookbook_npu.npu.shims.registry import report_table

COMBINATIONS = [
    ("Megatron-LM@core_v0.15.3",),
    ("Megatron-LM@core_v0.16.1",),
    ("Megatron-LM@3714d81d",),
    ("MindSpeed@core_r0.15.3", "Megatron-LM@core_v0.15.3"),
    ("MindSpeed@core_r0.16.0", "Megatron-LM@core_v0.16.1"),
    ("MindSpeed@dev", "Megatron-LM@3714d81d"),
]
# MindSpeed puts something of its own in these places, later; each shim still verifies
OVERWRITTEN = {"megatron.rng_state", "megatron.swiglu", "torch.cuda_to_npu"}
OVERWRITTEN |= {"torch.device_capability", "torch.profiler_ranges"}
OVERWRITTEN |= {"torch.tensor_type_names", "torch.unsigned_views"}
pytestmark = pytest.mark.lane("upstream")


@pytest.fixture(scope="module", params=COMBINATIONS, ids="+".join)
def found(request):
    path = os.pathsep.join(map(str, [HELPERS, *map(checkout, request.param)]))
    target = f"{HELPERS / 'upstream_targets.py'}:contract"
    ranks = run_ranks(
        target,
        2,
        kwargs={"tensor": 2},
        bootstrap="trainer",
        env={"PYTHONPATH": path},
        timeout=400,
    )
    print(report_table(ranks[0]["report"], 140))
    return request.param, ranks[0]


def test_it_ran_on_these_sources(found):
    names, answer = found
    assert answer["sources"]["megatron.core"].startswith(str(checkout(names[-1])))
    assert answer["history"][1][0] < answer["history"][0][0], (
        "the tiny model does not learn"
    )


def test_no_record_refuses(found):
    refused = [
        row
        for row in found[1]["report"]
        if row["state"] not in ("applied", "not needed", "not entered")
    ]
    assert not refused, refused


def test_undo_restores_every_place_and_the_defect_is_seen_again(found):
    undone = found[1]["undone"]
    assert undone, "no record applied"
    left = {name for name, row in undone.items() if row["left"]}
    assert left <= (OVERWRITTEN if len(found[0]) == 2 else set()), undone
    wrong = {
        name: row
        for name, row in undone.items()
        if not (row["restored"] and (row["needed_again"] or name in left))
    }
    assert not wrong, wrong
