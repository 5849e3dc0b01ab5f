"""What several test files share: servers whose forks are the processes of tests, and an undisturbed run."""

import fcntl
import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from places import HELPERS, ROOT
from whole_runs import configure, run

from cookbook_npu.npu.shims.torchvision_ops import install_finder
from cookbook_npu.npu.simulator.fork_server import make_folder
from cookbook_npu.scratch import (
    SESSION_PREFIX,
    compiled_env,
    make_scratch,
    remove_scratch,
    sweep_scratch,
)

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("repeatable")
install_finder()  # tests load vision models in an environment whose torchvision is a CUDA build


def pytest_configure(config):
    "A folder of fork servers and temporary files for the session; processes of tests find the helpers"
    _take_signals()
    os.environ.pop("COLUMNS", None)  # xdist's 80 would continue long lines of commands
    if hasattr(config, "workerinput"):
        return  # a worker of pytest-xdist has the variables of its controller
    sweep_scratch()
    config.scratch = make_scratch(SESSION_PREFIX, _short_root())
    os.environ.update(make_folder(config.scratch / "s"))
    _keep_temporary_files(config.scratch / "t")
    # runs put the working folder first, and a server has one PYTHONPATH
    path = [str(ROOT), str(HELPERS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, path)))
    os.environ.update(compiled_env())


def _short_root() -> Path:
    "Where temporary files are; sockets have 107 bytes for their address"
    root = Path(tempfile.gettempdir())
    return root if len(os.fsencode(root)) <= 16 else Path("/tmp")


def _keep_temporary_files(folder: Path) -> None:
    """What the tests and their processes leave among temporary files goes with the session.

    pytest's own folders stay where they were: one looks into them after a failure."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder.mkdir()
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None


def _take_signals() -> None:
    """Stops are tested with signals, and a program keeps ignoring what its parent ignores.

    A shell that starts the tests in the background has them ignore SIGINT, nohup SIGHUP."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT  # raises, as in the foreground
            signal.signal(
                number, signal.default_int_handler if is_interrupt else signal.SIG_DFL
            )


def pytest_addoption(parser):
    lanes = (
        "run the tests of these lanes (names separated by commas) instead of the fast ones"
    )
    parser.addoption("--lane", default="", help=lanes)


def pytest_collection_modifyitems(config, items):
    "Leave out the tests of lanes, unless asked for a lane or for a file or test by name"
    wanted = set(filter(None, config.getoption("--lane").split(",")))
    if not wanted and any(".py" in word for word in config.args):
        return
    kept, others = [], []
    for item in items:
        mark = item.get_closest_marker("lane")
        chosen = mark.args[0] in wanted if wanted and mark else not wanted and not mark
        (kept if chosen else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


def pytest_unconfigure(config):
    if hasattr(config, "scratch"):
        remove_scratch(config.scratch)


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
