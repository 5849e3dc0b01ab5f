"""Runs that are asked to stop, once and twice, by every signal that means it: what they leave is a run
folder to go on with, and nothing else.
"""

import contextlib
import http.server
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from local_server import serve
from places import HELPERS, ROOT
from whole_runs import (
    ONE_DEVICE,
    RAY_AGENTS,
    STEPS,
    Driver,
    configure,
    events,
    learned,
    parameters,
    preloaded,
    prompts,
    rows,
    run,
    weights,
)

from cookbook_npu.heartbeat import read_heartbeat
from cookbook_npu.runs.trackers import TRACKERS

pytestmark = pytest.mark.lane("runs")
DEFAULT = {"train.save_every": 10}  # of the recipe: here only after the last step


def until(what, timeout=300.0):
    "What a function returns as soon as that is true; fails when it never is"
    deadline = time.monotonic() + timeout
    while not (found := what()):
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.02)
    return found


@contextlib.contextmanager
def held(folder: Path):
    "Within the block the workers of a run do nothing, so that it cannot end by itself"
    found = [read_heartbeat(path) for path in folder.glob("logs/*.heartbeat")]
    workers = [psutil.Process(status.pid) for status in found if status]
    for worker in workers:
        worker.suspend()
    try:
        yield
    finally:
        for worker in workers:
            worker.resume()


class Traces:
    "What a run under way has on this machine beside its folder"

    def __init__(self, process: psutil.Process, folder: Path):
        found = [read_heartbeat(path) for path in folder.glob("logs/*.heartbeat")]
        self.workers = [psutil.Process(status.pid) for status in found if status]
        owner = psutil.Process(int((folder / ".lock").read_text().split()[1]))
        # a kernel of the tests may be a fork of a server that is nobody's child here
        below = {*process.children(recursive=True), *owner.children(recursive=True)}
        # a server that was started on the way serves others
        own = [p for p in below if not any("fork_server" in w for w in p.cmdline())]
        self.tree = list({process, owner, *own, *self.workers})
        (raylet,) = [p for p in self.tree if p.name() == "raylet"]
        words = [word for word in raylet.cmdline() if "session_dir=" in word]
        # session_<time>_<pid>, Ray's folder, and ours around it
        self.scratch = Path(words[0].partition("=")[2]).parent.parent
        self.shared = [f"cookbook_npu_simulator_*cbn{owner.pid}x*"]
        self.shared += [f"cookbook_npu_weights_{p.pid}_*" for p in self.workers]

    def addresses(self) -> set[str]:
        "Where the processes listen"
        found = set()
        for process in self.tree:
            try:
                connections = process.net_connections("inet")
            except psutil.NoSuchProcess:
                continue  # it has ended since the tree was listed
            for connection in connections:
                if connection.status == psutil.CONN_LISTEN:
                    found.add(connection.laddr.ip)
        return found

    def check_gone(self):
        "Nothing is left"
        _, left = psutil.wait_procs(self.tree, timeout=200)
        assert not left, f"still running: {left}"
        assert not self.scratch.exists()
        found = [name for glob in self.shared for name in Path("/dev/shm").glob(glob)]
        assert not found


def read_until_ended(reaper: subprocess.Popen) -> str:
    "What the command prints; the reaper itself also inherits fork servers, which live on"
    lines = []
    for line in reaper.stdout:
        lines.append(line)
        if line.startswith("ended"):
            break
    return "".join(lines)


def end_all(*processes) -> None:
    "End processes, also after a test that failed"
    for process in processes:
        try:
            process.kill()
            process.wait(10)
        except psutil.NoSuchProcess:
            continue


def is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


