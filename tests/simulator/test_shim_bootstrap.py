"""`bootstrap` in processes of its own: refusals, the result in each role, shims of your own."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from places import PACKAGE
from ranks import MEGATRON_IMPORTS, run_ranks

from cookbook_npu.errors import RoleError
from cookbook_npu.npu.shims.bootstrap import report_of_fresh_process

IMPORTS = """
import sys
from cookbook_npu.npu.shims.bootstrap import bootstrap, model_ready, parallel_ready
"""
OWN = """
import json
from cookbook_npu.npu.shims.registry import Shim, registry

@registry.register
class StrictJson(Shim):
    "A NaN in a line of metrics is no JSON"
    name = "json.strict"
    target = "json.dumps"
    link = "https://docs.python.org/3/library/json.html"
    phase = "device"

    def needed(self):
        try:
            return json.dumps(float("nan")) == "NaN", "dumps writes NaN"
        except ValueError:
            return False, "dumps refuses NaN"

    def around(self, original, *args, **kwargs):
        return original(*args, **{"allow_nan": False} | kwargs)
"""


@pytest.fixture
def check(tmp_path):
    "Runs the body of `check` in a fresh process"

    def run(body, kwargs=None, env=None):
        arguments = ", ".join(["rank", "world_size", *(kwargs or {})])
        code = IMPORTS + f"def check({arguments}):\n" + textwrap.indent(body, "    ")
        (tmp_path / "job.py").write_text(code)
        target, preload = f"{tmp_path}/job.py:check", MEGATRON_IMPORTS
        return run_ranks(target, 1, kwargs, env=env, preload=preload)[0]

    return run


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (
            "import megatron.core\nbootstrap('trainer')",
            r"megatron.core was imported before bootstrap\('trainer'\)",
        ),
        (
            "bootstrap('rollout')\nbootstrap('trainer')",
            "this process is a rollout and cannot become a trainer",
        ),
        (
            "sys.modules['vllm'] = sys\nbootstrap('trainer')",
            "vllm is in this process already; it cannot be a trainer",
        ),
    ],
)
def test_refusals(check, body, error):
    with pytest.raises(RoleError, match=error):
        check(body)


@pytest.mark.parametrize(
    ("role", "package"), [("trainer", "vllm"), ("rollout", "mindspeed")]
)
def test_imports_that_exclude_each_other(check, tmp_path, role, package):
    "An optional import continues without the package, another one fails"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    body = f"""
import importlib.util
sys.path.insert(0, {str(tmp_path)!r})
bootstrap(role)
assert importlib.util.find_spec(package) is not None
try:
    __import__(package)
except ImportError:
    pass
__import__(package)
"""
    error = f"ForbiddenImportError: {package} was imported in a {role} process"
    with pytest.raises(RoleError, match=error):
        check(body, dict(role=role, package=package), {"COOKBOOK_ADAPTOR": "none"})


def test_a_rollout_process(check):
    found = check("""
report = bootstrap("rollout")
import torch
entered = {row["name"] for row in report if row["state"] != "not entered"}
loaded = [name for name in ("megatron", "vllm") if name in sys.modules]
return "vllm.environment" in entered, torch.ones(1, device="npu").device.type, loaded
""")
    assert found == (True, "npu", [])


def test_a_trainer(check, monkeypatch):
    "The second call returns the same report, and so does a fresh process of `cookbook-npu shims`"
    report = check("""
report = bootstrap("trainer")
assert bootstrap("trainer") == report
assert "megatron.core" in sys.modules
parallel_ready(dict(tensor_model_parallel_size=1))
return model_ready()
""")
    states = {row["name"]: row["state"] for row in report}
    assert set(states.values()) <= {"applied", "not needed"}, states
    for name in ("torch.cuda_to_npu", "transformer_engine.stub", "megatron.torch_norm"):
        assert states[name] == "applied"
    for row in report:
        assert row["link"].startswith("https://") and row["reason"] and row["detail"], row
    monkeypatch.setenv("COOKBOOK_NPU_SIMULATE", "1")
    assert [row["name"] for row in report_of_fresh_process()] == list(states)


@pytest.mark.parametrize("role", ["rollout", "trainer"])
def test_a_shim_of_your_own(check, tmp_path, role):
    (tmp_path / "my_shim.py").write_text(OWN)
    body = "return [row for row in bootstrap(role) if row['name'] == 'json.strict']"
    env = {"COOKBOOK_NPU_SHIMS": "my_shim", "PYTHONPATH": str(tmp_path)}
    [row] = check(body, dict(role=role), env)
    assert (row["state"], row["detail"]) == ("applied", "dumps writes NaN")


ALONE = """
import importlib, pkgutil, sys
import cookbook_npu
from cookbook_npu.npu.shims.bootstrap import bootstrap

bootstrap("trainer")
import torch

assert torch.ones(3, device="npu").dot(torch.ones(3, device="npu")).item() == 3
for module in pkgutil.walk_packages(cookbook_npu.__path__, "cookbook_npu."):
    importlib.import_module(module.name)
# an installed copy also answers for the modules that are not here
files = [m.__file__ for name, m in sys.modules.items() if name.startswith("cookbook_npu")]
print([file for file in files if not file.startswith(cookbook_npu.__path__[0])])
"""


def test_npu_is_a_package_of_its_own_with_the_errors(tmp_path):
    package = tmp_path / "cookbook_npu"
    shutil.copytree(PACKAGE / "npu", package / "npu")
    for file in ("errors.py", "terminal.py"):
        shutil.copy(PACKAGE / file, package)
    (package / "__init__.py").touch()
    env = os.environ | {"PYTHONPATH": str(tmp_path), "COOKBOOK_NPU_SIMULATE": "1"}
    command = [sys.executable, "-P", "-c", ALONE]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout[-500:] + done.stderr[-2000:]


def test_megatron_does_not_import_what_a_trainer_does_not_use(check, tmp_path):
    for name in ("wandb", "torch_memory_saver"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    body = """
bootstrap("trainer")
import megatron.core.inference.contexts.dynamic_context as context
assert not context.HAVE_WANDB and not context.HAVE_TORCH_MEMORY_SAVER
try:
    import wandb
except RuntimeError as e:
    return str(e)
"""
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert check(body, env={"PYTHONPATH": path}) == "imported"
