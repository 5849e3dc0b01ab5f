"""Process groups that give their communicators back: Megatron trains on, and every collective works."""

import pytest
from ranks import run_ranks

from cookbook_npu.config import TinyConfig
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.model.tiny import build_tiny

pytestmark = pytest.mark.lane("devices")


def run(function, ranks, bootstrap=None, **kwargs):
    env = {"HCCL_BUFFSIZE": "1"}
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
}


def test_a_trainer_learns_the_same_however_it_sleeps(tmp_path):
    hf_path = str(build_tiny(TinyConfig(), build_tokenizer(), tmp_path / "tiny", seed=0))
    (tmp_path / "state").mkdir()
    job = {"hf_path": hf_path, "state": str(tmp_path / "state"), "ways": SETTINGS}
    for found in run("sleep_between_steps", 2, **job):
        (rows, memory, held), (destroyed, _, left) = found["keep"], found["destroy"]
        assert rows == destroyed and len(rows) == 3
        assert held == memory["memory/communicators"] > 0 and left == 0
    assert (tmp_path / "state" / ".metadata").is_file(), (
        "a checkpoint that was finished asleep is a whole one"
    )
