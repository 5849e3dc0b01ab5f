"""A run of several tenants: one that fails does not touch another, and a killed run resumes bit for bit."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from whole_runs import Driver, events, learned, parameters, wait_for

from cookbook_npu.cli import is_finished
from cookbook_npu.config import save_config
from cookbook_npu.recipes import qwen3_4b_multi_lora_grpo

STEPS = 4
TENANTS = {
    "a": {"data.prompt_data": "arithmetic"},
    "b": {"data.prompt_data": "counting", "data.task": {"level": 3}, "seed": 1},
    # one grading process: the scorer counts in a file
    "broken": {"reward.scorers": {"run_driver:breaks": 1.0}, "reward.workers": 1},
}


def configure(root: Path, *names: str, **more) -> Path:
    "The configuration file of a run of some tenants"
    tenants = {name: dict(TENANTS[name]) for name in names}
    for own in tenants.values():
        own["optim.learning_rate"] = 1e-2
    if "broken" in tenants:
        judge = {"reward.scorers": {"run_driver:judges": 1.0}, "reward.timeout_s": 300}
        tenants["b"] |= judge
        more["reward.correct_threshold"] = {}
    name = "_".join(names)
    own = {"tenants": tenants, "lora.slots": 3, "train.save_every": 2, **more}
    given = parameters(root, name, steps=STEPS, **own)
    save_config(qwen3_4b_multi_lora_grpo(**given), root / f"{name}.json")
    return root / f"{name}.json"


def adapter(folder: Path) -> bytes:
    "The adapter of the last checkpoint, in peft's format"
    saved = folder / "checkpoints" / f"step_{STEPS:06d}" / "adapter"
    assert json.loads((saved / "adapter_config.json").read_text())["r"] == 16
    return (saved / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory) -> Iterator[Path]:
    "A run in which a judge of one tenant waits for another one, and a scorer raises in the fourth step"
    root = tmp_path_factory.mktemp("tenants")
    with pytest.MonkeyPatch.context() as patch:
        # for all tests: a server of workers is found again in an equal environment
        patch.setenv("COOKBOOK_NPU_TEST_COUNT", str(root / "count"))
        driver = Driver(configure(root, "b", "a", "broken"))
        assert driver.end() != 0
        text = "".join(driver.lines)
        assert "tenant broken failed" in text and "the scorer broke" in text, text[-3000:]
        yield root / "b_a_broken"


def test_a_tenant_that_fails_is_closed_and_named(disturbed):
    (failed,) = events(disturbed, "tenant_failed")
    assert failed["tenant"] == "broken" and "the scorer broke" in failed["error"]
    assert {event["tenant"] for event in events(disturbed, "tenant_done")} == {"a", "b"}
    rows = learned(disturbed)
    assert [row["step"] for row in rows] == [*range(STEPS + 1)]
    assert "tenants/broken/raw_reward" in rows[1]
    assert "tenants/broken/raw_reward" not in rows[STEPS]
    assert (disturbed / "report.html").is_file() and not is_finished(disturbed)


@pytest.mark.lane("runs")
def test_a_killed_run_resumes_bit_for_bit_without_the_third_tenant(disturbed, tmp_path):
    "Each is bitwise what it is with a slow judge, and beside a tenant that fails, kill -9 included"
    more = {"reward.correct_threshold": {}}
    driver = Driver(configure(tmp_path, "a", "b", **more))
    assert driver.started.wait(600) and driver.pids, driver.text()
    wait_for(lambda: any('"step": 3' in line for line in driver.lines), driver)
    assert driver.strike("driver")
    folder = tmp_path / "a_b"
    assert not is_finished(folder)
    # as if the kill came before the row of step 2, of which the tenants have checkpoints
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows[:2]))
    resumed = Driver(configure(tmp_path, "a", "b", **more, resume=True))
    assert resumed.end() == 0, resumed.text()
    assert is_finished(folder) and is_finished(folder, {"tenants.a.num_steps": STEPS})
    assert not is_finished(folder, {"tenants.a.num_steps": STEPS + 1})
    for name in ("a", "b"):
        own, theirs = folder / "tenants" / name, disturbed / "tenants" / name
        assert events(own, "resumed")[0]["step"] == 2
        assert learned(own) == learned(theirs)
        assert adapter(own) == adapter(theirs)
    assert adapter(folder / "tenants" / "a") != adapter(folder / "tenants" / "b")
    of_both = [
        {key: value for key, value in row.items() if key.startswith("tenants/")}
        for row in learned(folder)
    ]
    of_three = [
        {k: v for k, v in row.items() if k.startswith(("tenants/a/", "tenants/b/"))}
        for row in learned(disturbed)
    ]
    assert of_both == of_three


@pytest.mark.lane("runs")
def test_tenants_sample_in_one_batch(disturbed, tmp_path):
    "The tokens and rewards of each tenant are those of turns; log-probs up to rounding"
    latency = 0.1  # s for each token of a batch
    more = {"rollout.simulated_latency": latency, "lora.batch_tenants": True}
    driver = Driver(
        configure(tmp_path, "a", "b", **{"reward.correct_threshold": {}}, **more)
    )
    assert driver.end() == 0, driver.text()
    steps = [
        [row for row in map(json.loads, file.open()) if "time/rollout" in row]
        for file in (tmp_path / "a_b" / "tenants").glob("*/metrics.jsonl")
    ]
    # one after another they would wait for the longest response of each
    assert any(
        a["time/rollout"] + b["time/rollout"]
        < latency * (a["response_length_max"] + b["response_length_max"])
        for a, b in zip(*steps, strict=True)
    )
    for name in ("a", "b"):
        rows, turns = (learned(f / "tenants" / name) for f in (tmp_path / "a_b", disturbed))
        for metric in ("raw_reward", "response_length_mean", "tokens"):
            assert [row.get(metric) for row in rows] == [row.get(metric) for row in turns]
        gaps = [row["train_rollout_logprob_abs_diff"] for row in rows[1:]]
        assert max(gaps) < 1e-5
