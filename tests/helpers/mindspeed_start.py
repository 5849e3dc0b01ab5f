"""The start of a trainer with the replica of MindSpeed, as `bootstrap` of `run_ranks`."""

import sys

from places import FIXTURES


def sketch() -> None:
    "A trainer that has the replica of MindSpeed"
    sys.path.insert(0, str(FIXTURES / "mindspeed_sketch"))
    from cookbook_npu.npu.shims.bootstrap import bootstrap

    bootstrap("trainer", adaptor="mindspeed")


def patched() -> None:
    "The same, and patched for a model"
    sketch()
    from cookbook_npu.npu.shims.bootstrap import parallel_ready

    parallel_ready(dict(tensor_model_parallel_size=1))
