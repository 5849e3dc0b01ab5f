"""torch_memory_saver of sgl-kernel-npu in both modes on the real torch_npu: its own C++ and Python, over
host memory.
"""

import os

import pytest
from npu_wheel.saver import build_saver
from upstream_sources import checkout

from cookbook_npu.config import TinyConfig
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.model.tiny import build_tiny
from cookbook_npu.npu.shims.memory_saver import saver_environment

KERNELS = """
import sys
if sys.argv[0] == "-c":
    from npu_wheel import lane
    lane.load()
"""


@pytest.fixture(scope="module")
def site(lane, tmp_path_factory):
    "A folder with the built package"
    source = checkout("sgl-kernel-npu@main/contrib/torch_memory_saver")
    return build_saver(source, tmp_path_factory.mktemp("saver"))


@pytest.mark.parametrize("hook", ["preload", "region"])
def test_a_trainer_sleeps_by_the_real_saver(lane, site, hook, tmp_path):
    "It learns the same as one that sleeps by copies; while it sleeps, its memory is unmapped"
    hf_path = str(build_tiny(TinyConfig(), build_tokenizer(), tmp_path / "tiny", seed=0))
    checks = tmp_path / "checks"
    checks.mkdir()
    (checks / "sitecustomize.py").write_text(KERNELS)
    env = saver_environment(hook, site / "torch_memory_saver")
    env["PYTHONPATH"] = os.pathsep.join([lane.environment["PYTHONPATH"], str(site)])
    kwargs = {"hf_path": hf_path, "checks": str(checks)}
    ((found, copied, paused, freed),) = lane(
        "npu_wheel.saver:sleeps", kwargs=kwargs, enter="trainer", env=env
    )
    assert found == hook and paused == copied and freed > 0
