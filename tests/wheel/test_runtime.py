"""Memory, devices and names of the real torch_npu, and what cookbook_npu.npu.device makes of it."""

import ast
import os
import subprocess
import sys

import pytest
from npu_wheel import build
from places import PACKAGE

MIB = 1 << 20


@pytest.fixture(scope="module")
def facts(lane):
    return lane("facts")[0]


def test_out_of_memory_is_torchs_own(lane):
    (seen,) = lane("out_of_memory", env={"COOKBOOK_NPU_SIM_MEMORY": str(64 * MIB)})
    total = 64 * MIB
    assert seen["before"] == (total, total) and seen["emptied"] == (total, total)
    assert total - 52 * MIB <= seen["held"][0] <= total - 48 * MIB
    assert seen["cached"] == seen["held"], "freed memory stays with the caching allocator"
    assert (
        seen["error"][0] == "OutOfMemoryError"
        and "NPU out of memory. Tried to allocate" in seen["error"][1]
    )


def test_pinned_memory_is_cached_until_host_empty_cache(lane):
    pinned, kept, emptied = lane("host_memory")[0]
    assert pinned and kept >= 4 * MIB and emptied == 0


def test_device_recognises_the_real_one(lane):
    (seen,) = lane("accelerator", env={"ASCEND_RT_VISIBLE_DEVICES": "2,5"})
    assert (seen["name"], seen["count"], seen["simulated"]) == ("NPU", 2, False)
    # simulated, real, CUDA: who asks for the simulated one gets it first
    assert seen["states"] == ["absent", "usable", "absent"]
    assert seen["held"] == seen["peak"] >= 4 * MIB and seen["after"] == (0, 0)


def test_names_that_the_project_says_are_missing(facts):
    missing = {"OutOfMemoryError", "reset_max_memory_reserved", "set_capacity"}
    assert {name for name, there in facts["names"].items() if not there} == missing


def test_every_name_that_the_simulator_offers(lane):
    ours = {"set_capacity", "DeviceProperties"}  # control of the simulation, its type
    offered = []
    for module, file in (("torch_npu.npu", "runtime"), ("torch_npu", "fused")):
        tree = ast.parse((PACKAGE / "npu" / "simulator" / f"{file}.py").read_text())
        (names,) = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        offered += [f"{module}.{name}" for name in names if name not in ours]
    assert len(offered) > 50
    assert lane("names", kwargs=dict(wanted=offered)) == [[]]


def test_capability_comes_from_the_environment_only(lane, facts):
    assert facts["capability"] is None
    assert lane("facts", env={"TORCH_NPU_DEVICE_CAPABILITY": "8.0"})[0]["capability"] == (
        8,
        0,
    )


def test_memory_stats_have_the_names_that_we_read(facts):
    ours = {
        f"{kind}_bytes.all.{when}"
        for kind in ("allocated", "reserved")
        for when in ("current", "peak")
    }
    assert ours | {"num_ooms"} <= set(facts["memory_stats"])


def test_what_it_says_about_itself(facts):
    assert facts["rng_bytes"] == 16, (
        "a seed and an offset: states of the simulated NPU are longer and do not fit"
    )
    assert {"name", "total_memory"} <= set(facts["properties"])
    assert facts["types"] == "torch.npu.FloatTensor"
    assert facts["batch_isend_irecv"] == "torch_npu.distributed.distributed_c10d"


@pytest.mark.parametrize("interactive", [False, True])
def test_task_queue_is_switched_off_in_notebooks(lane, interactive):
    """torch_npu takes a process with ipykernel for interactive and overrides the variable."""
    code = "import sys, types, os\n"
    code += "sys.modules['ipykernel'] = types.ModuleType('ipykernel')\n" * interactive
    code += "import torch, torch_npu; print('queue', os.environ['TASK_QUEUE_ENABLE'])"
    set_up = {
        k: v
        for k, v in {**os.environ, **build.environment(), "TASK_QUEUE_ENABLE": "2"}.items()
        if v is not None
    }
    command = [sys.executable, "-W", "ignore", "-c", code]
    out = subprocess.run(
        command, env=set_up, capture_output=True, text=True, check=True
    ).stdout
    assert out.split()[-1] == ("0" if interactive else "2")


def test_memory_is_asked_with_a_context(lane):
    ((error, (free, total), current),) = lane("first_question")
    assert error and "context is empty" in error[1]
    assert 0 < free <= total and current == 0
