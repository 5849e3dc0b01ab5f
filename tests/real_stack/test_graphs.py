"""Captured graphs of the real vllm-ascend and torch_npu: right after every weight update and sleep, and each
seeded fault is named. COOKBOOK_GRAPHS=all asks for every mode, family and data type.
"""

import os
import shutil
from pathlib import Path

import pytest
from test_engine import TWO_ENGINES, suite

from cookbook_npu.npu.stack.machine import GRAPH_FUNCTIONS, read_graph_functions
from cookbook_npu.plan.memory import graphs_of_a_size

METHODS = ("reload_weights", "update_weights", "load_weights")
more = pytest.mark.skipif(
    os.environ.get("COOKBOOK_GRAPHS") != "all", reason="set COOKBOOK_GRAPHS=all"
)
ENGINE_FAULTS = {
    "parameter moved": "model.layers.1.mlp.down_proj.weight moved in a weight update",
    "audit": "model.layers.1.mlp.down_proj.weight: moved",
    "parameter laid out anew": "down_proj.weight was laid out anew in a wake-up",
    "buffer moved": "rotary_emb.cos_sin_cache moved in a wake-up",
    "cache moved": "cache 0.0 moved in a wake-up",
    "unmapped under a running copy": "launches that touch it are unfinished; the first: aten::copy_",
    "replayed while asleep": "asleep, its memory is unmapped",
    "input moved": "under captured graphs",
}
RUNTIME_FAULTS = {
    "freed": "(aten::add) reads",
    "waits for nobody": "graph 2 waits for a value that nobody has written",
    "updated by another operator": "a task group's aten::add is updated by aten::mul",
    "read by the host within a capture": "item() within a capture",
}


def check(found, note, case, tolerance=1e-4):
    """Every cell: log-probs of a teacher-forced pass, or in bfloat16 of the engine without graphs; addresses
    as captured, replays except beyond all sizes; a line for the table of the lane"""
    assert found["graphs"] and found["hazards"] == []
    wrong = {
        k: v for k, v in found["cells"].items() if v["gap"] > tolerance or v["problems"]
    }
    assert wrong == {}
    replays = {name: cell["replays"] for name, cell in found["cells"].items()}
    assert {name for name, n in replays.items() if not n} <= {"start, sizes that miss"}
    gap = max(cell["gap"] for cell in found["cells"].values())
    texts = (
        f"{len(replays)} cells",
        f"{len(found['graphs'])} graphs",
        f"{sum(replays.values())} replays",
    )
    note(f"graphs: {case}", f"{', '.join(texts)}, largest difference {gap:.1e}")


def test_graphs_are_right_after_every_update_and_sleep(stack, models, record_property):
    found = stack.job("graphs:matrix", folder=models, faults=True)
    faults, after = found.pop("faults"), found["cells"].pop("eager after the fault")
    check(found, record_property, "FULL_DECODE_ONLY, qwen3, float32")
    assert after["gap"] < 1e-4 and not after["replays"]
    assert {name.split(",")[0] for name in found["cells"]} == {"start", *METHODS}
    assert len(found["graphs"]) == 4 and found["updates"] > 100
    assert "model.layers.0.self_attn.rotary_emb.cos_sin_cache" in found["names"]
    assert "cache 1.1" in found["names"]
    # faults that were put in, one at a time
    assert faults.pop("graphs that are right") == ""
    missed = {k: v for k, v in faults.items() if ENGINE_FAULTS[k] not in v}
    assert missed == {} and sorted(faults) == sorted(ENGINE_FAULTS)


def test_runtime_names_each_fault(stack):
    found = stack.job("graphs:runtime_faults")
    assert {k: v for k, v in found.items() if RUNTIME_FAULTS[k] not in v} == {}
    assert sorted(found) == sorted(RUNTIME_FAULTS)
    (race,) = stack.job("graphs:races")
    assert "uses on another stream, and does not wait for it" in race