@pytest.mark.timeout(900)
def test_sigterm_ends_the_command_and_its_kernel_between_two_steps(
    undisturbed, tmp_path, request
):
    "Under a subreaper, where a kernel does not notice that the command is gone; then the run goes on"
    folder = tmp_path / "run"
    # two of them put handlers of their own in front of a run's
    tracked = {**DEFAULT, "output.trackers": list(TRACKERS)}
    tracked["rollout.simulated_latency"] = 0.1  # the stop comes before the last step
    file = tmp_path / "parameters.json"
    file.write_text(json.dumps(parameters(tmp_path, "run", **tracked)))
    program = str(Path(sys.executable).parent / "cookbook-npu")
    words = [program, "run", "qwen3_4b_colocate", "-f", str(file)]
    reaper = subprocess.Popen(
        [sys.executable, str(HELPERS / "subreaper.py"), *words],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=preloaded(),
    )
    command = psutil.Process(int(reaper.stdout.readline()))
    request.addfinalizer(lambda: end_all(reaper, command))
    until(lambda: (folder / "metrics.jsonl").exists() and len(rows(folder)) >= 2)
    with held(folder):
        traces = Traces(command, folder)
        addresses = traces.addresses()
        assert traces.scratch.stat().st_mode & 0o077 == 0
        command.send_signal(signal.SIGTERM)
    text = read_until_ended(reaper)
    traces.check_gone()
    assert "ended 75" in text, text[-3000:]

    done = rows(folder)[-1]["step"]
    assert 0 < done < STEPS, "the stop came too late"
    hint = f"folder {folder} (checkpoint of step {done}); resume with: cookbook-npu run --resume {folder}\n"
    assert text.count(f"stopped at step {done} of {STEPS}; {hint}") == 1, text[-3000:]
    assert [event["step"] for event in events(folder, "stopped")] == [done]
    assert [p.name for p in (folder / "checkpoints").iterdir()] == [f"step_{done:06d}"]
    notebook = json.loads((folder / "notebook.ipynb").read_text())
    outputs = [o for cell in notebook["cells"] for o in cell.get("outputs", [])]
    (error,) = [o for o in outputs if o["output_type"] == "error"]
    assert error["ename"] == "RunStopped" and len(error["traceback"]) <= 3, error
    assert not list(tmp_path.glob(".*.ipynb"))
    assert {a for a in addresses if not is_loopback(a)} == set()

    ids = json.loads((folder / "trackers.json").read_text())
    run(configure(tmp_path, "run", resume=True, **tracked))
    assert learned(folder) == learned(undisturbed)
    assert prompts(folder) == prompts(undisturbed)
    assert weights(folder) == weights(undisturbed)
    assert ids.keys() == set(TRACKERS)
    # SwanLab writes a run on this machine anew, so that no step stands twice
    again = json.loads((folder / "trackers.json").read_text())
    assert {name for name in ids if again[name] != ids[name]} == {"swanlab"}
    assert (
        len(
            list(
                folder.glob(f"trackers/wandb/wandb/offline-run-*/run-{ids['wandb']}.wandb")
            )
        )
        == 2
    )


@pytest.mark.parametrize(
    ("signals", "code"),
    [([signal.SIGINT], 75), ([signal.SIGTERM, signal.SIGTERM], 143)],
    ids=["once", "twice"],
)
def test_a_program_with_a_session_is_stopped(tmp_path, signals, code):
    "By Ctrl-C as a terminal sends it, to all processes of the group; and by the impatient"
    driver = Driver(configure(tmp_path, "run", **DEFAULT))
    folder = tmp_path / "run"
    until(lambda: any(line.startswith('{"step": 1') for line in driver.lines))
    with held(folder):
        traces = Traces(psutil.Process(driver.process.pid), folder)
        for number in signals:
            os.killpg(driver.process.pid, number) if code == 75 else os.kill(
                driver.process.pid, number
            )
            # two signals of one kind that are not yet taken are one
            until(lambda: "stopping after this step" in driver.text())
    assert driver.end() == code, driver.text()
    traces.check_gone()
    assert "Traceback" not in driver.text()
    more = "" if code == 75 else " --restart"  # no checkpoint yet
    assert f"resume with: cookbook-npu run --resume {folder}{more}\n" in driver.text()
    done = rows(folder)[-1]["step"]
    made = [path.name for path in (folder / "checkpoints").glob("step_*")]
    assert made == ([f"step_{done:06d}"] if code == 75 else [])


