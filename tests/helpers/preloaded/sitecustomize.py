"""Python imports this when it starts, where this folder is on PYTHONPATH: Ray's workers and notebook
kernels of a run are then forks of a server that has imported what they need.

The process that was started stays, as a name for the other: it passes signals on, waits, and ends as the
other ends. Without a server it goes on as if this file were not there.
"""

import os
import sys

SCRIPTS = ("ray/_private/workers/default_worker.py",)
MODULES = ("ipykernel_launcher",)


def wanted(argv: list[str]) -> bool:
    "Is this the start of a worker or of a kernel?"
    if len(argv) > 2 and argv[1] == "-m":
        return argv[2] in MODULES
    return len(argv) > 1 and argv[1].endswith(SCRIPTS)


if "COOKBOOK_NPU_FORK_SERVERS" in os.environ and wanted(sys.orig_argv):
    from preloaded_jobs import become_fork

    become_fork(sys.orig_argv)
