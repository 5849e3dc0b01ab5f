"""`run_ranks` reports a rank that fails, dies or hangs, with its rank and place."""

import pytest
from ranks import import_target, run_ranks, simulated_rank_env

from cookbook_npu.errors import ConfigError, RoleError, RoleTimeout

JOB = """
import os
import time


def square(rank, world_size, base=0):
    return base + rank * rank, world_size


def broken(rank, world_size):
    if rank == 1:
        raise ValueError("rank one cannot")
    time.sleep(60)


def stuck(rank, world_size):
    if rank == 1:
        time.sleep(60)


def dies(rank, world_size):
    if rank == 0:
        os._exit(3)
    time.sleep(60)


def talk(rank, world_size):
    print("hello from", rank)


def late(rank, world_size):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if rank == 1:
        time.sleep(1)  # rank 0 has replied by now
        return dist.get_world_size(dist.new_group([1], use_local_synchronization=True))
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path / "job.py"


def test_results_in_rank_order(job, capsys):
    "A finished rank waits for the others, because rank 0 holds the store"
    results = run_ranks(f"{job}:square", 3, kwargs={"base": 10})
    assert results == [(10, 3), (11, 3), (14, 3)]
    assert run_ranks(f"{job}:late", 2) == [None, 1]
    run_ranks(f"{job}:talk", 2)
    assert capsys.readouterr().out.endswith("hello from 0\n")


def test_failures_end_the_other_ranks(job):
    with pytest.raises(RoleError, match="rank 1 of") as failed:
        run_ranks(f"{job}:broken", 2)
    assert "ValueError: rank one cannot" in str(failed.value)
    with pytest.raises(RoleError, match="exit code 3"):
        run_ranks(f"{job}:dies", 2)
    with pytest.raises(RoleTimeout, match=r"ranks \[1\]") as late:
        run_ranks(f"{job}:stuck", 2, timeout=3)
    assert "in stuck" in str(late.value)


def test_wrong_targets():
    for target, words in (
        ("os.path", "names no function"),
        ("os.path:basenam", "has no function 'basenam'"),
    ):
        with pytest.raises(ConfigError, match=words):
            import_target(target)
    with pytest.raises(ConfigError, match="got n = 0"):
        run_ranks("os.path:basename", 0)


def test_variables_of_a_rank():
    env = simulated_rank_env(1, 2, 29500, {"OMP_NUM_THREADS": "2", "HOME": None})
    assert (env["RANK"], env["WORLD_SIZE"], env["OMP_NUM_THREADS"]) == ("1", "2", "2")
    assert env["COOKBOOK_NPU_SIMULATE"] == "1" and "HOME" not in env
