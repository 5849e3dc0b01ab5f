"""What a whole run has trained, evaluated once more."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import policy_jobs
import pytest
from conformance import sharpen_model
from PIL import Image
from ranks import run_ranks
from whole_runs import more_vllm, rows

from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.model.tiny import build_tiny
from cookbook_npu.policy.evaluate import ask
from cookbook_npu.recipes import Recipe, qwen3_4b_colocate, qwen3_vl_8b_grpo
from cookbook_npu.rollout.vllm import missing_reason
from cookbook_npu.runs.checkpoints import Checkpoints
from cookbook_npu.runs.folder import RunFolder

pytestmark = pytest.mark.lane("runs")


@pytest.fixture(scope="module")
def asked(undisturbed, tmp_path_factory) -> tuple[dict[int, float], dict]:
    "The run's own evaluations by step, and what its policies say in another process"
    copy = tmp_path_factory.mktemp("asked") / "run"
    shutil.copytree(undisturbed, copy, symlinks=True)
    own = {
        row["step"]: row["eval_accuracy"] for row in rows(copy) if "eval_accuracy" in row
    }
    own.pop(0)  # of the first weights, of which there is no checkpoint
    found = run_ranks(
        f"{policy_jobs.__file__}:ask",
        1,
        kwargs={"run": str(copy), "steps": list(own)},
        bootstrap="rollout",
        timeout=300,
        preload=("transformers.models.auto", "transformers.generation.utils"),
    )[0]
    return own, found


def test_the_runs_own_evaluations_come_out_again(asked):
    "To the last digit: the same seeds, graders and shares, at temperature 1"
    own, found = asked
    again = {step: r["metrics"]["eval_accuracy"] for step, r in found["own"].items()}
    assert again == own and len(own) == 3
    assert all(r["own_accuracy"] == own[step] for step, r in found["own"].items())
    # half of all answers are right by the scorer of these tests: no constant would do
    assert 0 < sum(own.values()) < len(own)


def test_greedy_is_one_number(asked):
    first, second = asked[1]["greedy"]
    assert first["answers"] == second["answers"] and first["temperature"] == 0
    assert first["prompts"] == 8 and "own_accuracy" not in first


def run_with_opinions(root: Path, recipe: Recipe = qwen3_4b_colocate) -> Path:
    "A run folder whose policy has learned nothing and prefers something everywhere"
    tiny = {"model.tiny.hidden_size": 64, "model.tiny.num_layers": 2}
    overrides = {"output.root": str(root), "output.name": "run", "data.eval_prompts": 12}
    with RunFolder.create(recipe(overrides=overrides | tiny)) as run:
        checkpoints = Checkpoints.of_run(run)
        partial = checkpoints.partial(5)
        tiny_config = run.config().model.tiny
        tokenizer = build_tokenizer(vision=tiny_config.family == "qwen3_vl")
        build_tiny(tiny_config, tokenizer, partial / "hf", seed=0)
        sharpen_model(partial / "hf")
        checkpoints.commit(partial, 5, {})
    return run.path


def greedy(run: Path, *words: str) -> dict:
    "What `cookbook-npu eval` prints at temperature 0"
    command = [sys.executable, "-m", "cookbook_npu.cli", "eval", str(run), *words]
    command += ["--temperature", "0", "--max-tokens", "24", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("{\n") :])


@more_vllm
@pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or "")
def test_vllm_gives_the_same_greedy_answers(tmp_path):
    """Word for word, as typed: both engines compute in float32

    They could differ where two tokens are equally likely to 1e-5, and this policy is peaked."""
    run = run_with_opinions(tmp_path)
    own, found = greedy(run), greedy(run, "--engine", "vllm")
    assert (own["engine"], found["engine"]) == ("transformers", "vllm")
    texts = [record["answers"][0]["text"] for record in own["answers"]]
    # prompts have answers of their own, of some length
    assert len(set(texts)) > 6 and own["metrics"]["response_length_mean"] > 12
    assert found["answers"] == own["answers"]


def test_ask_shows_the_pictures_of_its_prompts(tmp_path):
    "Another picture is another question; a held-out prompt has one, too"
    run = run_with_opinions(tmp_path, qwen3_vl_8b_grpo)
    asked = []
    for color in ("white", "black"):
        Image.new("RGB", (64, 64), color).save(tmp_path / f"{color}.png")
        asked.append({"prompt": "<image>a=", "images": [str(tmp_path / f"{color}.png")]})
    table = ask(run, [*asked, asked[0]])
    white, black, again = (row.answers[0][0] for row in table.rows)
    assert white != black and white == again
    assert all(len(row.pictures) == 1 for row in (*table.rows, *ask(run).rows))
    html = table._repr_html_()
    assert html.count("<img") == 3 and "image_pad" not in html
    assert "correct" not in html + str(table)  # own prompts have no label
