"""A Python process that is started as usual and runs in a fork of a server (preloaded/sitecustomize.py)."""

import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

from cookbook_npu.npu.simulator.fork_server import fork_process
from cookbook_npu.npu.simulator.preload import SERVER_ENV, split_command

QWEN = ["transformers.models.auto", "transformers.generation.utils"]
QWEN += [
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen2.tokenization_qwen2",
]
QWEN.insert(0, "cookbook_npu.npu.shims.torchvision_ops:install_finder")
# What Ray imports. Not Ray itself: it reads its variables then, and they differ from process to process.
FOR_RAY = ["requests", "jsonschema", "yaml", "google.protobuf.descriptor", "packaging"]
# What Megatron and mcore-bridge import. Not these themselves: they come after a trainer's bootstrap.
FOR_MEGATRON = ["torch.distributed.tensor", "torch.distributed.checkpoint", "peft"]
FOR_MEGATRON += ["datasets", "einops", "torch.utils.tensorboard", "cookbook_npu.config"]
# A role's process installs the simulated NPU first, and transformers looks for it when it is imported.
WORKER = ["torch", "cookbook_npu.npu.simulator:install", *QWEN, *FOR_MEGATRON]
WORKER += [*FOR_RAY, "cookbook_npu.cluster.worker_group", "preloaded_jobs"]
DRIVER = ["torch", *QWEN, *FOR_RAY, "cookbook_npu.train.session", "run_driver"]
KERNEL = ["ipykernel.kernelapp", "torch", *QWEN, *FOR_RAY, "matplotlib.figure"]
KERNEL += ["cookbook_npu.train.session", "preloaded_jobs"]
# What building any model of a trainer imports: ranks of all tests that ask for these have one server
TRAINER_RANK = ["mcore_bridge", "transformers.models.auto", "transformers.generation.utils"]
# Ray's own processes beside a raylet
AGENT = ["asyncio", "aiohttp.web", *FOR_RAY, "preloaded_jobs"]


def warm_up_of(argv: list[str]) -> list[str]:
    "What the server of this process has imported: `argv` is its command line without options of Python"
    if argv[1] == "-m":
        return KERNEL
    return AGENT if "agent" in argv[1].rpartition("/ray/")[2] else WORKER


def without_preload(argv: list[str]) -> list[str]:
    "The command line of what Ray starts through `preload`, unless that is a fork of its own"
    if argv[2].endswith(".py") and not argv[2].endswith("default_worker.py"):
        return [argv[0], *argv[2:]]
    plain, command = split_command(argv[2:])
    return [argv[0], *command] if plain and SERVER_ENV not in os.environ else argv


def become_fork(argv: list[str]) -> None:
    "Let a fork do what this process was started for, and end as it ends; returns where there is no server"
    parent = os.getppid()
    is_module = argv[1] == "-m"
    ours, theirs = socket.socketpair()
    process = fork_process(
        "preloaded_jobs:run_python",
        {"argv": argv[2:] if is_module else argv[1:], "is_module": is_module},
        warm_up_of(argv),
        os.environ,
        1,
        [theirs.fileno(), 0],
    )
    if process is None:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(process.pid, number))
    theirs.close()
    code = None
    while code is None:
        if (
            os.getppid() != parent
        ):  # Ray's workers end with their raylet, kernels with who started them
            os._exit(1)
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(0.5)
    ours.close()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def run_python(parent_fd: int, input_fd: int, argv: list[str], is_module: bool) -> None:
    "In the fork: `python ARGV` or `python -m ARGV`"
    os.dup2(input_fd, 0)  # Ray's agents end when it does
    os.close(input_fd)
    threading.Thread(target=_end_with, args=[parent_fd], daemon=True).start()
    sys.argv = list(argv)
    if is_module:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(argv[0])
        runpy.run_path(argv[0], run_name="__main__")


def _end_with(fd: int) -> None:
    "End this process when the one that stands for it has ended"
    os.read(fd, 1)
    os.kill(os.getpid(), signal.SIGKILL)
