"""Planted faults in recorded runs are found by `cookbook-npu compare`; other clocks are no alarm."""

import json
import math
import random
import re
import sys
from pathlib import Path

import pytest
from places import ROOT

from cookbook_npu.cli import main
from cookbook_npu.recipes import RECIPES, qwen3_4b_colocate, qwen3_5_9b_async
from cookbook_npu.runs.compare import compare_metrics
from cookbook_npu.runs.folder import RunFolder, append_line, write_json

STEPS = 40
STACK = {
    "git": "aaa",
    "packages": {"torch": "2.13.0"},
    "device": {"simulated": True},
    "cpus": 2,
}


def rows(seed=0, clock=0, learning_rate=3e-4, grad_norm=1.0, steps=STEPS):
    "Records of a run: the training follows its seed, times follow a clock"
    training, noise = random.Random(seed), random.Random(f"clock {clock}")
    found = []
    for step in range(1, steps + 1):
        rise = 1 - math.exp(-step * learning_rate / 4.5e-3)
        row = {
            "step": step,
            "raw_reward": 0.25 + 0.72 * rise + training.gauss(0, 0.02),
            "grad_norm": grad_norm * training.lognormvariate(0.3, 0.3),
            "entropy_loss": 0.65 - 0.6 * rise + training.gauss(0, 0.005),
            "lr": learning_rate,
            "memory/trainer_peak": 27_861_504,
        }
        row["time/step"] = noise.lognormvariate(0, 0.13)
        row["tokens_per_s_per_device"] = 1150 / row["time/step"]
        found.append(row)
    return found


def columns(records):
    return {name: [row[name] for row in records] for name in records[0]}


def differing(a, b):
    found = compare_metrics(columns(a), columns(b))
    return {m.metric for m in found if m.differs}


def test_one_number_of_one_step_is_found():
    altered = rows(clock=1)
    altered[17]["grad_norm"] = math.nextafter(altered[17]["grad_norm"], 9)
    assert differing(rows(), altered) == {"grad_norm"}


# ---- the command


def write(root, name, records, recipe=qwen3_4b_colocate, stack=STACK, **parameters):
    overrides = {"output.root": str(root), "output.name": name}
    with RunFolder.create(recipe(overrides=overrides, **parameters)) as run:
        for row in records:
            append_line(run.metrics_file, row)
        write_json(run.stack_file, stack)
    return str(run.path)


@pytest.fixture
def command(monkeypatch, capsys):
    "Runs a command: exit code, output and errors"

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["cookbook-npu", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


def test_exit_codes_json_and_page(tmp_path, command):
    one, two = write(tmp_path, "one", rows()), write(tmp_path, "two", rows(clock=1))
    page = tmp_path / "both.html"
    code, out, _ = command("compare", one, two, "--html", str(page))
    assert code == 0 and "the same: 4 metrics" in out
    text = page.read_text()
    assert "raw_reward of both runs" in text and "<script" not in text
    assert not re.search(r"""(src|href)=["']?http|@import|url\(http""", text)

    changed = write(tmp_path, "changed", rows(1), stack={**STACK, "git": "bbb"})
    code, out, _ = command("compare", one, changed, "--json")
    [result] = json.loads(out)
    assert code == 1 and not result["same"]
    assert result["stack"] == [["code commit", "aaa", "bbb"]]

    early = write(tmp_path, "early", rows(steps=13))
    code, out, errors = command("compare", one, early)
    assert code == 2 and "has 13 of 40 steps: only complete runs are compared" in errors


def test_runs_of_other_settings_are_compared_by_how_they_ended(tmp_path, command):
    "A table of what differs, final numbers with errors, all curves in one page; not an alarm"
    usual = write(tmp_path, "usual", rows())
    seed = write(tmp_path, "seed", rows(1), seed=1)
    slow = write(tmp_path, "slow", rows(2, learning_rate=1e-4), learning_rate=1e-4)
    page = tmp_path / "all.html"
    code, out, _ = command("compare", usual, seed, slow, "--html", str(page))
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert code == 0 and "bitwise" not in out and "%" not in out
    assert lines["optim.learning_rate"].split()[1:] == ["0.0003", "0.0003", "0.0001"]
    assert "C lower by" in lines["raw_reward"] and "±" in lines["raw_reward"]
    text = page.read_text()
    assert "raw_reward of all runs" in text and "<script" not in text
    code, out, _ = command("compare", usual, seed, "--json")
    assert code == 0 and json.loads(out)[0]["settings"] == {"seed": [0, 1]}


def test_an_asynchronous_run_is_not_held_to_bits(tmp_path, command):
    one = write(tmp_path, "one", rows(), qwen3_5_9b_async)
    for number, move in enumerate((1e-3, 0.5)):
        moved = [{**r, "raw_reward": r["raw_reward"] + move} for r in rows()]
        two = write(tmp_path, f"two-{number}", moved, qwen3_5_9b_async)
        code, out, _ = command("compare", one, two)
        assert code == number and "not repeat bitwise: rollouts are asynchronous" in out
        [line] = [line for line in out.splitlines() if line.startswith("raw_reward")]
        assert ("within 3 standard errors" in line) == (move < 0.1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_table_of_a_recipe_has_its_expected_numbers(recipe):
    "One source: what `--against expected` holds a run to is what the notebook promises"
    expected = RECIPES[recipe].expected["laptop"]
    accuracy = next(iter(expected.metrics.values()))  # of tenants: the mean of all
    steps = max(accuracy)
    text = (Path(ROOT) / "recipes" / f"{recipe}.ipynb").read_text()
    row = f"| `laptop` | {expected.hardware} | {accuracy[0]:.2f} to {accuracy[steps]:.2f}"
    [line] = [line for line in text.splitlines() if row in line]
    assert f"| {steps} | {expected.minutes} | yes, {expected.conditions} |" in line
    for step in sorted(accuracy)[1:-1]:
        assert f"{accuracy[step]:.2f} after {step} steps" in line
