"""Evidence: the files of the repository, what a run must never give away, the page made of them."""

import json
import os
import re
import shutil
import socket
import sys

import pytest
from places import ROOT
from typer.testing import CliRunner

from cookbook_npu.cli import app
from cookbook_npu.errors import ConfigError, DataError
from cookbook_npu.npu.stack.machine import Device, Machine
from cookbook_npu.plan.evidence import (
    LARGEST,
    check_evidence,
    error_rows,
    known_words,
    load_evidence,
    make_evidence,
    write_evidence,
)
from cookbook_npu.plan.published import measured_runs, published_runs
from cookbook_npu.policy.evaluate import EvalSettings, eval_config
from cookbook_npu.recipes import RECIPES, qwen3_4b_colocate, run_command
from cookbook_npu.runs.folder import RunFolder, append_line, read_json, write_json

sys.path.insert(0, str(ROOT / ".docs"))

import stage  # noqa: E402

FILES = [f for f in sorted((ROOT / "nbs/plan/evidence").glob("*")) if f.name[:5] != "lane_"]
SECRETS = {
    "HF_TOKEN": "hf_PlantedTokenOfThisTest",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "OBS_SK": "planted/secret+key",
}
NAMES = {"USER": "mei.lin", "HOSTNAME": "rack9-npu3.corp.example"}
PRIVATE = (
    *SECRETS.values(),
    "mei.lin",
    "rack9",
    "corp.example",
    "/home/",
    "/srv/",
    "acme",
    "10.11.12.13",
    "mei@corp.example",
)


def test_reading_a_run_says_nothing_of_settings_that_it_never_had(capsys):
    "Recipes are built for other prompts and engines, where some of their own settings do not act"
    known_words.cache_clear()
    known_words()
    seeing = {"model": "/data/Qwen3-VL-8B", "prompt_data": "countdown"}
    config = RECIPES["qwen3_vl_8b_grpo"]("910b", **seeing)
    assert config.rollout.max_turns == 8 and config.rollout.environment is None
    assert "rollout.max_turns" not in run_command(config)
    eval_config(config, EvalSettings(engine="transformers"))  # no arguments of vLLM
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_of_the_repository_is_evidence(file):
    made = check_evidence(file)
    assert file.name.startswith(f"{made.recipe}-{made.scale}-{made.date}-")
    assert file.stat().st_size < LARGEST
    # what a simulated NPU measured says so in words and as data
    assert made.where.simulated == ("simulated" in made.where.device)


def plant(folder, scale="laptop", **stack):
    "A run whose every place holds something private"
    data = folder / "srv" / "acme_customers.jsonl"
    data.parent.mkdir(parents=True)
    data.write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    weights = folder / "home" / "mei.lin" / "acme" / "Qwen3-4B-acme"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    model = {} if scale == "laptop" else {"model": str(weights)}
    config = qwen3_4b_colocate(
        scale,
        prompt_data=str(data),
        num_steps=3,
        overrides={
            "output.root": str(folder / "runs"),
            "output.name": "acme-mei.lin-secret",
            "reward.scorers": {"exact": 1.0, "acme.rewards:strict": 0.5},
            "reward.arguments": {"acme.rewards:strict": {"url": "http://10.11.12.13/acme"}},
            "data.metadata_keys": ["acme_customer"],
            "data.eval_data": str(data),
        },
        **model,
    )
    with RunFolder.create(config) as run:
        device = {"name": "simulated NPU", "count": 2, "simulated": True}
        if scale == "910b":
            device = {"name": "NPU", "count": 8, "simulated": False}
        shims = [{"name": "torch.compile", "state": "applied", "detail": "/home/mei.lin"}]
        shims.append({"name": "acme.patch", "state": "applied"})
        run.save_stack(device, shims)
        shutil.rmtree(weights)  # elsewhere the summary is made without the model
        record = read_json(run.stack_file)
        record |= {"platform": "Linux-5.10-mei.lin-rack9-aarch64-with-glibc2.34"} | stack
        record["packages"] |= {"torch": "2.10.0+/srv/acme", "vllm": "0.23.0"}
        write_json(run.stack_file, record)
        run.event("failure", error="rank 1 on rack9-npu3.corp.example: /home/mei.lin/x")
        for step in range(1, 4):
            row = {"step": step, "raw_reward": step / 4, "tokens": 256 * 900.0}
            row |= {"eval_accuracy/acme": 0.5, "time/step": 457.4, "time/actor_train": 84.8}
            row |= {"time/rollout": 300.0, "memory/weights": 4_100_000_000}
            append_line(run.metrics_file, row)
    return run.path


NOTE = (
    "mei.lin on rack9-npu3.corp.example (10.11.12.13), token hf_PlantedTokenOfThisTest, "
    "/home/mei.lin/acme and /srv/acme/x, mail mei@corp.example, key planted/secret+key; "
    "firmware 7.8.0, others used both NPUs"
)


