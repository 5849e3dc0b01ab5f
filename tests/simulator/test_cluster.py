"""Worker groups on a real Ray cluster: environments, sharing, failures, attaching, what is left behind."""

import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cookbook_npu.cluster.ray_cluster import Cluster
from cookbook_npu.cluster.worker_group import RayWorkerGroup
from cookbook_npu.config import override
from cookbook_npu.errors import ConfigError, RoleError, RoleTimeout
from cookbook_npu.npu.stack.checks import read_range
from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.train.workers import start_engine, start_trainer

pytestmark = pytest.mark.lane("devices")

ROLE = f"{__file__}:Probe"


class Probe:
    "A role that tells about its process, and misbehaves on request"

    def __init__(self, rank, world_size, fail=False):
        if fail:
            raise ValueError(f"rank {rank} refuses to start")
        self.rank, self.world_size = rank, world_size

    def sleep(self):
        "What an engine does before its first weights"

    def env(self):
        return dict(os.environ)

    def pid(self):
        return os.getpid()

    def leave_folder(self):
        "A folder among temporary files that nobody removes"
        return tempfile.mkdtemp()

    def crash_or_hang(self, rank):
        if self.rank == rank:
            import ctypes

            ctypes.string_at(0)
        threading.Event().wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    os.environ["STRAY_VARIABLE"] = "1"
    with Cluster.start(devices=2, log_dir=tmp_path_factory.mktemp("logs")) as cluster:
        yield cluster
    del os.environ["STRAY_VARIABLE"]


def test_environment_is_the_allow_list_and_the_role(cluster):
    env = {"OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "7", "LANG": None}
    with RayWorkerGroup.create("probe", ROLE, cluster, env=env, timeout=400) as group:
        for rank, seen in enumerate(group.call(Probe.env)):
            assert "STRAY_VARIABLE" not in seen and "LANG" not in seen
            expected = {
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "PYTHONHASHSEED": "7",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "ASCEND_RT_VISIBLE_DEVICES": str(rank),
            }
            assert {name: seen[name] for name in expected} == expected
        for name in ("COOKBOOK_NPU_SIM_SESSION", "MASTER_PORT"):
            assert len({env[name] for env in group.call(Probe.env)}) == 1


def test_workers_share_devices_until_they_are_full(cluster):
    with RayWorkerGroup.create("trainer", ROLE, cluster, timeout=400) as trainer:
        with RayWorkerGroup.create(
            "engine", ROLE, cluster, slots=[[0, 1]], timeout=400
        ) as engine:
            env = engine.call_rank_zero(Probe.env)
            assert env["ASCEND_RT_VISIBLE_DEVICES"] == "0,1"
            assert len(set(trainer.call(Probe.pid) + engine.call(Probe.pid))) == 3
            with pytest.raises(
                RoleTimeout,
                match=r"greedy rank 0 of 1: start\(\) did not return within 2 s",
            ):
                RayWorkerGroup.create("greedy", ROLE, cluster, slots=[0], timeout=2)
    assert cluster.worker_groups == []


def test_two_runs_on_one_machine_have_their_own_ports(cluster, monkeypatch):
    "Trainer and engine of two runs, each with one of the devices, as the session starts them"
    create = RayWorkerGroup.create

    def create_probe(name, role, *args, **options):
        return create(name, ROLE, *args, **options | {"bootstrap": None, "kwargs": {}})

    monkeypatch.setattr(RayWorkerGroup, "create", create_probe)
    real = qwen3_4b_colocate("910b", model="/m", prompt_data="/p.jsonl")
    alone = {"placement.devices": 1, "parallel.tensor": 1, "rollout.devices_per_engine": 1}
    config = override(real, alone | {"placement.trainer_env": {"TASK_QUEUE_ENABLE": "2"}})
    found = {}
    for device in (0, 1):
        run = replace(cluster, slots=cluster.slots[device : device + 1])
        with (
            start_trainer(run, config, "/m") as trainer,
            start_engine(run, config, "/m", 0) as engine,
        ):
            found |= {("trainer", device): trainer.call_rank_zero(Probe.env)}
            found |= {("engine", device): engine.call_rank_zero(Probe.env)}
    for name in ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"):
        ports = [set().union(*read_range(env[name])) for env in found.values()]
        assert len(set().union(*ports)) == sum(map(len, ports)) == 4 * 50
    assert [env["ASCEND_RT_VISIBLE_DEVICES"] for env in found.values()] == list("0011")
    cores = str(len(os.sched_getaffinity(0)))
    assert [env["OMP_NUM_THREADS"] for env in found.values()] == [cores, "1"] * 2
    assert [env.get("TASK_QUEUE_ENABLE") for env in found.values()] == ["2", None] * 2


def test_a_crash_is_reported_while_the_other_rank_hangs(cluster):
    with RayWorkerGroup.create("probe", ROLE, cluster, timeout=400) as group:
        # not that rank 0 did not return, after 400 s
        with pytest.raises(
            RoleError, match=r"probe rank 1 of 2: crash_or_hang\(\): the process died"
        ) as caught:
            group.call(Probe.crash_or_hang, 1)
        assert "in crash_or_hang" in Path(group.workers[1].log).read_text()
        assert "last lines of" in caught.value.__notes__[0]
        pids = group.pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def worker_pids() -> set[int]:
    "Worker processes of this test's clusters; other tests may run beside it"
    children = psutil.Process().children(recursive=True)
    return {process.pid for process in children if "WorkerActor" in process.name()}


def test_nothing_half_made_remains(cluster):
    before = worker_pids()
    with pytest.raises(
        RoleError,
        match=r"rank 0 of 2: Probe\(\) raised ValueError: rank 0 refuses to start",
    ):
        RayWorkerGroup.create("probe", ROLE, cluster, kwargs=dict(fail=True), timeout=400)
    with pytest.raises(ConfigError, match="has no class 'Prob'. Did you mean 'Probe'"):
        RayWorkerGroup.create("probe", ROLE[:-1], cluster, timeout=400)
    assert cluster.worker_groups == []
    assert worker_pids() <= before


ATTACH = """
import sys
from cookbook_npu.cluster.worker_group import RayWorkerGroup
from cookbook_npu.cluster.environment import load_role
from cookbook_npu.cluster.ray_cluster import Cluster
with Cluster.start(devices=1, address=sys.argv[1]) as cluster:
    assert not cluster.node.owned
    with RayWorkerGroup.create("guest", sys.argv[2], cluster, timeout=400) as group:
        print(*group.call(load_role(sys.argv[2]).leave_folder))
"""


def test_an_attached_run_leaves_the_cluster_alone(cluster):
    import ray

    # make room for the guest; this is the last test that uses this fixture
    ray.util.remove_placement_group(cluster.placements[0])
    run = [sys.executable, "-c", ATTACH, ray.get_runtime_context().gcs_address, ROLE]
    guest = subprocess.run(run, capture_output=True, text=True, timeout=400)
    assert guest.returncode == 0, guest.stderr
    left = Path(guest.stdout.strip())
    assert left.is_absolute() and not left.parent.exists(), "temporary files of a worker"
    assert ray.is_initialized() and ray.cluster_resources()["NPU"] == 2
    assert cluster.node.owned
