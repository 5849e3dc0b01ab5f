"""What several test files share: servers whose forks are the processes of tests, and an undisturbed run."""

import fcntl
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from places import HELPERS
from whole_runs import configure, run

from cookbook_npu.fork_server import make_folder


def pytest_configure(config):
    "One folder of fork servers for the session; processes of tests find the helpers"
    _take_signals()
    if hasattr(config, "workerinput"):
        return  # a worker of pytest-xdist has the variables of its controller
    config.fork_servers = Path(tempfile.mkdtemp(prefix="cb_")) / "servers"
    os.environ.update(make_folder(config.fork_servers))
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HELPERS), inherited]))


def _take_signals() -> None:
    """Stops are tested with signals, and a program keeps ignoring what its parent ignores.

    A shell that starts the tests in the background has them ignore SIGINT, nohup SIGHUP."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def pytest_unconfigure(config):
    if hasattr(config, "fork_servers"):
        shutil.rmtree(config.fork_servers.parent)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Path:
    "The folder of a small run that nobody disturbed; the workers of pytest-xdist share it"
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "undisturbed"
    root.mkdir(exist_ok=True)
    with open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "done").exists():
            run(configure(root, "run"))
            (root / "done").touch()
    return root / "run"
