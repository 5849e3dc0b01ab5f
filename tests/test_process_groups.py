"""Process groups that give their communicators back: Megatron trains on as if nothing had happened, and every collective works."""

from pathlib import Path

import pytest

from cookbook_npu.simulator.ranks import run_ranks

TESTS = Path(__file__).parent


def run(function, ranks, bootstrap, **kwargs):
    env = {"PYTHONPATH": str(TESTS), "HCCL_BUFFSIZE": "1"}
    return run_ranks(f"process_group_jobs:{function}", ranks, bootstrap=bootstrap, kwargs=kwargs, env=env, timeout=400)


@pytest.mark.parametrize("ranks, tensor", [(2, 2), (4, 2)])
def test_megatron_trains_on_after_every_sleep(ranks, tensor):
    undisturbed = run("train", ranks, "trainer", tensor=tensor, cycles=False)
    slept = run("train", ranks, "trainer", tensor=tensor, cycles=True)
    assert [history for history, _, _ in slept] == [history for history, _, _ in undisturbed]
    assert all(count == 3 and min(reloaded) > 0 for _, count, reloaded in slept)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_after_a_reload(ranks):
    for results in run("everything", ranks, "simulator"):
        assert set(results.values()) == {""}, results
