"""Launching: a job that starts its own Ray on simulated NPUs and cleans up, a full-size rehearsal, two nodes on one machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cookbook_npu.cluster.launch import Node, follow, launch, make_job
from cookbook_npu.device import free_port


@pytest.mark.slow
def test_a_job_starts_ray_and_leaves_nothing(tmp_path):
    "The run sees the NPUs and the token; when it ends, Ray ends and the exit code is kept"
    code = (
        "import os, ray; ray.init(address=os.environ['RAY_ADDRESS'], log_to_driver=False); "
        "print('NPUs', ray.cluster_resources()['NPU'])"
    )
    node = Node("127.0.0.1", 2, free_port())
    job = launch(make_job(tmp_path, "test-laptop", [sys.executable, "-c", code], None, node))
    text = "".join(follow(job))
    assert "NPUs 2.0" in text, text[-2000:]
    assert job.exit_code() == 0
    alive = subprocess.run(["ps", "-eo", "stat=,args="], capture_output=True, text=True).stdout
    assert not [line for line in alive.splitlines() if str(node.port) in line and not line.startswith("Z")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_full_size_rehearsal(tmp_path):
    "Eight simulated NPUs, TP 2, DP 4, 256 samples, the real roles' variables: one step, trainer and engines agree"
    code = "import sys; from cookbook_npu.cli import main; main()"
    words = [sys.executable, "-c", code, "launch", "qwen3_4b_colocate", "--rehearse", "--runs", str(tmp_path)]
    out = subprocess.run(
        words, capture_output=True, text=True, timeout=850, env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    )
    assert out.returncode == 0, out.stdout[-2000:] + out.stderr[-2000:]
    (folder,) = tmp_path.glob("rehearsal-*")
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert row["train_rollout_logprob_abs_diff"] < 1e-4 and row["memory/free_after_sleep"] > row["memory/free_before_sleep"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_of_four():
    "Ranks fill one node after the other although both have one address; a killed node is named; a node that joins is used"
    script = Path(__file__).parent / "launch_jobs" / "two_nodes.py"
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=580)
    lines = [line for line in out.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, out.stderr[-3000:]
    found = json.loads(lines[0][7:])
    first, second = found["slots"][0][0], found["slots"][4][0]
    assert first != second
    assert found["slots"] == [[node, device] for node in (first, second) for device in range(4)]
    assert found["ranks"] == [[rank, *slot] for rank, slot in enumerate(found["slots"])]
    assert "teller rank" in found["failure"] and "the process died" in found["failure"]
    assert found["after"] == 8
