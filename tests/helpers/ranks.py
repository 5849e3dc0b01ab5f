"""Run one function in several processes, the ranks of a job, without Ray or torchrun.

In a test session the processes are forks of a server that has done the imports and the bootstrap; without
a server, or with `fresh=True`, they are new interpreters. `bootstrap` runs before the target's module is
imported. None: nothing (the target may install the simulated NPU itself); "simulator": install it;
"trainer", "rollout", "plain": the full bootstrap of a worker of that role; a name with a colon is called.
"""

import faulthandler
import importlib
import importlib.util
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from places import HELPERS, ROOT
from preloaded_jobs import TRAINER_RANK

from cookbook_npu.errors import ConfigError, RoleError, RoleTimeout
from cookbook_npu.npu.device import free_port
from cookbook_npu.npu.shims.bootstrap import PROCESS_ROLES
from cookbook_npu.npu.simulator.fork_server import ForkedProcess, fork_process


def import_target(target: str) -> Callable:
    "Return the function named 'package.module:function' or '/path/file.py:function'"
    where, _, name = target.rpartition(":")
    if not where:
        raise ConfigError(
            f"target {target!r} names no function",
            "Write 'package.module:function' or '/path/file.py:function'.",
        )
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    if not hasattr(module, name):
        raise ConfigError(
            f"{where} has no function {name!r}", "Check the name after the colon."
        )
    return getattr(module, name)


# slow imports of Megatron that are safe before the shims are applied
MEGATRON_IMPORTS = ("torch.distributed.tensor", "torch.distributed.checkpoint")
_SIMULATOR = "cookbook_npu.npu.simulator:install"


def _run_bootstrap(bootstrap: str | None) -> None:
    import_target("cookbook_npu.npu.shims.torchvision_ops:install_finder")()
    if bootstrap == "simulator":
        bootstrap = _SIMULATOR
    if bootstrap is not None and ":" in bootstrap:
        import_target(bootstrap)()
    elif bootstrap is not None:
        import_target("cookbook_npu.npu.shims.bootstrap:bootstrap")(bootstrap)


def warm_up_of(bootstrap: str | None, preload: Sequence[str] = ()) -> list[str] | None:
    "Return the imports and calls of a fork server for these ranks; None: use new interpreters"
    ranks = "ranks"
    if bootstrap in PROCESS_ROLES:
        return [ranks, f"cookbook_npu.npu.shims.bootstrap:bootstrap:{bootstrap}", *preload]
    own: list[str] = []
    if bootstrap == "simulator":
        own = [_SIMULATOR]
    elif bootstrap is not None and bootstrap.startswith("cookbook_npu."):
        own = [bootstrap]
    elif bootstrap is not None and ".py:" in bootstrap:
        own = [*MEGATRON_IMPORTS]  # it runs in the fork; most of them import Megatron
    elif bootstrap is not None and bootstrap.partition(":")[0] not in preload:
        return None  # the module name may be ambiguous in a fork server
    finder = "cookbook_npu.npu.shims.torchvision_ops:install_finder"
    return [finder, "torch", ranks, *own, *preload]


def rank_main(
    parent_fd: int,  # socket for the pickled (ok, value) pair
    job: bytes | None = None,  # pickled; None: read it from standard input
) -> None:
    "Run a rank; return when the parent closes the socket"
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    call = pickle.loads(sys.stdin.buffer.read() if job is None else job)
    reply = b""
    try:
        _run_bootstrap(call["bootstrap"])
        value = import_target(call["target"])(
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            **call["kwargs"],
        )
        reply = pickle.dumps((True, value))
    finally:  # report every exit, SystemExit included
        if not reply:
            reply = pickle.dumps((False, traceback.format_exc()))
        sys.stdout.flush()
        with socket.socket(fileno=parent_fd) as parent:
            parent.sendall(reply)
            parent.shutdown(socket.SHUT_WR)
            parent.recv(1)


def simulated_rank_env(
    rank: int, world_size: int, port: int, extra: dict[str, str | None] | None = None
) -> dict[str, str]:
    "Return the complete environment of one rank"
    env = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "COOKBOOK_NPU_SIMULATE": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **(extra or {}),
    }
    given = (env.get("PYTHONPATH") or "").split(os.pathsep)
    paths = [str(ROOT), *given, str(HELPERS)]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    return {name: str(value) for name, value in env.items() if value is not None}


@dataclass
class _Rank:
    "One running process and what it has replied"

    rank: int
    process: subprocess.Popen | ForkedProcess
    child: socket.socket
    log: IO[bytes]
    reply: bytearray = field(default_factory=bytearray)
    done: bool = False

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def receive(self) -> bool:  # True: the rank has replied or died
        chunk = self.child.recv(1 << 20)
        self.reply += chunk
        return not chunk


