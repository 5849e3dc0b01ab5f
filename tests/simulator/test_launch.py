"""Launching: a job that starts its own Ray on simulated NPUs and cleans up, and a full-size rehearsal."""

import json
import os
import subprocess
import sys

import pytest
from ray.util import get_node_ip_address
from whole_runs import preloaded

from cookbook_npu.cluster.launch import (
    RAY_ENV,
    Node,
    end_process,
    follow_log,
    job_state,
    launch_job,
    make_job,
    ray_worker_command,
)
from cookbook_npu.config import load_config
from cookbook_npu.npu.device import free_port
from cookbook_npu.plan.plan import model_name
from cookbook_npu.recipes import RECIPES
from cookbook_npu.rollout.vllm import has_cpu_vllm

pytestmark = pytest.mark.lane("devices")

# a node that ends does not wait 30 s for a head that has ended before it
OTHER_MACHINE = {
    "HCCL_SOCKET_IFNAME": "eth1",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}
# Ray gives up its own start after 30 s, which a busy machine exceeds. A node that had started is not
# started again, and on SIGTERM the shell waits until the node has ended.
JOIN = """trap 'kill $!; wait $!; exit' TERM
for i in 1 2 3; do "$@" & wait $!; grep -q "Ray runtime started" "$0" && break; done"""


@pytest.mark.timeout(600)
def test_a_job_starts_ray_waits_for_its_machines_and_leaves_nothing(tmp_path):
    """The run sees the NPUs of both nodes and the token; when it ends, Ray ends and the exit code is kept.

    Workers of the other machine have its own network interface, and what only the first one exports."""
    code = """
import os, pathlib, ray, sys, time
from cookbook_npu.cluster.environment import apply_env, worker_env

ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
print("NPUs", ray.cluster_resources()["NPU"])

@ray.remote(resources={"NPU": 2})
def interfaces(env, own):
    apply_env(env)
    own.touch()
    while len(list(own.parent.glob("task*"))) < 2:  # the second one goes to the other node
        time.sleep(0.1)
    return os.environ["HCCL_SOCKET_IFNAME"], os.environ["TP_SOCKET_IFNAME"]

tasks = [pathlib.Path(sys.argv[1], f"task{n}") for n in range(2)]
print(sorted(ray.get([interfaces.remote(worker_env(), own) for own in tasks])))
print("job", os.environ["COOKBOOK_NPU_JOB"])
"""
    shell = os.environ | {"HCCL_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
    # Ray admits no second node on the loopback interface
    node = Node(get_node_ip_address(), 2, free_port())
    words = [sys.executable, "-c", code, str(tmp_path)]
    job = make_job(tmp_path, "test-laptop", words, None, node, nodes=2)
    launch_job(job, shell)
    text = ""
    other = None
    try:
        for piece in follow_log(job):
            text += piece
            if other is None and "2 of 4 NPUs have joined" in text:
                with open(tmp_path / "other.log", "wb") as log:
                    other = subprocess.Popen(
                        ["sh", "-c", JOIN, log.name, *ray_worker_command(node, 2)],
                        stdout=log,
                        stderr=log,
                        env=os.environ | RAY_ENV | OTHER_MACHINE,
                        start_new_session=True,
                    )
    finally:
        assert other is not None, text[-3000:]
        end_process(other)
    assert "NPUs 4.0" in text, text[-2000:] + (tmp_path / "other.log").read_text()[-2000:]
    assert "[('eth0', 'eth0'), ('eth1', 'eth0')]" in text, text[-2000:]
    assert f"job {job.id} --runs {tmp_path}" in text
    assert (job.exit_code(), job_state(job)) == (0, "succeeded")
    processes = subprocess.run(["ps", "-eo", "stat=,args="], capture_output=True, text=True)
    alive = [line for line in processes.stdout.splitlines() if not line.startswith("Z")]
    assert not [line for line in alive if str(node.port) in line]


# pictures, turns and a critic; all recipes, with their own devices, in a lane
REHEARSED = {
    "qwen3_vl_8b_ppo": {"placement.devices": 1, "parallel.tensor": 1},
}
ALL_DEVICES = "COOKBOOK_REHEARSAL_DEVICES" in os.environ


@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", RECIPES if ALL_DEVICES else REHEARSED)
def test_rehearsal(tmp_path, recipe):
    """Samples of the real batch size on simulated NPUs with the variables of the real roles: trainer and
    engines agree. COOKBOOK_REHEARSAL_DEVICES=8 takes every recipe and its own devices, minutes each"""
    smaller = {} if ALL_DEVICES else REHEARSED[recipe]
    code = "import sys; from cookbook_npu.cli import main; main()"
    words = [sys.executable, "-c", code, "launch", recipe, "--rehearse"]
    words += ["--runs", str(tmp_path)]
    if smaller:
        words += ["-p", "overrides", json.dumps(smaller)]
    env = preloaded()
    env.pop("RAY_ADDRESS", None)
    out = subprocess.run(words, capture_output=True, text=True, timeout=850, env=env)
    assert out.returncode == 0, out.stdout[-2000:] + out.stderr[-2000:]
    (folder,) = tmp_path.glob("rehearsal-*")
    (row,) = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    config = load_config(folder / "config.json")
    given = {"model": model_name(recipe), "prompt_data": "(prompts)"}
    real = RECIPES[recipe]("910b", **given, overrides=smaller)
    assert config.optim.cpu_offload == real.optim.cpu_offload
    assert config.model.dtype == real.model.dtype == "bfloat16"
    # rewards differ, so there is a gradient, and the last lines say what was tried
    assert row["grad_norm"] > 0 and row.get("zero_advantages", 0) < 1
    assert ("critic/value_loss" in row) == real.has_critic
    assert out.stdout.count("step 1/1  ") == 1
    assert "rehearsed: processes and groups on" in out.stdout
    assert "not rehearsed: your data and tokenizer" in out.stdout
    if real.is_sft:
        return  # samples nothing
    assert row["train_rollout_logprob_abs_diff"] < 0.02
    first = json.loads(next(folder.rglob("samples/step_*.jsonl")).open().readline())
    assert bool(first.get("images")) == recipe.startswith("qwen3_vl")
    if real.rollout.engine == "transformers":
        assert config.rollout.engine == "transformers"
        return
    replaces = "the transformers engine replaces engines of" in out.stdout
    # on a CPU vLLM does not repack experts after a weight update
    assert replaces == (not has_cpu_vllm() or config.parallel.expert > 1)
    if replaces:
        assert config.rollout.engine == "transformers"
        return
    assert config.rollout.engine == "vllm"
    assert config.rollout.devices_per_engine == real.rollout.devices_per_engine
    logs = list((folder / "logs").glob("rollout*.log"))
    assert len(logs) == len(config.engine_devices)
