"""Python imports this when it starts, where this folder is on PYTHONPATH: Ray's workers and agents
and notebook kernels are then forks of a server that has imported what they need.

The process that was started stays, as a name for the other: it passes signals on, waits, and ends as the
other ends. Without a server it goes on as if this file were not there.
"""

import os
import sys

SCRIPTS = (
    "ray/_private/workers/default_worker.py",
    "ray/_private/runtime_env/agent/main.py",
    "ray/dashboard/agent.py",
)
MODULES = ("ipykernel_launcher",)


def wanted(argv: list[str]) -> bool:
    "Is this the start of one of them?"
    if len(argv) > 2 and argv[1] == "-m":
        return argv[2] in MODULES
    return len(argv) > 1 and argv[1].endswith(SCRIPTS)


arguments = [word for word in sys.orig_argv if word != "-u"]  # Ray's agents are started so
if arguments[1:2] in (
    ["-Pmcookbook_npu.npu.simulator.preload"],
    ["-uPmcookbook_npu.npu.simulator.preload"],
):
    from preloaded_jobs import without_preload

    arguments = without_preload(arguments)
if "COOKBOOK_NPU_FORK_SERVERS" in os.environ and wanted(arguments):
    from preloaded_jobs import become_fork

    become_fork(arguments)