def blind(stack, folder: Path) -> dict[str, str]:
    "Variables for a CANN without the functions of `GRAPH_FUNCTIONS`: other names stand in its library"
    shutil.copytree(
        Path(stack.variables["ASCEND_HOME_PATH"], "lib"), folder / "lib", symlinks=True
    )
    library = folder / "lib" / "libfake_cann.so"
    code = library.read_bytes()
    for name in GRAPH_FUNCTIONS:
        code = code.replace(name.encode() + b"\0", name.encode()[:-1] + b"_\0")
    library.write_bytes(code)
    return {"LD_LIBRARY_PATH": f"{folder}/lib"}


def test_cann_without_waits_is_found(stack, models, tmp_path):
    "torch_npu then drops a graph's wait for its sequence lengths without an error"
    here = Path(stack.variables["ASCEND_HOME_PATH"])
    assert read_graph_functions(Path("/"), str(here)) == set(GRAPH_FUNCTIONS)
    variables = blind(stack, tmp_path)
    assert read_graph_functions(Path("/"), str(tmp_path)) == set()
    found = stack.job("graphs:without_values", folder=models, env=variables)
    assert found["wrong"] > 0.05 and "under captured graphs" in found["fault"]
    assert not found["graphs"] and found["after"] < 1e-4


@pytest.mark.parametrize("slots", [1, 2])
def test_graphs_with_adapters(stack, models, record_property, slots):
    "One adapter, and two tenants in one batch"
    found = stack.job("graphs:adapters", folder=models, slots=slots)
    assert found["cells"].pop("against another adapter")["gap"] > 0.05
    check(found, record_property, "two tenants in a batch" if slots == 2 else "an adapter")
    assert found["stack"] in found["names"]


@more
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
def test_other_modes(stack, models, record_property, mode):
    found = stack.job("graphs:matrix", folder=models, mode=mode)
    check(found, record_property, f"{mode}, qwen3, float32")  # 4 sizes, 2 layers
    assert len(found["graphs"]) == 4 * graphs_of_a_size(mode, 2)


@more
@pytest.mark.parametrize(
    ("family", "dtype"),  # vllm-ascend's kernels of gated delta nets know bfloat16 alone
    [(f, "float32") for f in ("qwen3_moe", "qwen3_vl")]
    + [(f, "bfloat16") for f in ("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_5")],
)
def test_other_models(stack, models, record_property, family, dtype):
    found = stack.job("graphs:matrix", folder=models, family=family, dtype=dtype)
    tolerance = 1e-3 if dtype == "bfloat16" else 1e-4
    check(found, record_property, f"FULL_DECODE_ONLY, {family}, {dtype}", tolerance)


@more
def test_native_transfer_engine(stack, models, record_property):
    "Handles of single weights, as the product sends them, and vllm-ascend's packed ones"
    found = stack.job("graphs:packed", folder=models)
    check(found, record_property, "npu_ipc, single weights and packed")
    assert {"npu_ipc, sleep 2, 2", "packed"} <= set(found["cells"])


@more
@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl"])
def test_engine_keeps_every_promise_with_graphs(stack, models, family):
    from conformance import IMAGE_CHECKS

    checks = [check.__name__ for check in IMAGE_CHECKS] if family == "qwen3_vl" else suite()
    checks = [name for name in checks if name not in TWO_ENGINES]
    settings = {"family": family, "checks": checks, "graphs": "FULL_DECODE_ONLY"}
    found = stack.job("conformance", folder=models, **settings)
    assert {name: error for name, error in found.items() if error} == {} and found


@more
def test_two_ranks(stack, models, record_property):
    "Collectives are captured, too: a replay meets the other rank"
    ranks = {"target": "real_stack.graphs:ranked", "count": 2, "bootstrap": "rollout"}
    for found in stack.job("ranks", **ranks, kwargs={"folder": str(models)}):
        check(found, record_property, "FULL_DECODE_ONLY, qwen3, float32, TP2")
