"""Who shares a process with whom.

The kernel that drives a run loads no accelerator, a trainer no vLLM, an engine no MindSpeed.
"""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.lane("runs")

KEPT_OUT = (
    "torch_npu",
    "mindspeed",
    "megatron_adaptor",
    "transformer_engine",
    "megatron",
    "mcore_bridge",
    "vllm",
    "vllm_ascend",
)
# Its modules are the torch_npu of a process that wants it.
SIMULATOR = "cookbook_npu.npu.simulator"

EVERYTHING = f"""
import importlib, json, pkgutil, sys
import cookbook_npu
modules = [m.name for m in pkgutil.walk_packages(cookbook_npu.__path__, "cookbook_npu.")]
names = [name for name in modules if not name.startswith("{SIMULATOR}")]
for name in names:
    importlib.import_module(name)
print(json.dumps([len(names), [m for m in {KEPT_OUT} if m in sys.modules]]))
"""

DRIVING = f"""
import json, os, sys, tempfile
os.environ["COOKBOOK_NPU_SIMULATE"] = "1"
from cookbook_npu.cluster.worker_group import RayWorkerGroup
from cookbook_npu.cluster.ray_cluster import Cluster
role = "{__file__}:Trainer"
with Cluster.start(devices=1, log_dir=tempfile.mkdtemp()) as cluster:
    with RayWorkerGroup.create("trainer", role, cluster, bootstrap="trainer") as group:
        worker = group.call("look")
print(json.dumps([worker, [m for m in {KEPT_OUT} if m in sys.modules]]))
"""


class Trainer:
    "A role that says what it is"

    def __init__(self, rank, world_size):
        pass

    def look(self):
        import torch

        return [
            torch.ones(1, device="npu").device.type,
            sorted(m for m in KEPT_OUT if m in sys.modules),
        ]


def last_line(code: str) -> list:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_importing_the_whole_package_loads_none_of_them():
    count, found = last_line(EVERYTHING)
    assert count > 40 and found == []


def test_the_process_that_drives_a_trainer_loads_none_of_them():
    worker, found = last_line(DRIVING)
    (device, loaded), *_ = worker
    assert (
        device == "npu"
        and {"torch_npu", "transformer_engine", "megatron"} <= set(loaded)
        and not {"vllm", "vllm_ascend"} & set(loaded)
    )
    assert found == []
