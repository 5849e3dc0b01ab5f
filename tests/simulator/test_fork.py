"""Forks of a process with the simulated NPU: refused where it had used a device."""

import os
import subprocess
import sys

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.lane("devices")


def in_a_fork(work):
    "What `work` returns, or its error, in a forked child"
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            answer = repr(work())
        except Exception as error:
            answer = str(error)
        os.write(writer, answer.encode())
        os._exit(0)
    os.wait()
    return os.read(reader, 4000).decode()


def forks(rank, world_size):
    "What children of a process see before it uses a device, afterwards, and after a reset"
    import torch

    from cookbook_npu.npu import simulator

    def use():
        os.environ |= {
            "COOKBOOK_NPU_SIM_DEVICES": "3",
            "COOKBOOK_NPU_SIM_MEMORY": str(1 << 30),
        }
        simulator.install()
        torch.npu.manual_seed_all(5)
        total = torch.ones(3, device="npu:2").sum().item()
        return torch.npu.device_count(), total, torch.npu.mem_get_info(2)[1]

    before = in_a_fork(use)
    torch.ones(1, device="npu")
    used = in_a_fork(use)
    simulator.reset_devices()
    return before, used, in_a_fork(use), torch.npu.max_memory_allocated()


def test_only_a_process_that_used_no_device_may_fork():
    ((before, used, reset, peak),) = run_ranks(
        f"{__file__}:forks", 1, bootstrap="simulator"
    )
    assert before == reset == str((3, 3.0, 1 << 30))
    assert "devices were used before the fork" in used
    assert peak == 0


SESSION = """
import os, torch
from cookbook_npu.npu import simulator
simulator.install()
if os.fork() == 0:
    held = torch.ones(1 << 20, device="npu")
    print(torch.npu.mem_get_info()[0] >> 20, flush=True)
    os._exit(0)
os.wait()
torch.npu.set_device(0)
table = simulator.session_file(os.environ["COOKBOOK_NPU_SIM_SESSION"])
print(torch.npu.mem_get_info()[0] >> 20, table.exists())
"""


def test_a_fork_has_a_row_of_its_own_in_the_table_of_its_session(tmp_path):
    session = f"fork{os.getpid()}"
    env = os.environ | {
        "COOKBOOK_NPU_SIM_SESSION": session,
        "COOKBOOK_NPU_SIM_MEMORY": str(64 << 20),
    }
    done = subprocess.run(
        [sys.executable, "-c", SESSION],
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.stdout.split() == ["60", "64", "True"], done.stderr
    from cookbook_npu.npu.simulator import session_file

    assert not session_file(session).exists()


def spoil(rank, world_size):
    "Leave everything in disorder"
    import torch

    os.environ["SPOILT"] = sys.modules["torch"].spoilt = "yes"
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank + 7)
    return os.getpid()


def look(rank, world_size):
    import torch

    seen = (
        os.environ.get("SPOILT"),
        getattr(torch, "spoilt", None),
        torch.get_default_dtype(),
    )
    return seen, os.getppid()


def test_ranks_of_one_server_know_nothing_of_each_other():
    target = f"{__file__}:"
    fresh = run_ranks(f"{target}look", 1, bootstrap="simulator", fresh=True)[0]
    assert len(set(run_ranks(f"{target}spoil", 2, bootstrap="simulator"))) == 2
    for seen in run_ranks(f"{target}look", 2, bootstrap="simulator"):
        assert seen[0] == fresh[0]
        assert seen[1] != os.getpid(), "a server should have started it"
