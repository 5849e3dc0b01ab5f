"""All recipes at scale 910b on the real software stack, which must have MindSpeed there: two steps of a
tiny model of each architecture through papermill, a checkpoint, and a third step by resuming the run.
"""

import json
import math
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from places import ROOT

VLLM = (
    "rollout.devices_per_engine",
    "rollout.memory_utilization",
    "rollout.engine_args",
)
# one step of it takes seconds where kernels are formulas
OVERRIDES = {
    "parallel.tensor": 1,
    "placement.devices": 1,
    "rollout.devices_per_engine": 1,
    "rollout.memory_utilization": 0.04,
    "rollout.engine_args": {"max_num_batched_tokens": 512, "max_num_seqs": 16},
    "rollout.eval_every": 0,
    "rollout.eval_max_response_tokens": 12,
    "sampling.max_response_tokens": 12,
    "data.max_prompt_tokens": 256,
    "data.apply_chat_template": False,
    "data.record_format": "auto",
    "reward.workers": 1,
    "reward.scorers": {"cookbook_npu.train.rehearsal:varied_reward": 1.0},
    "train.micro_batch_tokens": 1024,
    "train.save_every": 1,
}
TWO = {"placement.devices": 2}


def a_run(recipe, family, changes=None, prompts="arithmetic", most=0.02):
    "Recipe, family, prompts, changes, largest |train - rollout log-prob|"
    return recipe, family, prompts, changes or {}, most


DENSE, HYBRID = ("qwen3_4b_colocate", "qwen3"), ("qwen3_5_9b_colocate", "qwen3_5")
TENANTS = {"tenants": {"a": {}, "b": {"seed": 1}}}
SPLIT = {**TWO, "placement.trainer_devices": 1}
TURNS = {
    "rollout.environment_arguments": {"compact": True},
    "sampling.max_response_tokens": 40,  # several turns
    "train.global_batch_size": None,
    "optim.schedule": "constant",  # num_steps changes on resume
}
RUNS = {
    "qwen3_4b_colocate": a_run(*DENSE),
    "tp2": a_run(*DENSE, {**TWO, "parallel.tensor": 2}),
    "pp2": a_run(*DENSE, {**TWO, "parallel.pipeline": 2}),
    "cp2": a_run(*DENSE, {**TWO, "parallel.context": 2}),
    "moe": a_run("qwen3_30b_a3b_grpo", "qwen3_moe", {**TWO, "parallel.expert": 2}),
    "qwen3_4b_multi_lora_grpo": a_run("qwen3_4b_multi_lora_grpo", "qwen3", TENANTS),
    "qwen3_4b_opd": a_run("qwen3_4b_opd", "qwen3"),
    "qwen3_4b_sft": a_run(
        "qwen3_4b_sft", "qwen3", {"data.apply_chat_template": True}, most=0.0
    ),
    "qwen3_5_9b_colocate": a_run(*HYBRID, most=0.05),
    "qwen3_5_pictures": a_run(*HYBRID, None, "geometry", 0.003),
    "qwen3_5_cp2": a_run(*HYBRID, {**TWO, "parallel.context": 2}, most=0.003),
    "qwen3_5_9b_async": a_run("qwen3_5_9b_async", "qwen3_5", SPLIT, most=0.05),
    "qwen3_vl_8b_grpo": a_run("qwen3_vl_8b_grpo", "qwen3_vl", None, "geometry"),
    "qwen3_vl_8b_ppo": a_run("qwen3_vl_8b_ppo", "qwen3_vl", None, "geometry"),
    "smollm2_grpo": a_run("smollm2_grpo", "qwen3"),
    "wordle_grpo": a_run("wordle_grpo", "qwen3", TURNS, "wordle"),
}


def parameters(folder: Path, models: Path, run: str, name: str = "run", **changes):
    "A parameter file for papermill"
    recipe, family, prompts, own, _ = RUNS[run]
    where = {"output.root": str(folder), "output.name": name}
    if recipe == "qwen3_4b_opd":
        own = {**own, "distill.teacher": f"{models}/{family}1"}
    values = {
        "scale": "910b",
        "model": f"{models}/{family}0",
        "prompt_data": prompts,
        "num_steps": 2,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "learning_rate": 1e-3,
    }
    absent = {
        "qwen3_4b_sft": ("reward.", "rollout.", "samples_per_prompt"),  # samples nothing
        "qwen3_4b_multi_lora_grpo": VLLM,
    }.get(recipe, ())
    base = {key: value for key, value in OVERRIDES.items() if not key.startswith(absent)}
    values = {key: value for key, value in values.items() if not key.startswith(absent)}
    values["overrides"] = {**base, **own, **where, **changes}
    if recipe == "qwen3_4b_sft":
        values["overrides"]["rollout.eval_every"] = 0
        values["overrides"]["optim.warmup_steps"] = 0
        values["overrides"]["optim.schedule"] = "constant"  # num_steps changes on resume
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def rows(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        row for row in map(json.loads, lines) if {"raw_reward", "sft_loss"} & row.keys()
    ]


