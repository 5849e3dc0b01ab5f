"""On-policy distillation in whole runs: it resumes, and refuses a teacher that cannot teach."""

import json
from pathlib import Path

import pytest
from metrics_page import explained
from test_recipe import command
from whole_runs import Driver, forget_last_step, run

from cookbook_npu.config import save_config
from cookbook_npu.data.tokenizer import build_tokenizer, read_tokenizer
from cookbook_npu.model.tiny import build_tiny
from cookbook_npu.recipes import qwen3_4b_opd

pytestmark = pytest.mark.lane("runs")
TINY = {
    "rollout.eval_every": 0,
    "train.save_every": 2,
    "train.export_hf": False,
}


def prepare(root: Path, **overrides: object) -> Path:
    "The configuration file of a small run, whose folder is `run`"
    sizes = dict(num_steps=4, prompts_per_step=4, samples_per_prompt=2)
    place = {"output.root": str(root), "output.name": "run"}
    config = qwen3_4b_opd(overrides={**TINY, **place, **overrides}, **sizes)
    save_config(config, root / "run.json")
    return root / "run.json"


def rows(folder: Path) -> list[dict]:
    text = (folder / "metrics.jsonl").read_text()
    found = explained([json.loads(line) for line in text.splitlines()])
    return [row for row in found if "raw_reward" in row]


def without_times(row: dict) -> dict:
    return {
        key: value
        for key, value in row.items()
        if not key.startswith(("time/", "perf/", "memory/")) and "per_s" not in key
    }


def test_it_learns_from_the_teacher_alone_and_resumes_bit_for_bit(tmp_path):
    "Rewards do not teach; a run that was continued has the metrics of one that was not"
    run(prepare(tmp_path))
    folder = tmp_path / "run"
    whole = rows(folder)
    assert [row["step"] for row in whole] == [1, 2, 3, 4]
    for row in whole:
        assert row["teacher/reverse_kl"] > 0 and row["grad_norm"] > 0
        assert row["time/teacher_logprobs"] > 0 and row["zero_advantages"] == 0
        assert "time/ref_logprobs" not in row
    (checkpoint,) = folder.glob("checkpoints/step_*4")
    assert [path.name for path in checkpoint.iterdir() if path.is_dir()] == ["state"]
    forget_last_step(folder)
    assert "from step 2" in run(prepare(tmp_path, **{"output.resume": True}))
    assert [without_times(row) for row in rows(folder)] == [
        without_times(row) for row in whole
    ]


def test_a_teacher_with_other_tokens_is_refused_before_the_workers_start(tmp_path):
    config = qwen3_4b_opd()
    teacher = build_tiny(config.model.tiny, build_tokenizer(), tmp_path / "teacher", seed=1)
    tokenizer = read_tokenizer(teacher)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(teacher)
    values = {"distill.teacher": str(teacher)}
    driver = Driver(prepare(tmp_path, **values))
    assert driver.end() != 0
    assert "id 264 is '<new>' there and None in" in driver.text()
    assert "all are up" not in driver.text()


def test_a_missing_teacher_is_refused_before_the_notebook_runs(tmp_path):
    values = {"distill.teacher": str(tmp_path / "none")}
    values |= {"output.root": str(tmp_path / "runs")}
    done = command("run", "qwen3_4b_opd", "-p", "overrides", json.dumps(values))
    assert done.returncode == 2
    assert f"model {tmp_path / 'none'}" in done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()
