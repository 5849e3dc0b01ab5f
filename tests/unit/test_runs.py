"""Run folders in trouble: two writers, a process killed while it writes, a full disk, many creators"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from cookbook_npu.cli import main
from cookbook_npu.config import RunConfig, override
from cookbook_npu.errors import RunLocked, StorageError
from cookbook_npu.recipes import qwen3_4b_multi_lora_grpo
from cookbook_npu.runs.folder import RunFolder, append_line, read_lines
from cookbook_npu.runs.metrics import load_metrics
from cookbook_npu.runs.report import write_report

WRITER = """
import sys, time
from cookbook_npu.runs.folder import RunFolder, append_line
run = RunFolder.open(sys.argv[1], write=True)
print("ready", flush=True)
if sys.argv[2] == "idle": time.sleep(60)
step = 0
while True:
    append_line(run.metrics_file, {"step": step, "filler": "x"*20000})
    run.save_samples(step % 3, [{"text": "y"*2000}]*50)
    run.event("tick", step=step)
    step += 1
"""
SPAN = dict(role="driver", phase="step", start=0.0, end=1.0, version=1)


def make(tmp_path, name="run"):
    output = {"root": str(tmp_path / "runs"), "name": name}
    RunFolder.create(RunConfig(recipe="demo", num_steps=1, output=output)).close()
    return tmp_path / "runs" / name


def writer(path, how):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), how], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().strip() == "ready"
    return process


def test_the_second_writer_is_refused_at_once_and_told_who_holds_the_folder(tmp_path):
    path = make(tmp_path)
    first = writer(path, "idle")
    try:
        with pytest.raises(RunLocked, match=f"is being written by process {first.pid} on "):
            RunFolder.open(path, write=True)
        assert RunFolder.open(path).config().recipe == "demo"  # readers are welcome
    finally:
        first.kill()
        first.wait()
    RunFolder.open(path, write=True).close()  # the lock went with its holder


@pytest.mark.parametrize("pause", [0.01, 0.05, 0.2])
def test_kill_9_while_writing_leaves_files_that_can_be_read(tmp_path, pause):
    path = make(tmp_path)
    process = writer(path, "busy")
    time.sleep(pause)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with RunFolder.open(path, write=True) as run:
        steps = load_metrics(path).get("step", [])
        assert steps == list(range(len(steps)))
        # the run goes on with a whole line
        append_line(run.metrics_file, {"step": len(steps)})
        assert load_metrics(path)["step"] == list(range(len(steps) + 1))
        assert len(read_lines(run.events_file)) in (len(steps), len(steps) - 1)
        for file in run.samples.glob("step_*.jsonl"):
            assert len(read_lines(file)) == 50
        assert "not measured" in write_report(run).read_text()


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_cut_off_at_any_byte_is_left_out_and_repaired(tmp_path, end):
    path = make(tmp_path)
    lines = [b'{"step": 0, "raw_reward": 0.5}\n', b'{"step": 1, "raw_reward": 0.75}\n']
    for size in range(len(b"".join(lines)) + 1):
        cut = b"".join(lines)[:size] + (end if size else b"")
        kept = [line for line in lines if line in cut]
        (path / "metrics.jsonl").write_bytes(cut)
        torn = cut != b"".join(kept)
        assert len(RunFolder(path).truncated_lines()) == torn
        assert load_metrics(path).get("step", []) == list(range(len(kept)))
        with RunFolder.open(path, write=True) as run:
            assert run.metrics_file.read_bytes() == b"".join(kept)


@pytest.mark.parametrize("words", ["report {0}", "runs {0.parent}", "compare {0} {0}"])
def test_a_command_reads_a_run_that_was_killed_while_it_wrote(words, tmp_path, command):
    path = make(tmp_path)
    for file, line in {"metrics": {"raw_reward": 1}, "events": {}, "spans": SPAN}.items():
        text = json.dumps({"step": 1, **line}) + '\n{"step": 2, "\n'
        (path / f"{file}.jsonl").write_text(text)
    code, out = command(words.format(path))
    assert code == 0, out
    for file in ("metrics", "events", "spans"):
        assert f"{file}.jsonlline2istruncated" in "".join(out.split())


@pytest.fixture
def command(monkeypatch, capsys):
    "Runs a command; returns its exit code and what it prints"

    def run(words):
        monkeypatch.setattr(sys, "argv", ["cookbook-npu", *words.split()])
        ended = 0
        try:
            main()
        except SystemExit as end:
            ended = end.code or 0
        return ended, "".join(capsys.readouterr())

    return run


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_named_and_harms_nothing(small_disk):
    path = make(small_disk)
    with RunFolder.open(path, write=True) as run:
        append_line(run.metrics_file, {"step": 0})
        with pytest.raises(
            StorageError,
            match=r"step_000000.jsonl could not be written: No space left .* Free space",
        ):
            run.save_samples(0, [{"text": "x" * 1_000_000}])
        assert list(run.samples.iterdir()) == []
        free = os.statvfs(path)
        (path / "ballast").write_bytes(b"x" * (free.f_bavail * free.f_frsize))
        with pytest.raises(
            StorageError, match="metrics.jsonl could not be written: No space left"
        ):
            append_line(run.metrics_file, {"step": 1, "filler": "x" * 8192})
        assert read_lines(run.metrics_file) == [{"step": 0}]
        with pytest.raises(StorageError):
            make(small_disk, "second")
        assert sorted(p.name for p in (small_disk / "runs").iterdir()) == ["run"]
        (path / "ballast").unlink()
        append_line(run.metrics_file, {"step": 1})
        assert load_metrics(path)["step"] == [0, 1]


def test_a_read_only_place_is_named(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(
        StorageError, match="runs could not be written: Read-only file system"
    ):
        make(small_disk)


@pytest.fixture
def tenants(tmp_path, monkeypatch):
    "A run of two tenants, killed after a step, in a project; the working folder is its recipes/"
    project = tmp_path.resolve() / "project"
    (project / "recipes").mkdir(parents=True)
    (project / "recipes" / "mine.ipynb").touch()
    monkeypatch.chdir(project / "recipes")
    monkeypatch.delenv("COOKBOOK_RUNS", raising=False)
    place = {"output.root": str(project / "runs"), "output.name": "one"}
    config = qwen3_4b_multi_lora_grpo(num_steps=2, overrides=place)
    with RunFolder.create(config) as run:
        run.tenants.mkdir()
        for name, own in config.of_tenants.items():
            inside = {"output.root": str(run.tenants), "output.name": name}
            with RunFolder.create(override(own, inside)) as tenant:
                append_line(tenant.metrics_file, {"step": 1, "raw_reward": 0.5})
                answer = {"text": "seven", "correct": False, "label": "7"}
                answer["metadata"] = {"prompt_id": "p", "prompt": f"of {name}"}
                tenant.save_samples(0, [answer], "eval")
        append_line(run.metrics_file, {"step": 1, "raw_reward": 0.5})
    return run.path


ONE = "runs/one/tenants/addition"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("samples one", 0, "addition\nof addition   correct: 7"),
        ("samples runs/one", 0, "counting\nof counting   correct: 7"),
        (f"samples {ONE}", 0, "of addition   correct: 7"),
        (
            "samples one --worst",
            2,
            "each of them has its own samples. Give the folder of one: ",
        ),
        ("eval one", 2, "each of them has its own checkpoints. Give the folder of one: "),
        (
            f"eval {ONE}",
            2,
            "one (no checkpoint yet); resume with: cookbook-npu run --resume ",
        ),
        ("report one/tenants/addition", 0, "tenants/addition/report.html"),
        (
            f"compare {ONE} {ONE}",
            2,
            "has 1 of 2 steps: only complete runs are compared. folder",
        ),
        (f"run --resume {ONE}", 2, "addition is a tenant of a run. Give the run: "),
        ("run --resume runs/one", 2, "addition has 1 steps and no good checkpoint: "),
    ],
)
def test_a_command_finds_a_run_and_its_tenants(
    words, code, said, tenants, monkeypatch, command
):
    "By name, runs/NAME or the folder of a tenant; a resume that cannot work starts no kernel"
    monkeypatch.setattr(
        "cookbook_npu.cli.execute", lambda *_: pytest.fail("a kernel starts")
    )
    ended, out = command(words)
    assert (ended, said in out) == (code, True), out
