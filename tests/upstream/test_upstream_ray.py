"""The Ray adapter under real foreign code: slime v0.2.2, as published, on a cluster that has NPUs and no
GPUs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import HELPERS, ROOT
from upstream_sources import checkout

pytestmark = pytest.mark.lane("upstream")

JOBS = HELPERS / "simulator_jobs"


@pytest.fixture
def slime():
    return checkout("slime@v0.2.2")


def run(slime: Path, *args: str) -> subprocess.CompletedProcess:
    paths = [
        str(JOBS),
        str(slime),
        str(ROOT),
        os.environ.get("PYTHONPATH", ""),
    ]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *args], env=env, capture_output=True, text=True, timeout=300
    )


def test_slime_reserves_twelve_npus_in_order(slime):
    done = run(slime, str(JOBS / "slime_placement.py"), "12")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.split("RESULT ")[1])
    assert found["actor"] == list(range(12)), "ids are numbers, and 2 comes before 10"
    assert found["rollout"] == list(range(6, 12))
    assert found["local"] == found["at"], (
        "with NOSET a worker of slime knows its device by the number of the machine"
    )


WITHOUT = """
import slime_placement, cookbook_npu.npu.shims.ray as adapter
slime_placement.sys.meta_path.append(slime_placement.Finder())
import os, ray, tempfile
from pathlib import Path
from cookbook_npu.cluster.ray_cluster import LOOPBACK, init_options
from slime.ray.placement_group import placement_group
os.environ[LOOPBACK] = "0"
with tempfile.TemporaryDirectory(prefix="cbn-", dir="/tmp") as folder:
    ray.init(**init_options(2, "NPU", True, Path(folder)))
    print("READY", placement_group([{"GPU": 1, "CPU": 1}], strategy="PACK").wait(3))
    ray.shutdown()
"""


def test_without_the_adapter_its_bundles_are_never_ready(slime):
    done = run(slime, "-c", WITHOUT)
    assert "READY False" in done.stdout, done.stdout + done.stderr[-4000:]
