"""`npu.shims.mindspeed.adaptor` loads the replica of MindSpeed under the command line of a Jupyter kernel."""

import textwrap

import pytest
from places import FIXTURES
from ranks import MEGATRON_IMPORTS, run_ranks

from cookbook_npu.errors import RoleError
from cookbook_npu.npu.shims.mindspeed.adaptor import Adaptor

START = f"""
import logging, sys
sys.path.insert(0, {str(FIXTURES / "mindspeed_sketch")!r})
from cookbook_npu.npu.shims.bootstrap import bootstrap, parallel_ready
def check(rank, world_size):
"""


@pytest.fixture
def check(tmp_path):
    "Runs the body of `check` in a fresh process"

    def run(body):
        (tmp_path / "job.py").write_text(START + textwrap.indent(body, "    "))
        return run_ranks(f"{tmp_path}/job.py:check", 1, preload=MEGATRON_IMPORTS)[0]

    return run


CONFIG = """
from megatron.core.transformer import TransformerConfig
config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
"""


def test_the_command_line_is_hidden(check):
    body = """
sys.argv = ["ipykernel_launcher.py", "-f", "kernel.json", "--gcs-address=10.0.0.1:6379"]
handler = logging.NullHandler()
logging.getLogger().addHandler(handler)
bootstrap("trainer", adaptor="mindspeed")
from mindspeed.args_utils import get_mindspeed_args
"""
    body += CONFIG
    body += """
kept = handler in logging.getLogger().handlers
return "" in vars(get_mindspeed_args()), hasattr(config, "gcs_address"), kept, len(sys.argv)
"""
    assert check(body) == (False, False, True, 4)


def test_without_hiding_no_configuration_can_be_created(check):
    body = """
import contextlib
from cookbook_npu.npu.shims.mindspeed import adaptor
sys.argv = ["ipykernel_launcher.py", "-f", "kernel.json"]
adaptor.hidden_argv = contextlib.nullcontext
bootstrap("trainer", adaptor="mindspeed")
"""
    with pytest.raises(RoleError, match="Field names must be valid identifiers: ''"):
        check(body + CONFIG)


def test_the_flags_are_set(check):
    name, flags, applied = check("""
from cookbook_npu.npu.shims.mindspeed.adaptor import current
bootstrap("trainer", adaptor="mindspeed")
before = current().applied
parallel_ready(dict(num_layers=2, tensor_model_parallel_size=1))
return current().name, current().verify(), (before, bool(current().applied))
""")
    assert (name, applied) == ("mindspeed", (None, True))
    assert Adaptor.promised not in flags


def test_a_second_model_with_other_arguments_is_refused(check):
    body = """
bootstrap("trainer", adaptor="mindspeed")
actor = dict(num_layers=2, tensor_model_parallel_size=1)
parallel_ready(actor)
parallel_ready(actor | dict(num_layers=4))
parallel_ready(actor | dict(num_moe_experts=8, expert_model_parallel_size=1))
parallel_ready(actor | dict(tensor_model_parallel_size=2))
"""
    with pytest.raises(
        RoleError, match="for other arguments: tensor_model_parallel_size: 1, 2"
    ):
        check(body)