def _end(process: subprocess.Popen | ForkedProcess) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _start(
    stack: ExitStack,
    rank: int,
    env: dict[str, str],
    job: bytes,
    warm_up: list[str] | None,
) -> _Rank:
    "Start one rank; closing `stack` kills it"
    parent_end, child_end = socket.socketpair()
    stack.enter_context(parent_end)
    stack.enter_context(child_end)
    log = stack.enter_context(tempfile.TemporaryFile())
    fd = child_end.fileno()
    process = None
    if warm_up is not None:
        main = "ranks:rank_main"
        process = fork_process(main, {"job": job}, warm_up, env, log.fileno(), [fd])
    if process is None:
        process = _start_interpreter(fd, env, job, log)
    stack.callback(_end, process)
    child_end.close()
    return _Rank(rank, process, parent_end, log)


def _start_interpreter(
    fd: int, env: dict[str, str], job: bytes, log: IO[bytes]
) -> subprocess.Popen:
    code = f"from ranks import rank_main; rank_main({fd})"
    # -P: ignore folders of the working directory that are named like a package
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        env=env,
        pass_fds=[fd],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    assert process.stdin is not None
    process.stdin.write(job)
    process.stdin.close()
    return process


def _value(rank: _Rank, target: str) -> Any:
    "Return the result of a rank that has replied; raise `RoleError` for a failure"
    if not rank.reply:
        code = rank.process.wait()
        raise RoleError(
            f"rank {rank.rank} of {target} died with exit code {code}\n{rank.output()[-4000:]}",
            "The text above is its last output.",
        )
    ok, value = pickle.loads(bytes(rank.reply))
    if not ok:
        raise RoleError(
            f"rank {rank.rank} of {target} failed\n{rank.output()[-2000:]}\n{value}",
            "The text above is its traceback.",
        )
    return value


def _raise_timeout(ranks: list[_Rank], target: str, timeout: float) -> None:
    waiting = [r for r in ranks if not r.done]
    for r in waiting:
        os.kill(r.process.pid, signal.SIGUSR1)
    time.sleep(0.5)  # the children write their stacks
    numbers = [r.rank for r in waiting]
    stacks = "\n".join(f"--- rank {r.rank}\n{r.output()[-3000:]}" for r in waiting)
    raise RoleTimeout(
        f"ranks {numbers} of {target} had not returned after {timeout:g} s\n{stacks}",
        "The text above shows where they wait; give a longer timeout if they are only slow.",
    )


def _collect_results(ranks: list[_Rank], target: str, timeout: float) -> list[Any]:
    results = {}
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for r in ranks:
            selector.register(r.child, selectors.EVENT_READ, r)
        while len(results) < len(ranks):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                _raise_timeout(ranks, target, timeout)
            for key, _ in ready:
                if not key.data.receive():
                    continue
                key.data.done = True
                selector.unregister(key.fileobj)
                results[key.data.rank] = _value(key.data, target)
    return [results[r.rank] for r in ranks]


def run_ranks(
    target: str,  # called as fn(rank=, world_size=, **kwargs); see `import_target`
    n: int,  # processes
    kwargs: dict | None = None,  # picklable, equal for all ranks
    env: dict[str, str | None] | None = None,  # additional variables; None removes one
    timeout: float = 120,  # s
    bootstrap: str | None = None,  # see the first lines of this file
    preload: Sequence[str] = (),  # modules that the target imports; a fork server has them
    fresh: bool = False,  # use new interpreters, not forks
) -> list[Any]:  # results in rank order
    "Run `target` in `n` processes; the first failure or timeout ends all and raises `RoleError`"
    if n < 1:
        raise ConfigError(f"run_ranks got n = {n}", "Give at least 1.")
    job = pickle.dumps({"target": target, "kwargs": kwargs or {}, "bootstrap": bootstrap})
    warm_up = None if fresh else warm_up_of(bootstrap, preload)
    port = free_port()
    with ExitStack() as stack:
        ranks = []
        for rank in range(n):
            own = simulated_rank_env(rank, n, port, env)
            ranks.append(_start(stack, rank, own, job, warm_up))
        results = _collect_results(ranks, target, timeout)
        for r in ranks:
            r.child.close()
        for r in ranks:
            r.process.wait()
        sys.stdout.write(ranks[0].output())
    return results


def run_trainers(
    target: str, n: int = 1, env: dict[str, str | None] | None = None, **kwargs: Any
) -> list[Any]:
    "`run_ranks` with the bootstrap of a trainer, in forks of the server that has its imports"
    return run_ranks(target, n, kwargs, env, 600, "trainer", TRAINER_RANK)
