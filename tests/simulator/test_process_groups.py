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
