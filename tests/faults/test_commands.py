"""Runs of the command whose kernel, Ray or disk fails, and two commands for one run: one sentence says
what happened, where the run is and how to resume it, and nothing else is left.
"""

import contextlib
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from places import ROOT
from whole_runs import parameters, preloaded, rows

pytestmark = pytest.mark.lane("runs")
PROGRAM = str(Path(sys.executable).parent / "cookbook-npu")
SMALL = {"model.tiny.hidden_size": 32, "model.tiny.ffn_size": 64}
NO_EVAL = {"rollout.eval_every": 0, "train.save_every": 2}


class Command:
    "A run of the command, with temporary files of its own"

    def __init__(
        self,
        work: Path,
        recipe: str,
        forks: bool = True,
        before: Sequence[str] = (),  # words in front of the command
        root: Path | None = None,  # of the run folder
        **overrides,
    ):
        root = root or work
        self.folder = root / "run"
        self.scratch = work / "t"
        self.scratch.mkdir(exist_ok=True)
        values = parameters(root, "run", steps=200, **NO_EVAL, **overrides)
        del values["overrides"]["output.resume"], values["overrides"]["output.restart"]
        file = work / "parameters.json"
        file.write_text(json.dumps(values))
        self.words = [*before, PROGRAM, "run", recipe, "-f", str(file)]
        env = preloaded() if forks else os.environ | {"OMP_NUM_THREADS": "1"}
        self.env = env | {"TMPDIR": str(self.scratch)}
        self.log = work / "log"
        with open(self.log, "w") as log:
            self.process = psutil.Popen(
                self.words, stdout=log, stderr=log, cwd=ROOT, env=self.env
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for_steps(self, count: int = 2) -> None:
        "Wait until so many steps are logged"
        deadline = time.monotonic() + 400
        while (
            not (self.folder / "metrics.jsonl").exists() or len(rows(self.folder)) < count
        ):
            assert self.process.is_running(), self.text()
            assert self.process.status() != psutil.STATUS_ZOMBIE, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def descendants(self, name: str) -> list[psutil.Process]:
        "Processes below the command whose name or arguments hold a text"
        found = []
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if name in process.name() or name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def check_ended(self, code: int, words: str, folder: Path | None = None) -> None:
        "The command ends with this code and one sentence with the folder"
        assert self.process.wait(400) == code, self.text()
        text = self.text()
        assert "Traceback" not in text, text[-3000:]
        assert words in " ".join(text.split()), text[-3000:]
        hint = f"resume with: cookbook-npu run --resume {folder or self.folder}"
        assert hint in text, text[-3000:]
        if folder is None:
            assert (self.folder / "notebook.ipynb").is_file()
            assert not list(self.folder.parent.glob(".*.ipynb"))

    def leftovers(self) -> list[str]:
        "Temporary files, and processes with a file open among them"
        # made by an import of the tests' own fork servers
        found = [p.name for p in self.scratch.iterdir() if p.name[:13] != "torchinductor"]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                descriptors = Path(f"/proc/{process.pid}/fd").iterdir()
                if any(os.readlink(d).startswith(str(self.scratch)) for d in descriptors):
                    found.append(process.name())
        return found


@pytest.fixture
def start(tmp_path):
    "Start a command that is ended after the test"
    commands = []

    def begin(*args, **more) -> Command:
        commands.append(Command(tmp_path, *args, **more))
        return commands[-1]

    yield begin
    for command in commands:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*command.descendants(""), command.process]:
                process.kill()
            command.process.wait(10)


def test_a_killed_kernel_is_one_sentence_and_leaves_nothing(start, tmp_path):
    "And a second command for the same run was refused at once before"
    command = start("qwen3_4b_colocate", forks=False)
    while not (tmp_path / ".run.ipynb").exists():
        time.sleep(0.05)
    second = subprocess.run(
        command.words, capture_output=True, text=True, cwd=ROOT, env=command.env
    )
    assert second.returncode == 2, second.stdout + second.stderr
    assert "another command runs" in second.stderr and "Traceback" not in second.stderr
    assert command.process.is_running(), "the second command waited for the first"
    command.wait_for_steps()
    (kernel,) = command.descendants("ipykernel_launcher")
    tables = list(Path("/dev/shm").glob(f"cookbook_npu_simulator_*cbn{kernel.pid}x*"))
    assert tables
    kernel.kill()
    command.check_ended(1, "the kernel of the notebook has ended")
    assert command.leftovers() == []
    assert not list(command.scratch.glob("torchinductor_*"))
    assert not [path for path in tables if path.exists()]


def test_a_killed_gcs_is_named(start):
    "Ray itself would end every process of the run a minute later, and say nothing of it"
    command = start("qwen3_5_9b_async", **SMALL)
    command.wait_for_steps()
    (gcs,) = command.descendants("gcs_server")
    gcs.kill()
    command.check_ended(1, "Ray has ended on this machine (gcs_server")
    assert command.leftovers() == []


def test_a_disk_that_others_fill_ends_a_run_that_can_be_resumed(start, tmp_path):
    "The notebook cannot be written, either, which is no reason to end"
    apart = "unshare --user --map-root-user --mount".split()
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("a disk of some MB needs a user namespace, which is not permitted here")
    disk = tmp_path / "disk"
    disk.mkdir()
    # the disk is gone with its last process: a copy of the run is made before
    script = f'mount -t tmpfs -o size=32m none {disk} && "$@"; code=$?; '
    script += f"cp -a {disk}/run {tmp_path}; mv {tmp_path}/run/notebook.ipynb {tmp_path}; exit $code"
    before = [*apart, "sh", "-c", script, "sh"]
    command = start("qwen3_4b_colocate", before=before, root=disk, **SMALL)
    inside = Path(f"/proc/{command.process.pid}/root{disk}")
    command.folder = inside / "run"
    command.wait_for_steps()
    try:
        (inside / "of_another_program").write_bytes(bytes(64 * 2**20))
    except OSError as error:
        assert error.errno == errno.ENOSPC
    command.check_ended(
        1, "could not be written: No space left on device", folder=disk / "run"
    )
    assert command.leftovers() == []
    json.loads((tmp_path / "notebook.ipynb").read_text())
    assert [row["step"] for row in rows(tmp_path / "run")][:2] == [1, 2]
