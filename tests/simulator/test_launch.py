"""Launching: a job that starts its own Ray on simulated NPUs and cleans up, a full-size rehearsal, and
two nodes on one machine."""

import json
import os
import subprocess
import sys

import pytest
from ray.util import get_node_ip_address
from whole_runs import preloaded, tell

from cookbook_npu.cluster.launch import (
    RAY_ENV,
    Node,
    address_env,
    end_process,
    follow_log,
    job_state,
    launch_job,
    make_job,
    prepare_relaunch,
    ray_head_command,
    ray_worker_command,
    started_at,
    stop_job,
    wait_for_head,
)
from cookbook_npu.cluster.ray_cluster import (
    ensure_token,
    remove_session_folder,
    session_folder,
)
from cookbook_npu.errors import RoleError
from cookbook_npu.npu.device import free_port
from cookbook_npu.rollout.vllm import missing_reason


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_starts_ray_waits_for_its_machines_and_leaves_nothing(tmp_path):
    "The run sees the NPUs of both nodes and the token; when it ends, Ray ends and the exit code is kept"
    code = (
        "import os, ray; ray.init(address=os.environ['RAY_ADDRESS'], log_to_driver=False); "
        "print('NPUs', ray.cluster_resources()['NPU'])"
    )
    # Ray admits no second node on the loopback interface
    node = Node(get_node_ip_address(), 2, free_port())
    words = [sys.executable, "-c", code]
    job = launch_job(make_job(tmp_path, "test-laptop", words, None, node, nodes=2))
    text = ""
    other = None
    try:
        for piece in follow_log(job):
            text += piece
            if other is None and "2 of 4 NPUs have joined" in text:
                with open(tmp_path / "other.log", "wb") as log:
                    other = subprocess.Popen(
                        ray_worker_command(node, 2),
                        stdout=log,
                        stderr=log,
                        env=os.environ | RAY_ENV,
                        start_new_session=True,
                    )
    finally:
        assert other is not None, text[-3000:]
        end_process(other.pid, started_at(other.pid))
        other.wait()
    assert "NPUs 4.0" in text, text[-2000:] + (tmp_path / "other.log").read_text()[-2000:]
    assert (job.exit_code(), job_state(job)) == (0, "succeeded")
    processes = subprocess.run(["ps", "-eo", "stat=,args="], capture_output=True, text=True)
    alive = [line for line in processes.stdout.splitlines() if not line.startswith("Z")]
    assert not [line for line in alive if str(node.port) in line]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    "COOKBOOK_JOB_SERVER" not in os.environ,
    reason="COOKBOOK_JOB_SERVER=1 and `pip install cookbook-npu[jobs]`",
)
def test_a_job_server(tmp_path, monkeypatch):
    "Submitted, followed, refused the second time, stopped, launched again under its id"
    for name, value in (RAY_ENV | address_env("127.0.0.1")).items():
        monkeypatch.setenv(name, value)
    ensure_token()
    node = Node("127.0.0.1", 2, free_port())
    folder = session_folder()
    dashboard_port = free_port()
    url = f"http://127.0.0.1:{dashboard_port}"
    words = ray_head_command(node, folder, dashboard=True)
    words += ["--dashboard-port", str(dashboard_port)]
    with open(tmp_path / "ray.log", "wb") as log:
        head = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for_head(folder, head)
        words = ["printenv", "RAY_ADDRESS", "HCCL_BUFFSIZE"]
        job = make_job(tmp_path, "test-910b", words, url, node)
        launch_job(job, {"HCCL_BUFFSIZE": "200"})
        assert f"127.0.0.1:{node.port}\n200\n" in "".join(follow_log(job))
        assert job_state(job) == "succeeded"
        with pytest.raises(RoleError, match="already exists"):
            launch_job(job)
        other = launch_job(make_job(tmp_path, "test-910b", ["sleep", "300"], url, node))
        assert stop_job(other)
        assert job_state(other) == "stopped"
        launch_job(prepare_relaunch(other, ["echo", "going-on"]))
        assert "going-on" in "".join(follow_log(other))
        assert job_state(other) == "succeeded"
    finally:
        end_process(head.pid, started_at(head.pid))
        remove_session_folder(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_full_size_rehearsal(tmp_path):
    """TP 2, DP 2, two engines of 2 on simulated NPUs, 256 samples, the real roles' variables: trainer and
    engines agree. The preset's eight NPUs take 160 s of two cores: COOKBOOK_REHEARSAL_DEVICES=8"""
    devices = int(os.environ.get("COOKBOOK_REHEARSAL_DEVICES", "4"))
    code = "import sys; from cookbook_npu.cli import main; main()"
    words = [sys.executable, "-c", code, "launch", "qwen3_4b_colocate", "--rehearse"]
    words += ["--runs", str(tmp_path)]
    words += ["-p", "overrides", json.dumps({"placement.devices": devices})]
    env = preloaded()
    env.pop("RAY_ADDRESS", None)
    out = subprocess.run(words, capture_output=True, text=True, timeout=850, env=env)
    assert out.returncode == 0, out.stdout[-2000:] + out.stderr[-2000:]
    (folder,) = tmp_path.glob("rehearsal-*")
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert row["train_rollout_logprob_abs_diff"] < 1e-4
    # rewards differ, so there is a gradient, and the last lines say what was tried
    assert row["grad_norm"] > 0 and row["zero_advantages"] < 1
    assert "rehearsed: processes and groups on" in out.stdout
    assert "not rehearsed: your data and tokenizer" in out.stdout
    assert row["memory/free_after_sleep"] > row["memory/free_before_sleep"]
    rollout = json.loads((folder / "config.json").read_text())["rollout"]
    stands_in = "the transformers engine stands in for engines of 2" in out.stdout
    if missing_reason():
        assert stands_in and rollout["engine"] == "transformers"
        return
    assert not stands_in
    assert (rollout["engine"], rollout["devices_per_engine"]) == ("vllm", 2)
    assert len(list((folder / "logs").glob("rollout*.log"))) == devices


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_of_four():
    "Ranks fill one node after the other; a killed node is named; a node that joins is used"
    found = tell("two_nodes.py")
    first = found["slots"][0][0]
    second = found["slots"][4][0]
    assert first != second
    assert found["slots"] == [
        [node, device] for node in (first, second) for device in range(4)
    ]
    assert found["ranks"] == [[rank, *slot] for rank, slot in enumerate(found["slots"])]
    rank = 0 if found["killed"] == first else 4
    failure = found["failure"]
    assert f"teller rank {rank} of 8: where(): the process died with its machine" in failure
    assert f"(Ray node {found['killed'][:8]})" in failure
    assert found["after"] == 8
