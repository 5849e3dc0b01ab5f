"""The records of `npu.shims.nvidia_bridge` on the real sources of Megatron-Bridge."""

import pytest
from places import HELPERS
from upstream_sources import checkout, wheel

from cookbook_npu.testing.ranks import run_ranks

pytestmark = pytest.mark.slow

TARGET = f"{HELPERS / 'upstream_bridge_targets.py'}:contract"
NAMES = {"layer_names", "te_linear", "pickling", "empty_tasks"}
EXPECTED = {  # what each version needs once Megatron's layers carry MindSpeed's names
    "0.3.1": NAMES | {"fused_norm", "deepstack"},
    "main": NAMES | {"fusion_default"},
}


@pytest.fixture(scope="module", params=EXPECTED)
def found(request):
    if request.param == "main":
        root = checkout("Megatron-Bridge@main") / "src" / "megatron" / "bridge"
    else:
        root = wheel("megatron-bridge", request.param) / "megatron" / "bridge"
    return request.param, run_ranks(
        TARGET, 1, kwargs={"root": str(root)}, bootstrap="trainer", timeout=300
    )[0]


def test_each_version_needs_what_it_needs(found):
    version, answer = found
    states = {
        name.removeprefix("nvidia_bridge."): row for name, row in answer["states"].items()
    }
    for name, row in states.items():
        print(version, name, *row)
    assert {name for name, (state, _) in states.items() if state == "applied"} == EXPECTED[
        version
    ], states
    assert {state for state, _ in states.values()} <= {"applied", "not needed"}


def test_applied_records_verify_and_undo(found):
    _, answer = found
    assert answer["verified"] and all(answer["verified"].values())
    assert all(again is True for again in answer["needed_again"].values()), answer[
        "needed_again"
    ]


def test_deepstack_features_get_their_gradient(found):
    """Both layers double; a feature that enters after the first of two is doubled once more."""
    version, answer = found
    assert answer["deepstack"] == [[2.0] * 8, [1.0] * 8]
    assert answer["deepstack_without"] == (
        "TypeError" if version == "0.3.1" else answer["deepstack"]
    )


def test_masks_of_integers_and_of_booleans_give_the_same_positions(found):
    """vime met a version where an integer mask was used as an index; neither of these is one."""
    assert found[1]["mask_types_agree"]


def test_most_of_it_is_the_real_module(found):
    version, answer = found
    taken = [name for name, how in answer["how"].items() if how != "imported"]
    assert len(taken) <= (0 if version == "0.3.1" else 4), answer["how"]
