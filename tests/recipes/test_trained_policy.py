"""What a whole run has trained: evaluated once more, and talked to."""

import json
import shutil
import subprocess
import sys

import policy_jobs
import pytest
from whole_runs import rows

from cookbook_npu.rollout.vllm import missing_reason
from cookbook_npu.testing.ranks import run_ranks

pytestmark = pytest.mark.slow
LINES = ["12+34=", "12+34="]


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
        kwargs={"run": str(copy), "steps": list(own), "lines": LINES},
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


def test_the_policy_replies(asked):
    first, second = asked[1]["replies"]
    assert first == second


@pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or "")
def test_vllm_gives_the_same_greedy_answers(asked, undisturbed, tmp_path):
    """Word for word, as typed: both engines compute in float32

    The tolerance is that of a choice: they differ where two tokens are equally likely to 1e-5."""
    copy = tmp_path / "run"
    shutil.copytree(undisturbed, copy, symlinks=True)
    words = ["eval", str(copy), "--temperature", "0", "--engine", "vllm", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "cookbook_npu.cli", *words],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert found["engine"] == "vllm"
    own = asked[1]["greedy"][0]
    assert own["engine"] == "transformers" and own["step"] == found["step"]
    assert found["answers"] == own["answers"]
