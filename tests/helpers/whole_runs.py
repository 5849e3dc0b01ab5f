"""Whole runs in processes of their own, to be disturbed: used by test_resume.py and test_faults.py."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from metrics_page import explained
from preloaded_jobs import DRIVER
from safetensors import safe_open

from cookbook_npu.config import save_config
from cookbook_npu.npu.simulator.fork_server import fork_process
from cookbook_npu.recipes import qwen3_4b_colocate

HERE = Path(__file__).parent
more_vllm = pytest.mark.lane("vllm-runs")  # each start of vLLM takes a minute
STEPS = 6
# of one rank and one engine: half the processor time of a run
ONE_DEVICE = {"placement.devices": 1, "parallel.tensor": 1}
# notice only after a minute that they are alone
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def parameters(
    root: Path, name: str, resume: bool = False, steps: int = STEPS, **more
) -> dict:
    "The parameters of a recipe that make a run"
    overrides = {
        "output.root": str(root),
        "output.name": name,
        "output.resume": resume,
        "output.restart": resume,  # a blow may fall before the first checkpoint
        "rollout.eval_every": 2,
        "data.eval_prompts": 8,
        "reward.scorers": {"run_driver:spread": 1.0},
        "reward.correct_threshold": {"run_driver:spread": 0.5},
        "train.save_every": 1,
        "train.keep_last": 9,
        **more,
    }
    return {
        "num_steps": steps,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "overrides": overrides,
    }


def configure(root: Path, name: str, resume: bool = False, **more) -> Path:
    "The configuration file of a run"
    config = qwen3_4b_colocate(**parameters(root, name, resume, **more))
    save_config(config, root / f"{name}.json")
    return root / f"{name}.json"


def preloaded() -> dict[str, str]:
    "The environment of a run whose driver, workers and kernel are forks of servers"
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = dict.fromkeys([str(HERE.parents[1]), str(HERE / "preloaded"), *inherited])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": "1",
    }


def forget_last_step(folder: Path) -> None:
    "Make a finished run look like one that was killed before its last checkpoint"
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    last = json.loads(lines[-1])["step"]
    shutil.rmtree(folder / "checkpoints" / f"step_{last:06d}")
    metrics.write_text("".join(x for x in lines if json.loads(x)["step"] < last))


class Driver:
    "A run under way: its lines as they come, and the process ids it announced"

    def __init__(
        self,
        config: Path,
        faults: str = "",
        strike: Path | None = None,
        scale: dict[int, int] | None = None,
        lasting: bool = False,
    ):
        told = {"config": str(config), "plan": None if strike is None else str(strike)}
        told["lasting"] = lasting  # faults of workers that are started again, too
        # engines after some steps
        told["engines"] = {str(step): count for step, count in (scale or {}).items()}
        env = preloaded() | {"COOKBOOK_NPU_SIM_FAULTS": faults}
        ours, output = os.pipe()
        # a process group of its own, as a shell gives its jobs
        self.process = fork_process("run_driver:drive", told, DRIVER, env, output)
        os.close(output)
        assert self.process is not None, "no server"
        self.output = open(ours, errors="replace")
        self.lines, self.pids, self.started = [], {}, threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.output:
            self.lines.append(line)
            if line.startswith('{"driver"'):
                self.pids = json.loads(line)
                self.started.set()
        self.started.set()
        self.output.close()

    def end(self, timeout=900) -> int:
        code = self.process.wait(timeout)
        self.reader.join(100)
        return code

    def strike(self, victim: str) -> bool:
        "Kill a process of the run at once and wait for the others; false: the run had ended by itself"
        try:
            below = psutil.Process(self.process.pid).children(recursive=True)
            waits = living(process.pid for process in below)
            os.kill(self.pids[victim][0], signal.SIGKILL)
        except (psutil.NoSuchProcess, ProcessLookupError):
            return False
        _, left = psutil.wait_procs(waits, timeout=400)
        assert not left, f"processes that outlive their run: {left}"
        return self.end() != 0

    def text(self) -> str:
        return "".join(self.lines)[-6000:]


def living(pids) -> list[psutil.Process]:
    "Those processes that have to end with their run"
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.name() not in RAY_AGENTS:
                found.append(process)
    return found


def run(config: Path) -> str:
    "What a run prints that nobody disturbs"
    driver = Driver(config)
    assert driver.end() == 0, driver.text()
    return "".join(driver.lines)


def rows(folder: Path) -> list[dict]:
    "The metrics without what a clock measured"
    text = (folder / "metrics.jsonl").read_text()
    lines = explained([json.loads(line) for line in text.splitlines()])
    return [
        {
            k: v
            for k, v in row.items()
            if not k.startswith(("time/", "perf/")) and "per_s" not in k
        }
        for row in lines
    ]


def learned(folder: Path) -> list[dict]:
    "The metrics without memory: processes that came later start with other caches"
    return [
        {k: v for k, v in row.items() if not k.startswith("memory/")}
        for row in rows(folder)
    ]


def weights(folder: Path) -> dict[str, list]:
    with safe_open(
        folder / "checkpoints" / f"step_{STEPS:06d}" / "hf" / "model.safetensors", "np"
    ) as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}


def events(folder: Path, kind: str) -> list[dict]:
    "What happened in a run, of one kind"
    lines = (
        (folder / "events.jsonl").read_text().splitlines()
        if (folder / "events.jsonl").exists()
        else []
    )
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def prompts(folder: Path) -> list[list[str]]:
    "The prompts of each step"
    files = sorted((folder / "samples").glob("step_*.jsonl"))
    return [
        [
            json.loads(line)["metadata"]["prompt_id"]
            for line in file.read_text().splitlines()
        ]
        for file in files
    ]


def samples(folder: Path) -> list[list[dict]]:
    "The samples of each step"
    files = sorted((folder / "samples").glob("step_*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def check_turns(folder: Path) -> None:
    "There are observations, and they have no loss"
    talks = [s for step in samples(folder) for s in step if 0 in s["loss_mask"]]
    assert talks
    for sample in talks:
        mask, texts = sample["loss_mask"], sample["metadata"]["turn_texts"]
        assert mask.count(0) == sum(map(len, texts[1::2]))


def tell(script: str, *words: str) -> dict:
    "What a script of launch_jobs found"
    command = [sys.executable, str(HERE / "launch_jobs" / script), *words]
    out = subprocess.run(
        command, capture_output=True, text=True, timeout=850, env=preloaded()
    )
    lines = [line for line in out.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, out.stdout[-3000:] + out.stderr[-3000:]
    return json.loads(lines[0][7:])


def wait_for(what, driver: Driver, timeout=600) -> None:
    "Poll until a thing happens; fails when the run ends, or the time is over, without it"
    deadline = time.monotonic() + timeout
    while not what():
        ended = driver.process.poll() is not None
        if ended and what():
            return
        assert not ended, f"the run ended before it happened:\n{driver.text()}"
        assert time.monotonic() < deadline, f"not within {timeout} s:\n{driver.text()}"
        time.sleep(0.001)
