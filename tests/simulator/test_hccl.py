"""The simulated NPU between processes: collectives, memory accounting, visible devices."""

import re
import uuid

import pytest
from places import HELPERS
from ranks import run_ranks

from cookbook_npu.errors import RoleError
from cookbook_npu.npu import simulator

# each test starts processes of its own: a dozen seconds in all
JOBS = HELPERS / "simulator_jobs"
CHECKS = re.findall(r"^def (check_\w+)", (JOBS / "collectives.py").read_text(), re.M)


def run(function, n, env=None, **kwargs):
    return run_ranks(
        f"simulator_jobs.collectives:{function}",
        n,
        bootstrap="simulator",
        env=env,
        **kwargs,
    )


@pytest.fixture(scope="module")
def results():
    return run("everything", 4, timeout=300)


@pytest.mark.parametrize("name", CHECKS)
def test_collectives(results, name):
    assert [rank[name] for rank in results] == [""] * len(results)


def test_a_group_of_one_rank_gets_back_what_it_gave():
    (found,) = run("one_rank", 1)
    assert set(map(tuple, found.values())) == {(1.0, 2.0, 3.0)}
    assert len(found) == 6


def test_group_bound_to_its_device():
    assert run("with_device_id", 2) == [2.0, 2.0]


@pytest.fixture
def session():
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    assert not simulator.session_file(name).exists(), (
        "the last process left its table behind"
    )


def test_processes_share_the_memory_of_a_device(session):
    env = {"COOKBOOK_NPU_SIM_SESSION": session, "COOKBOOK_NPU_SIM_MEMORY": str(64 << 20)}
    (seen0, _, _, _), (seen1, refused, cached, after) = run(
        "hold_memory", 2, env=env, kwargs={"bytes_each": 40 << 20}
    )
    assert seen0 == seen1 == (24 << 20, 64 << 20)
    assert "held by other processes" in refused and "40 MiB held" in refused
    assert cached[0] >= 24 << 20 and after == (64 << 20, 64 << 20)


def test_without_a_session_processes_do_not_share():
    results = run(
        "hold_memory",
        2,
        env={"COOKBOOK_NPU_SIM_MEMORY": str(64 << 20)},
        kwargs={"bytes_each": 40 << 20},
    )
    assert results[1][0] == (64 << 20, 64 << 20) and results[1][1] == ""


def test_a_dead_process_gives_its_memory_back(session):
    env = {"COOKBOOK_NPU_SIM_SESSION": session, "COOKBOOK_NPU_SIM_MEMORY": str(64 << 20)}
    with pytest.raises(RoleError, match="died with exit code 0"):
        run("hold_and_die", 1, env=env)
    assert simulator.session_file(session).exists(), "a process that dies cannot clean up"
    assert run("free_now", 1, env=env) == [(64 << 20, 64 << 20)]


def test_visible_devices_are_numbered_anew():
    env = {"ASCEND_RT_VISIBLE_DEVICES": "5,3", "COOKBOOK_NPU_SIM_DEVICES": "6"}
    assert run("visible", 1, env=env) == [(2, 1)]
    with pytest.raises(RoleError, match="leaves no simulated NPU visible"):
        run("visible", 1, env={"ASCEND_RT_VISIBLE_DEVICES": ""})


def test_two_processes_on_different_visible_devices_share_by_physical_id(session):
    env = {
        "COOKBOOK_NPU_SIM_SESSION": session,
        "COOKBOOK_NPU_SIM_MEMORY": str(64 << 20),
        "ASCEND_RT_VISIBLE_DEVICES": "3",
    }
    results = run("hold_memory", 2, env=env, kwargs={"bytes_each": 40 << 20})
    assert results[1][0] == (24 << 20, 64 << 20)


def test_a_failing_rank_ends_the_others():
    "Its error is reported, not the timeout of the ranks that wait for it"
    with pytest.raises(RoleError, match="^rank [01] of "):
        run("visible", 2, env={"COOKBOOK_NPU_SIM_DEVICES": "1"})


def test_options_of_a_group():
    assert run("options", 1) == [{}]


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("host_tensor", "No backend type associated with device type cpu"),
        ("uneven", "reduce_scatter of 4 elements into 3 on 2 ranks"),
        ("alone", "by peer"),
    ],
)
def test_refused_collectives(function, error):
    with pytest.raises(RoleError, match=error):
        run(function, 2)


def test_a_communicator_holds_its_buffers_until_it_ends():
    assert run("buffers", 2, env={"HCCL_BUFFSIZE": "4"}) == [([0, 8, 0, 8, 0, 8], 8.0)] * 2


def test_a_collective_that_fails_on_one_rank():
    (one, *_), (name, text, _) = run(
        "reduce_twice", 2, env={"COOKBOOK_NPU_SIM_FAULTS": "1/fail:all_reduce:2"}
    )
    assert name == "DistBackendError" and "all_reduce failed on rank 1" in text
    assert one != "no error"


def test_a_collective_that_hangs_ends_at_the_timeout():
    hung = run("reduce_twice", 2, env={"COOKBOOK_NPU_SIM_FAULTS": "1/hang:all_reduce:2"})
    assert all(name != "no error" and seconds > 2 for name, _, seconds in hung), hung
    assert "did not finish within 3000 ms" in hung[1][1]
