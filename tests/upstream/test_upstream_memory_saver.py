"""The memory saver's records on the real Python code of its NPU build, and how the CUDA build of PyPI is
told from it.
"""

import ast
import shutil
from pathlib import Path

import pytest
import upstream_sources
from places import HELPERS
from ranks import run_ranks

from cookbook_npu.config import TinyConfig
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.errors import ShimError
from cookbook_npu.model.tiny import build_tiny
from cookbook_npu.npu.shims.memory_saver import (
    saver_build,
    saver_libraries,
    saver_library,
    saver_mode,
)

pytestmark = pytest.mark.lane("upstream")

JOBS = HELPERS / "simulator_jobs" / "memory_saver_real.py"


@pytest.fixture
def python():
    "The Python code of the NPU build"
    return upstream_sources.checkout(
        "sgl-kernel-npu@main/contrib/torch_memory_saver/python"
    )


@pytest.fixture
def cuda_build():
    "What PyPI serves"
    return upstream_sources.wheel("torch-memory-saver", "0.0.10") / "torch_memory_saver"


def members(file: Path, owner: str) -> set[str]:
    "Names defined in a class, from the source"
    (node,) = [
        n
        for n in ast.parse(file.read_text()).body
        if isinstance(n, ast.ClassDef) and n.name == owner
    ]
    return {n.name for n in node.body if isinstance(n, ast.FunctionDef)}


def test_records_on_the_real_npu_build(python):
    found = run_ranks(
        f"{JOBS}:records",
        1,
        kwargs={"python": str(python)},
        bootstrap="simulator",
        timeout=120,
    )[0]
    assert found["build"] == "npu"
    left = [0, 16]  # MiB that a weight update leaves, with and without the shim
    assert found["memory_saver.disable_empties_cache"] == (["applied", "undone"], left)
    assert found["memory_saver.margin"] == (
        ["applied", "undone"],
        ["refused", "an attribute"],
    )


def test_a_trainer_sleeps_by_the_real_python_code(python, tmp_path):
    hf_path = str(build_tiny(TinyConfig(), build_tokenizer(), tmp_path / "tiny", seed=0))
    env = {"PYTHONPATH": str(HELPERS)}
    kwargs = {"python": str(python), "hf_path": hf_path}
    ((same, freed),) = run_ranks(f"{JOBS}:sleeps", 1, kwargs=kwargs, env=env, timeout=400)
    assert same and freed > 0


def test_what_the_npu_build_looks_for(python, tmp_path):
    package = shutil.copytree(
        python / "torch_memory_saver", tmp_path / "torch_memory_saver"
    )
    with pytest.raises(ShimError, match="no torch_memory_saver_hook_mode_torch"):
        saver_mode({}, package)
    (package / "torch_memory_saver_hook_mode_torch.abi3.so").touch()
    assert saver_mode({}, package).hook == "region"
    (tmp_path / "torch_memory_saver_hook_mode_torch.abi3.so").touch()
    with pytest.raises(
        ShimError, match="2 libraries for one mode"
    ):  # its own search asserts exactly one in both places
        saver_library(package, "region")
    assert '"PYTORCH_CUDA_ALLOC_CONF"' in (package / "entrypoint.py").read_text(), (
        "its sanity check reads this name"
    )
    assert "PYTORCH_NPU_ALLOC_CONF" not in (package / "entrypoint.py").read_text(), (
        "and not the one of torch_npu"
    )
    assert 'get("TMS_HOOK_MODE", "torch")' in (package / "entrypoint.py").read_text(), (
        "unset means region"
    )
    preload = (package / "hooks/mode_preload.py").read_text()
    assert "return env_ld_preload" in preload, "the whole variable is taken for one path"


def test_the_cuda_build_has_what_the_npu_build_lacks(cuda_build, python):
    cuda, npu = (
        members(folder / "entrypoint.py", "TorchMemorySaver")
        for folder in (cuda_build, python / "torch_memory_saver")
    )
    assert {"region", "disable", "pause", "resume", "hook_mode"} <= cuda & npu
    assert {"memory_margin_bytes", "get_cpu_backup"} <= cuda - npu


def test_the_cuda_build_is_told_from_the_npu_build(cuda_build):
    assert saver_build(cuda_build) == "cuda"
    assert saver_mode({}, cuda_build).hook is None
    # one for each CUDA version, beside the package
    assert len(saver_libraries(cuda_build, "preload")) > 1