def test_a_program_is_stopped_while_its_session_starts(tmp_path):
    driver = Driver(configure(tmp_path, "run", **DEFAULT, **ONE_DEVICE))
    process = psutil.Process(driver.process.pid)

    def raylets():
        return [p for p in process.children(recursive=True) if p.name() == "raylet"]

    until(raylets)
    tree = [process, *process.children(recursive=True)]
    os.kill(driver.process.pid, signal.SIGTERM)
    assert driver.end() == 143, driver.text()
    waits = [p for p in tree if p.is_running() and p.name() not in RAY_AGENTS]
    _, left = psutil.wait_procs(waits, timeout=200)
    assert not left
    assert "stopped at once; folder" in driver.text() and "Traceback" not in driver.text()


class LetterJudge(http.server.BaseHTTPRequestHandler):
    "Scores a response by its letters, the same way every time"

    asked: list[str]

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"data": [{"id": "letters"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        self.asked.append(text)
        said = f"Score: {sum(map(ord, text)) % 97 / 9.7}"
        usage = {"prompt_tokens": len(text), "completion_tokens": 3}
        self.answer({"choices": [{"message": {"content": said}}], "usage": usage})


SPLIT = {
    "placement.mode": "split",
    "placement.devices": 4,
    "algorithm.rollout_is": "truncate",
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(ONE_DEVICE, id="colocate"),
        pytest.param(SPLIT, id="split", marks=pytest.mark.lane("runs")),
    ],
)
def test_a_spent_budget_ends_a_run_between_two_steps(tmp_path, placement):
    """In the middle of grading: with a checkpoint, and the command that resumes with more

    A resumed run pays for no reply twice; a colocated one ends as if the budget had sufficed."""
    settings = {
        "reward.scorers": {"judge": 1.0},
        "reward.correct_threshold": {},
        "reward.judge.model": "letters",
        "reward.judge.template": "{prompt}{response}",
        "rollout.eval_every": 0,
        "train.save_every": 0,
        "steps": 3,
        **placement,
    }
    with serve(LetterJudge, asked=[]) as address:
        settings["reward.judge.url"] = f"{address}/v1"
        budget = {"reward.judge.max_requests": 20}
        if placement is ONE_DEVICE:
            run(configure(tmp_path, "whole", **settings))
            first, second, *_ = rows(tmp_path / "whole")
            assert min(first["reward/judge_requests"], second["reward/judge_requests"]) > 1
            budget["reward.judge.max_requests"] = int(first["reward/judge_requests"]) + 1
    with serve(LetterJudge, asked=(asked := [])) as address:
        settings["reward.judge.url"] = f"{address}/v1"
        driver = Driver(configure(tmp_path, "run", **settings, **budget))
        assert driver.end() == 75, driver.text()
        assert "of 3: the judge's budget is spent" in driver.text()
        assert len(asked) == budget["reward.judge.max_requests"]
        done = rows(tmp_path / "run")[-1]["step"]
        assert (tmp_path / "run" / "checkpoints" / f"step_{done:06d}").is_dir()
        assert '-p overrides \'{"reward.judge.max_requests":' in driver.text()
        run(configure(tmp_path, "run", resume=True, **settings))
    assert len(asked) == len(set(asked))
    assert rows(tmp_path / "run")[-1]["step"] == 3
    if placement is ONE_DEVICE:
        assert done == 1 and graded(tmp_path / "run") == graded(tmp_path / "whole")


def graded(folder: Path) -> list[dict]:
    "The metrics without memory and without what the judge was asked"
    return [
        {name: value for name, value in row.items() if not name.startswith("reward/judge")}
        for row in learned(folder)
    ]