@pytest.mark.parametrize("scale", ["laptop", "910b"])
def test_nothing_private_comes_through(tmp_path, monkeypatch, scale):
    monkeypatch.setenv("HOME", "/home/mei.lin")
    for name, value in {**SECRETS, **NAMES}.items():
        monkeypatch.setenv(name, value)
    machine = Machine(
        devices=(Device(0, "910B3", "OK", 3400, 65536),), driver="25.5.1", cann="9.1.0"
    )
    path = plant(tmp_path, scale)
    made = make_evidence(path, note=NOTE, machine=machine)
    file = write_evidence(made, tmp_path / "evidence")
    text = file.read_text()
    found = [
        word for word in (*PRIVATE, str(tmp_path), socket.gethostname()) if word in text
    ]
    assert not found
    assert "firmware 7.8.0, others used both NPUs" in made.note
    assert check_evidence(file) == made
    # and what is worth knowing did
    assert made.settings["data.prompt_data"].startswith("sha256 ")
    assert made.shims == {"torch.compile": "applied"}
    assert made.where.packages["vllm"] == "0.23.0" and "torch" not in made.where.packages
    assert made.where.system == "Linux aarch64, glibc 2.34"
    if scale == "910b":
        assert made.settings["model.path"] == "Qwen3-4B"
        assert (made.where.device, made.where.cann) == ("Ascend910B3", "9.1.0")
        errors = {row[0]: row[3] for row in error_rows(made)}
        assert {"step", "rollout", "actor_train", "memory: weights"} <= errors.keys()
    else:
        assert made.where.device == "simulated NPU"


def test_simulated_numbers_cannot_pass_for_an_npu(tmp_path):
    file = write_evidence(make_evidence(plant(tmp_path)), tmp_path / "e")
    content = json.loads(file.read_text())
    for change in (
        {"scale": "910b"},
        {"where": content["where"] | {"simulated": False}},
        {"where": content["where"] | {"device": "Ascend910B3"}},
    ):
        file.write_text(json.dumps(content | change))
        with pytest.raises(DataError, match="simulated"):
            check_evidence(file)


def test_a_run_on_npus_says_on_which(tmp_path):
    path = plant(tmp_path, "910b")
    with pytest.raises(ConfigError, match="Say which the run had: --soc"):
        make_evidence(path, machine=Machine())
    assert make_evidence(path, "Ascend910B1").where.count == 8


# ---- the command, the page


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = plant(tmp_path)
    out = CliRunner().invoke(app, ["evidence", os.path.relpath(path), "--note", "busy"])
    assert out.exit_code == 0, out.exception
    [file] = (tmp_path / "evidence").glob("*.json")
    assert f"evidence/{file.name}" in out.output and "Read it before you send" in out.output
    assert "simulated NPU: says nothing about the speed of Ascend hardware" in out.output
    assert "hidden: data.metadata_keys, reward.scorers" in out.output.replace(
        "data.eval_data, ", ""
    )
    again = CliRunner().invoke(app, ["evidence", str(file)])
    assert again.exit_code == 0 and "memory: weights" in again.output
    file.write_text("{}")
    broken = CliRunner().invoke(app, ["evidence", str(file)])
    assert isinstance(broken.exception, DataError)


def test_the_page_says_where(tmp_path):
    on_npu = make_evidence(plant(tmp_path / "a", "910b"), "Ascend910B3")
    simulated = make_evidence(plant(tmp_path / "b"))
    for made in (on_npu, simulated):
        write_evidence(made, tmp_path / "evidence")
    page = stage.measured_page(tmp_path / "evidence")
    row = "| `qwen3_4b_colocate` | {} | {} | 3 of 3 | 0.25 → 0.75 |"
    assert row.format("910b", "8 x Ascend910B3") in page
    cores = f", {simulated.where.cpus} CPU cores (simulated)"
    assert row.format("laptop", f"2 x simulated NPU{cores}") in page
    assert "| actor_train | 84.8 |" in page and "<svg" in page
    assert "No run on a real NPU has been sent yet" not in page
    assert "Nothing yet." in stage.measured_page(tmp_path / "none")


def test_the_page_is_made_from_the_repository():
    page = stage.measured_page(ROOT / "nbs/plan/evidence")
    for name, made in load_evidence(ROOT / "nbs/plan/evidence").items():
        assert f"`nbs/plan/evidence/{name}`" in page
        if made.where.simulated:
            assert "(simulated)" in page
    for run in published_runs():
        assert f"[{run.name}]({run.source})" in page and run.excluded in page
    index = (ROOT / ".docs/pages/reference/index.md").read_text()
    assert re.search(r"^measured$", index, re.M)


def test_evidence_of_a_run_is_a_row_beside_the_published_ones(tmp_path):
    run = plant(tmp_path / "a", "910b")
    path = write_evidence(make_evidence(run, "Ascend910B3"), tmp_path / "evidence")
    write_evidence(make_evidence(plant(tmp_path / "b")), tmp_path / "evidence")
    *published, mine = measured_runs(tmp_path / "evidence")
    assert published == [*published_runs()]
    assert (mine.name, mine.soc, mine.units) == (path.name, "Ascend910B3", 8)
    assert mine.seconds["actor_train"] == 84.8 and "actor_train" in mine.phases


def test_rows_that_count_have_what_a_plan_needs():
    counted = [run for run in published_runs() if not run.excluded]
    assert len(counted) >= 10
    needed = "soc units trainer engines engine_tensor prompts samples max_response phases"
    for run in counted:
        assert not set(needed.split()) & {*run.unknown()}, run.name
        assert run.phases and {*run.seconds} & {"step", *run.phases}, run.name
        assert (run.trainer + run.engines == run.units) == run.split or not run.split
    assert all(run.excluded for run in published_runs() if run not in counted)
