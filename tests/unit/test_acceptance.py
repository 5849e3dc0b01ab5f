"""The evidence of a run: written by the doctor, verified without the package, and forged"""

import hashlib
import json
import subprocess
import sys

import pytest
from machines import recorded

from cookbook_npu.errors import ConfigError
from cookbook_npu.npu.stack.doctor import examine, write_acceptance
from cookbook_npu.runs.metrics import step_line

DEVICES = 8


def step(number: int, tokens: int) -> dict:
    row = {"step": number, "tokens": tokens + number, "time/step": 600.0 + number}
    row |= {"raw_reward": 0.3 + number / 400, "grad_norm": 0.2, "time/actor_train": 90.5}
    return row | {"tokens_per_s_per_device": row["tokens"] / row["time/step"] / DEVICES}


def write(tmp_path, tokens: int = 8_000_000):
    "Write the folder of 100 steps on a machine of the recommended stack"
    machine = recorded("910b1_recommended", tmp_path)
    run = tmp_path / "runs" / "r"
    job = tmp_path / "runs" / ".jobs" / "r"
    run.mkdir(parents=True), job.mkdir(parents=True)
    rows = [{"step": 0, "eval_accuracy": 0.1}, *(step(n, tokens) for n in range(1, 101))]
    spans = [
        dict(role="trainer", phase="actor_train", step=row["step"], start=1.0, end=91.5)
        for row in rows[1:]
    ]
    names = ("torch", "torch_npu", "vllm-ascend", "ray")
    packages = {name: machine.version(name) for name in names}
    stack = {"python": machine.python, "packages": packages, "device": {"name": "910B1"}}
    config = {"recipe": "qwen3_4b_colocate", "placement": {"devices": DEVICES}}
    for name, lines in (("metrics.jsonl", rows), ("spans.jsonl", spans)):
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "config.json").write_text(json.dumps(config))
    (run / "stack.json").write_text(json.dumps(stack))
    (job / "job.log").write_text("\n".join(step_line(row, 100) for row in rows))
    folder = tmp_path / "evidence"
    smi = (0, "npu-smi of the machine")
    arguments = folder, examine(machine), run, "<svg/>", lambda _: smi
    assert write_acceptance(*arguments)[0] == (0 if tokens > 10**6 else 3)
    with pytest.raises(ConfigError, match="exists"):
        write_acceptance(*arguments)
    return folder


@pytest.fixture
def evidence(tmp_path):
    return write(tmp_path)


def verified(folder) -> tuple[int, str]:
    "Exit code and text of the program in the folder, which sees no package of ours"
    command = [sys.executable, "-I", "-S", "verify.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout


def sign(folder) -> None:
    "Write the digests again, as a careful forger does"
    files = sorted(f for f in folder.iterdir() if f.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in files]
    (folder / "SHA256SUMS").write_text("".join(sums))


def replaced(name, old, new):
    def forge(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return forge


def without_step(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:57] + lines[58:]))


def test_an_honest_folder_is_accepted_without_the_package(evidence):
    assert len((evidence / "verify.py").read_text().splitlines()) <= 200
    code, text = verified(evidence)
    assert code == 0 and "steps                     100\n" in text
    stated = json.loads((evidence / "acceptance.json").read_text())
    assert stated["tokens_per_s_per_device"] == pytest.approx(1537, abs=1)


@pytest.mark.parametrize(
    ("forge", "named"),
    [
        (replaced("metrics.jsonl", '"tokens": 8000050,', '"tokens": 9000050,'), "step 50"),
        (replaced("metrics.jsonl", '"raw_reward": 0.55,', '"raw_reward": 0.95,'), "raw_re"),
        (replaced("metrics.jsonl", '"time/step": 650.0', '"time/step": 325.0'), "step 50"),
        (
            replaced("metrics.jsonl", '"time/actor_train": 90.5', '"time/actor_train": 9'),
            "act",
        ),
        (replaced("acceptance.json", '"steps": 100', '"steps": 200'), "steps is 200"),
        (replaced("acceptance.json", '"torch": "2.10.0', '"torch": "2.9.0'), "versions is"),
        (
            replaced("versions.json", '"torch": "2.10.0', '"torch": "2.11.0'),
            "torch: the run",
        ),
        (replaced("stack.json", '"ray": "2', '"ray": "3'), "ray: the run had 3"),
        (replaced("run.log", "step  30/100", "step 130/100"), "run.log has step 130"),
        (without_step, "missing [57]"),
        (lambda folder: (folder / "new.py").touch(), ""),
        (lambda folder: (folder / "acceptance.json").write_text("{}"), "recipe is None"),
    ],
)
def test_each_forgery_is_named(evidence, forge, named):
    "By its digest, and by what it contradicts where the digests are written again"
    forge(evidence)
    code, text = verified(evidence)
    assert code == 1 and "was changed" in text
    if named:
        sign(evidence)
        code, text = verified(evidence)
        lines = [line for line in text.splitlines() if line.startswith("CONTRADICTION")]
        assert code == 1 and any(named in line for line in lines), text


def test_a_slow_run_is_consistent_and_not_accepted(tmp_path):
    code, text = verified(write(tmp_path, tokens=80_000))
    assert code == 3 and "NOT MET over 100 tokens/s/device" in text
