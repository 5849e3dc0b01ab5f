"""The vLLM records on real code: the installed vLLM, and five versions of vllm-ascend in their sources."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
import upstream_sources
from places import HELPERS
from ranks import run_ranks

pytestmark = pytest.mark.lane("upstream")

JOBS = HELPERS / "simulator_jobs" / "vllm_ascend_real.py"
# releases with a wheel; main from a checkout
VERSIONS = ("0.13.0", "0.18.0", "0.20.2rc1", "0.23.0", "main")
WOKEN = "check() returned False"
needs_vllm = pytest.mark.skipif(
    not find_spec("vllm"), reason="vLLM is not installed (pip install 'cookbook-npu[vllm]')"
)


def sources(version: str) -> Path:
    "The sources of one version of vllm-ascend"
    if version == "main":
        return upstream_sources.checkout("vllm-ascend@main")
    return upstream_sources.wheel("vllm-ascend", version)


def job(function: str, bootstrap: str | None = "simulator", **kwargs):
    env = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    return run_ranks(
        f"{JOBS}:{function}", 1, kwargs=kwargs, bootstrap=bootstrap, env=env, timeout=300
    )[0]


# 0.13.0 takes no snapshot at its start: what it measures is in test_engine_memory.py
@pytest.mark.parametrize("version", VERSIONS[1:])
def test_memory_checks_of_the_worker(version):
    found = job("memory_records", checkout=str(sources(version)))
    assert found["startup_memory"]["without"].startswith("Free memory on device")
    assert found["profiling_memory"]["without"].startswith("Error in memory profiling")
    assert found["sleep_memory"]["without"] == "Memory usage increased after sleeping."
    wanted = {"state": "not needed"} if version == "main" else {"without": WOKEN}
    assert found["expert_layout"].items() >= wanted.items()


@needs_vllm
@pytest.mark.parametrize("version", VERSIONS)
def test_weights_by_handle(version):
    found = job("ipc_record", checkout=str(sources(version)))
    if version == "main":
        assert (found["state"], found["seen"]) == (
            "applied",
            "packed weights are never loaded",
        )
        assert found["without"] == "check() returned False"
        assert (
            found["paths"]["npu_ipc packed"] == "received weights are never loaded"
            and found["paths"]["npu_ipc"] == ""
        )
    else:
        assert found["state"] == "not needed"
    if version == "0.23.0":
        assert found["paths"]["npu_ipc packed"] == ""
    if version in ("0.23.0", "main"):  # the others have no such engine
        assert found["opened"], "the engine does not open the handles that we give it"


def functions(file: Path, owner: str) -> dict[str, list[str]]:
    "Methods of a class and their parameters, from the source"
    (node,) = [
        n
        for n in ast.parse(file.read_text()).body
        if isinstance(n, ast.ClassDef) and n.name == owner
    ]
    return {
        f.name: [a.arg for a in f.args.args]
        for f in node.body
        if isinstance(f, ast.FunctionDef)
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_names_the_records_rely_on(version):
    root = sources(version) / "vllm_ascend"
    worker = functions(root / "worker/worker.py", "NPUWorker")
    assert worker["_init_device"] == worker["determine_available_memory"] == [
        "self"
    ] and worker["sleep"] == ["self", "level"]
    assert {"get_instance", "get_current_usage", "sleep"} <= set(
        functions(root / "device_allocator/camem.py", "CaMemAllocator")
    )
    assert 'os.getenv("VLLM_ASCEND_ENABLE_NZ", 1)' in (root / "envs.py").read_text(), (
        "unset must still mean 1"
    )
    loop = (root / "patch/platform/patch_balance_schedule.py").read_text()
    assert "is_sleeping" not in loop, "the balanced loop still does not ask"
    assert ("self.execute_dummy_batch()" in loop) == (version != "main"), (
        "main runs vLLM's own loop"
    )


@pytest.mark.parametrize(
    "version, reload, update, checkpoint",
    [
        ("0.13.0", 0, 0, 0),
        ("0.18.0", 0, 0, 0),
        ("0.20.2rc1", 0, 0, 0),
        ("0.23.0", 0, 1, 1),
        ("main", 1, 1, 0),
    ],
)
def test_weight_update_methods_by_version(version, reload, update, checkpoint):
    worker = functions(sources(version) / "vllm_ascend/worker/worker.py", "NPUWorker")
    assert ("reload_weights" in worker) == bool(reload), (
        "before main only the model runner has it: see npu.shims.vllm_weights.reload_function"
    )
    assert (
        {"start_weight_update", "update_weights", "finish_weight_update"} <= set(worker)
    ) == bool(update)
    assert ("is_checkpoint_format" in worker.get("start_weight_update", [])) == bool(
        checkpoint
    )


@needs_vllm
def test_installed_vllm():
    report, modes, resumed, engines = job("real_vllm", bootstrap=None)
    assert report["vllm.processed_logprobs"][0] == "applied" and modes == (
        "raw_logprobs",
        "processed_logprobs",
        "raw_logprobs",
    )
    assert (
        report["vllm.partial_wake"]
        == ("not needed", "waking the weights does not resume the scheduler")
        and not resumed
    )
    assert report["vllm.dummy_batch"] == (
        "not needed",
        "the loops of the engine read is_sleeping",
    )
    assert report["vllm.tied_head"] == ("applied", "a packed head keeps its old values")
    assert {
        state for name, (state, _) in report.items() if name.startswith("vllm_ascend.")
    } == {"not needed"}
    assert {"nccl", "ipc"} <= set(engines)
