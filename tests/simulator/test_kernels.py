"""The fused kernels of a micro-batch under the sketch of MindSpeed, and under our own stubs: the same values.

What the sketch cannot show is whether the classes of the real MindSpeed read the same settings:
`tests/upstream/test_upstream_mindspeed.py` does, on its sources. The sketch runs on
the real torch_npu in `tests/wheel/test_fused_in_models.py`.
"""

import functools
import os
import tempfile

import pytest
from kernel_checks import check_kernels, check_same
from places import HELPERS, ROOT
from ranks import run_trainers
from test_model_equality import tokenizer

from cookbook_npu.config import TinyConfig
from cookbook_npu.data.tokenizer import build_tokenizer

SKETCH = ROOT / "tests" / "fixtures" / "mindspeed_sketch"
TARGET = f"{HELPERS / 'kernel_jobs.py'}:micro_batch"
pytestmark = pytest.mark.lane("devices")


@functools.cache
def folder() -> str:
    "A tiny Qwen3"
    from cookbook_npu.model.tiny import build_tiny

    shape = TinyConfig(hidden_size=64, num_layers=2, ffn_size=128)
    return str(build_tiny(shape, tokenizer(), f"{tempfile.mkdtemp()}/qwen3", seed=0))


@functools.cache
def run(adaptor: str, fused: bool = True, recompute: str = "none") -> dict:
    paths = [str(HELPERS), os.environ.get("PYTHONPATH", "")]
    if adaptor == "mindspeed":
        paths.insert(0, str(SKETCH))
    env = {"COOKBOOK_ADAPTOR": adaptor, "PYTHONPATH": os.pathsep.join(paths)}
    kwargs = dict(folder=folder(), fused=fused, recompute=recompute)
    return run_trainers(TARGET, env=env, **kwargs)[0]


def test_every_norm_gate_rotation_and_attention_is_fused_and_nothing_comes_back():
    check_kernels(run("mindspeed"))
    check_same(run("mindspeed"), run("none"))


def test_without_fused_kernels_only_attention_is():
    found = run("mindspeed", fused=False)
    assert set(found["calls"]) == {"npu_fusion_attention", "npu_fusion_attention TND"}
    check_same(found, run("none"))


def test_our_own_stubs_bring_nothing_back_either():
    found = run("none")
    assert (set(found["calls"]), found["reads"]) == ({"npu_swiglu", "npu_rotary_mul"}, [])
    assert run("none", fused=False)["calls"] == {}


def test_recomputation_brings_nothing_back():
    check_kernels(run("mindspeed", recompute="full"), passes=2)


def test_norms_of_mindspeed_have_the_type_of_the_model(tmp_path):
    """MindSpeed makes them in float32. In a bfloat16 model Megatron's distributed optimizer then takes the
    state of one parameter for that of another, and no checkpoint can be saved
    """
    from cookbook_npu.model.tiny import build_tiny

    path = build_tiny(TinyConfig(), build_tokenizer(), tmp_path / "model", seed=0)
    env = {"PYTHONPATH": os.pathsep.join(map(str, (SKETCH, ROOT, HELPERS)))}
    job = dict(hf_path=str(path), dtype="bfloat16", steps=1)
    (found,) = run_trainers("real_stack.jobs:train", env=env, **job)
    assert found["adaptor"] == "mindspeed" and found["types"] == ["torch.bfloat16"]
