"""The fused kernels of a micro-batch on the real torch_npu, under the sketch of MindSpeed.

MindSpeed itself imports torchair, which opens libraries of CANN that the fake one does not have; it runs on
the simulated NPU in `tests/upstream/test_upstream_mindspeed.py`.
"""

import os

from kernel_checks import check_kernels
from npu_wheel import build
from places import HELPERS, ROOT

from cookbook_npu.config import TinyConfig

SKETCH = ROOT / "tests" / "fixtures" / "mindspeed_sketch"
TARGET = f"{HELPERS / 'kernel_jobs.py'}:micro_batch"


def test_every_norm_gate_and_attention_is_fused_and_nothing_comes_back(lane, tmp_path):
    from cookbook_npu.data.tokenizer import build_tokenizer
    from cookbook_npu.model.tiny import build_tiny

    shape = TinyConfig(hidden_size=64, num_layers=2, ffn_size=128)
    folder = build_tiny(shape, build_tokenizer(), tmp_path / "qwen3", seed=0)
    paths = [str(SKETCH), build.environment()["PYTHONPATH"]]
    env = {"COOKBOOK_ADAPTOR": "mindspeed", "PYTHONPATH": os.pathsep.join(paths)}
    (found,) = lane(TARGET, kwargs=dict(folder=str(folder)), enter="trainer", env=env)
    check_kernels(found)