@pytest.mark.parametrize("run", RUNS)
def test_recipe_trains_saves_and_resumes(with_mindspeed, models, tmp_path, run):
    file = parameters(tmp_path, models, run)
    recipe = RUNS[run][0]
    notebook = ROOT / "recipes" / f"{recipe}.ipynb"
    command = (
        "papermill",
        notebook,
        tmp_path / "out.ipynb",
        "-f",
        file,
        "--no-progress-bar",
    )
    done = with_mindspeed.run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    folder = tmp_path / "run"
    assert [row["step"] for row in rows(folder)] == [1, 2]
    more = ("-p", "num_steps", "3")
    done = with_mindspeed.run(
        "cookbook-npu", "run", "--resume", folder, *more, cwd=tmp_path
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    history = rows(folder)
    assert [row["step"] for row in history] == [1, 2, 3]
    largest = RUNS[run][-1]
    for row in history:
        assert math.isfinite(row["sft_loss" if recipe == "qwen3_4b_sft" else "raw_reward"])
        if recipe == "qwen3_4b_opd":
            assert row["teacher/reverse_kl"] > 0
        if "train_rollout_logprob_abs_diff" in row:
            assert row["train_rollout_logprob_abs_diff"] < largest
    shims = {
        row["name"]: row for row in json.loads((folder / "stack.json").read_text())["shims"]
    }
    assert shims["mindspeed.optimizer_state"]["state"] == "applied"
    assert "3 of 3" in done.stdout
    # of the ledger of unfinished launches, in any role
    hazard = re.compile(r"\[fake CANN\].*(are unfinished|on another stream)")
    logs = [log.read_text(errors="replace") for log in folder.glob("logs/*.log")]
    assert logs and not any(map(hazard.search, logs))


def started(stack, file: Path, folder: Path, recipe: str) -> subprocess.Popen:
    "A run in the background"
    command = ["cookbook-npu", "run", recipe, "-f", str(file)]
    log = (folder / "log.txt").open("w")
    return subprocess.Popen(
        command, cwd=folder, env=stack.environment(), stdout=log, stderr=subprocess.STDOUT
    )


def wait_for_steps(folder: Path, count: int, process: subprocess.Popen) -> None:
    for _ in range(3000):
        if (folder / "metrics.jsonl").exists() and len(rows(folder)) >= count:
            return
        assert process.poll() is None, "the run ended early"
        time.sleep(0.1)
    raise AssertionError("no step in 300 s")


def role_process(driver: int, log: str) -> psutil.Process:
    "The process of a run that writes this log"
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        with suppress(psutil.Error, OSError):
            if os.readlink(f"/proc/{process.pid}/fd/1").endswith(f"logs/{log}"):
                found.append(process)
    return found[0]


def test_run_resumes_after_sigterm(with_mindspeed, models, tmp_path):
    recipe = "qwen3_4b_colocate"
    file = parameters(tmp_path, models, recipe, **{"train.save_every": 2})
    values = yaml.safe_load(file.read_text()) | {"num_steps": 50}
    file.write_text(yaml.safe_dump(values))
    process = started(with_mindspeed, file, tmp_path, recipe)
    wait_for_steps(tmp_path / "run", 1, process)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=120)
    text = (tmp_path / "log.txt").read_text()
    assert re.search(r"--resume \S*run", text), text[-2000:]
    before = len(rows(tmp_path / "run"))
    more = ("-p", "num_steps", str(before + 1))
    done = with_mindspeed.run(
        "cookbook-npu", "run", "--resume", tmp_path / "run", *more, cwd=tmp_path
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    steps = [row["step"] for row in rows(tmp_path / "run")]
    assert steps == list(range(1, before + 2))


def test_lost_trainer_is_replaced_from_its_checkpoint(with_mindspeed, models, tmp_path):
    "The trainer of the first step is killed; the run restarts it and ends like any other"
    recipe = "qwen3_4b_colocate"
    file = parameters(tmp_path, models, recipe)
    values = yaml.safe_load(file.read_text()) | {"num_steps": 6}
    file.write_text(yaml.safe_dump(values))
    process = started(with_mindspeed, file, tmp_path, recipe)
    wait_for_steps(tmp_path / "run", 2, process)
    trainer = role_process(process.pid, "trainer-0.log")
    trainer.kill()
    assert process.wait(timeout=400) == 0, (tmp_path / "log.txt").read_text()[-4000:]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run" / "events.jsonl").read_text().count("trainer")


def test_tensor_parallel_trainer_and_engine_with_device_handles(
    with_mindspeed, models, tmp_path
):
    "TP2 on both sides; weights reach the engines by handles that torch_npu opens between processes"
    recipe = "qwen3_4b_colocate"
    split = {
        "parallel.tensor": 2,
        "placement.devices": 2,
        "rollout.devices_per_engine": 2,
        "placement.transfer_backend": "ipc",
    }
    one = rows_of(with_mindspeed, models, tmp_path, recipe, "one", {})
    two = rows_of(with_mindspeed, models, tmp_path, recipe, "two", split)
    for row in two:
        assert row["train_rollout_logprob_abs_diff"] < 0.02
    assert '"backend": "ipc"' in (tmp_path / "two" / "events.jsonl").read_text()
    # the same prompts, sampled by other arithmetic
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=0.3)


def rows_of(stack, models, folder, recipe, name, changes) -> list[dict]:
    file = parameters(folder, models, recipe, name, **changes)
    done = stack.run("cookbook-npu", "run", recipe, "-f", file, cwd=folder)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return rows(folder / name)
