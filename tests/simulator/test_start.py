"""How long a run takes to start is what its processes import: who imports what, and who shares it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import HELPERS
from start_roles import Role

from cookbook_npu.cluster.ray_cluster import Cluster
from cookbook_npu.cluster.worker_group import RayWorkerGroup

ROLE = f"{HELPERS / 'start_roles.py'}:Role"
ROLES = {
    "trainer": ["cookbook_npu.train.trainer"],
    "rollout": ["cookbook_npu.train.rollout_worker", "cookbook_npu.rollout.transformers"],
}
COMPILER = ("torch._dynamo", "torch._inductor", "sympy", "triton")
# jsonschema 4.25 and later build a grammar at import: over 1 s (see pyproject.toml)
GRAMMARS = ("lark",)
NOT_IN = {
    "command": (*GRAMMARS, "torch", "transformers", "ray", "pandas", "matplotlib"),
    "driver": (*GRAMMARS, *COMPILER, "peft", "pandas", "matplotlib", "megatron"),
    "trainer": ("vllm",),
    "rollout": ("megatron", "mcore_bridge", "vllm"),
}

COMMAND = """
from cookbook_npu import cli

notebook = cli.find_notebook("qwen3_4b_colocate")
config = cli.resolve_run(notebook, {})
cli.check_machine(config)
import cookbook_npu.runs.kernel, cookbook_npu.runs.report
"""
DRIVER = """
from cookbook_npu import make_plan, qwen3_4b_colocate, session, write_report
from cookbook_npu.cluster.ray_cluster import import_ray
from cookbook_npu.data.inputs import read_inputs
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.train import session

config = qwen3_4b_colocate()
make_plan(config).as_text()
import_ray()
build_tokenizer().save_pretrained("model")
open("model/tiny.json", "w").close()
read_inputs(config).load("model")
"""


def loaded(modules, process: str) -> list[str]:
    "What a process should do without, and has"
    return [name for name in NOT_IN[process] if name in set(modules)]


@pytest.mark.parametrize(("process", "code"), [("command", COMMAND), ("driver", DRIVER)])
def test_a_process_of_a_run_imports_only_what_it_uses(process, code, tmp_path):
    code += "\nimport sys\nprint(*sys.modules)"
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    recipes = tmp_path / "recipes"
    recipes.symlink_to(f"{root}/recipes")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not loaded(done.stdout.split(), process)


@pytest.fixture(scope="module")
def cluster():
    with Cluster.start(2, preload=True) as cluster:
        yield cluster


def start(cluster, kind: str | None, **more) -> RayWorkerGroup:
    "A group of a role of this file"
    told = {"modules": ROLES.get(kind, [])}
    return RayWorkerGroup.create(
        str(kind), ROLE, cluster, bootstrap=kind, kwargs=told, **more
    )


@pytest.mark.parametrize(
    ("kind", "threads"), [("trainer", "1"), ("rollout", "1"), ("trainer", "2")]
)
def test_a_worker_is_a_fork_that_imports_little(cluster, kind, threads):
    with start(cluster, kind, env={"OMP_NUM_THREADS": threads}) as group:
        infos = group.call(Role.process_info)
        assert group.call(Role.devices) == [1, 1]
    for rank, info in enumerate(infos):
        assert info["fork"] and "fork_server" in info["server"]
        assert info["visible"] == str(rank) and info["threads"] == int(threads)
        assert not loaded(info["modules"], kind)
        # what its role imports was imported by the server
        assert len(info["own_modules"]) < 0.05 * len(info["modules"]), info["own_modules"]
