"""Process groups that give their communicators back: Megatron trains on, and every collective works."""

import os

import pytest
from ranks import run_ranks
from simulated_saver import write_saver_package

from cookbook_npu.config import TinyConfig
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.model.tiny import build_tiny

pytestmark = pytest.mark.lane("devices")


def run(function, ranks, bootstrap=None, path=None, **kwargs):
    env = {"HCCL_BUFFSIZE": "1"}
    if path:
        env["PYTHONPATH"] = os.pathsep.join([str(path), os.environ["PYTHONPATH"]])
    return run_ranks(
        f"process_group_jobs:{function}",
        ranks,
        bootstrap=bootstrap,
        kwargs=kwargs,
        env=env,
        timeout=400,
    )


@pytest.mark.parametrize("ranks, tensor", [(2, 2), (4, 2)])
def test_megatron_trains_on_after_every_sleep(ranks, tensor):
    undisturbed = run("train", ranks, "trainer", tensor=tensor, cycles=False)
    slept = run("train", ranks, "trainer", tensor=tensor, cycles=True)
    assert [history for history, _, _ in slept] == [
        history for history, _, _ in undisturbed
    ]
    assert all(count == 3 and min(reloaded) > 0 for _, count, reloaded in slept)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_after_a_reload(ranks):
    for results in run("everything", ranks, "simulator"):
        assert set(results.values()) == {""}, results


SETTINGS = {
    "keep": {},
    "destroy": {"destroy_process_groups": True},
    "saver": {"sleep": "torch_memory_saver", "destroy_process_groups": True},
}


@pytest.mark.lane("devices")
def test_a_trainer_learns_the_same_however_it_sleeps(tmp_path):
    hf_path = str(build_tiny(TinyConfig(), build_tokenizer(), tmp_path / "tiny", seed=0))
    write_saver_package(tmp_path / "site")
    (tmp_path / "state").mkdir()
    job = {"hf_path": hf_path, "state": str(tmp_path / "state"), "ways": SETTINGS}
    for found in run("sleep_between_steps", 2, path=tmp_path / "site", **job):
        (rows, memory, held), (*destroyed, left), (*paused, _) = (
            found["keep"],
            found["destroy"],
            found["saver"],
        )
        assert rows == destroyed[0] == paused[0] and len(rows) == 3
        assert held == memory["memory/communicators"] > 0 and left == 0
        assert paused[1]["memory/free_after_sleep"] > paused[1]["memory/free_before_sleep"]
    assert (tmp_path / "state" / ".metadata").is_file(), (
        "a checkpoint that was finished asleep is a whole one"
    )
