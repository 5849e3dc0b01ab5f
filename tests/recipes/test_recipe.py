"""The recipe from the command line to the report, with tiny settings: it runs, repeats, and refuses
mistakes early.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from metrics_page import explained
from page_blocks import steps
from places import ROOT
from whole_runs import more_vllm, preloaded, run

from cookbook_npu.config import load_config, override, save_config
from cookbook_npu.plan.plan import make_plan
from cookbook_npu.recipes import RECIPES
from cookbook_npu.runs.report import write_report

PHASES = """rollout ref_logprobs logprobs actor_train sleep wake_up update_weights step""".split()
SEED_METRICS = """raw_reward response_length_mean response_length_max truncated_ratio zero_std_groups
pg_loss kl_loss entropy_loss pg_clipfrac grad_norm lr train_rollout_logprob_abs_diff
tokens_per_s_per_device""".split()
# rewards of a random model are all 0: short responses are worth more, so that there is something to learn
TINY = {
    "rollout.eval_every": 1,
    "data.eval_prompts": 16,
    "algorithm.overlong_buffer_share": 0.9,
}


def command(
    *args: str, timeout: float = 400, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    "Run `cookbook-npu` as a person would"
    env = env or os.environ | {"OMP_NUM_THREADS": "1"}
    words = [str(Path(sys.executable).parent / "cookbook-npu"), *args]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=env
    )


def tiny_run(
    root: Path,
    *args: str,
    env: dict[str, str] | None = None,
    recipe: str = "qwen3_4b_colocate",
    **overrides: object,
) -> Path:
    "A run with tiny settings; its folder"
    values = {**TINY, "output.root": str(root), **overrides}
    settings = "-p num_steps 2 -p prompts_per_step 4 -p samples_per_prompt 4".split()
    settings += [*args, "-p", "overrides", json.dumps(values)]
    done = command("run", recipe, *settings, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (folder,) = (file.parent for file in root.glob("*/config.json"))
    assert "reward, first" in done.stdout and str(folder / "report.html") in done.stdout
    return folder


def records(folder: Path) -> list[dict]:
    text = (folder / "metrics.jsonl").read_text()
    return explained([json.loads(line) for line in text.splitlines()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("first") / "runs")


def test_a_run_leaves_everything_behind(folder):
    rows = records(folder)
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert set(SEED_METRICS) - set(rows[1]) == set()
    assert all(f"time/{phase}" in rows[1] for phase in PHASES), sorted(rows[1])
    assert rows[1]["kl_loss"] == 0 and rows[1]["ppo_kl"] == 0, (
        "on the first step actor and reference are the same weights"
    )
    # later ones are those of the training pass
    assert "time/logprobs" not in rows[2]
    assert max(row["train_rollout_logprob_abs_diff"] for row in rows[1:]) < 1e-4
    assert rows[2]["memory/free_after_sleep"] > rows[2]["memory/free_before_sleep"]
    assert rows[2]["memory/engine_weights"] > 0 and "memory/communicators" in rows[1]
    assert len((folder / "samples/step_000001.jsonl").read_text().splitlines()) == 16
    # the last cells ask the policy, compare with no earlier run, and export
    shown = (folder / "notebook.ipynb").read_text()
    assert "after 2 steps" in shown and "end of A" not in shown
    assert (folder / "export/step_000002/model.safetensors").is_file()
    checkpoint = folder / "checkpoints/step_000002"
    assert (checkpoint / "hf/model.safetensors").is_file()
    assert {"hf/model.safetensors", "state/common.pt"} <= set(
        json.loads((checkpoint / "manifest.json").read_text())["files"]
    )


def test_the_report_says_simulated_and_lists_every_shim(folder):
    page = (folder / "report.html").read_text()
    stack = json.loads((folder / "stack.json").read_text())
    assert (
        "simulated NPU" in page
        and "reported by vime #255" in page
        and "device memory in each step" in page
    )
    assert stack["device"]["simulated"] is True
    states = {s["name"]: s["state"] for s in stack["shims"]}
    assert len(states) >= 8 and set(states.values()) <= {"applied", "not needed"}, states
    assert all(name in page for name in states)


def test_a_second_run_repeats_bitwise(folder, tmp_path):
    "Also outside of a notebook"
    again, file = tmp_path / "again", tmp_path / "again.json"
    place = {"output.root": str(tmp_path), "output.name": again.name}
    save_config(override(load_config(folder / "config.json"), place), file)
    run(file)
    done = command("compare", str(folder), str(again))
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("step_000001.jsonl", "step_000002.jsonl"):
        here, there = (run / "samples" / name for run in (again, folder))
        assert here.read_bytes() == there.read_bytes()


def run_without_notebook(root: Path, recipe: str, **overrides: object) -> Path:
    "A run of a recipe with tiny settings; its folder"
    small = {"model.tiny.hidden_size": 32, "model.tiny.ffn_size": 64}
    place = {"output.root": str(root), "output.name": "run"}
    sizes = dict(num_steps=2, prompts_per_step=4, samples_per_prompt=4)
    config = RECIPES[recipe](overrides={**TINY, **small, **place, **overrides}, **sizes)
    save_config(config, root / "run.json")
    run(root / "run.json")
    return root / "run"


def test_the_asynchronous_recipe_runs_beside_its_trainer(tmp_path):
    """Samples of the second step are one update old; every role is in the timeline

    Rows of text and rows with pictures are in one batch."""
    mixed = {"data.mixture": {"arithmetic": 0.5, "geometry": 0.5}}
    folder = run_without_notebook(tmp_path, "qwen3_5_9b_async", **mixed)
    rows = records(folder)
    assert [row.get("staleness/age_max") for row in rows] == [None, 0, 1]
    assert rows[1]["train_rollout_logprob_abs_diff"] < 1e-4
    assert "train_rollout_logprob_abs_diff" not in rows[2]
    assert rows[2]["eval_accuracy"] >= 0
    spans = [json.loads(line) for line in (folder / "spans.jsonl").read_text().splitlines()]
    assert {"trainer", "engine 0", "engine 1"} <= {span["role"] for span in spans}
    assert "engine 1" in write_report(folder).read_text()


def code_of(recipe: str) -> str:
    "The code of a recipe's notebook with the name of `qwen3_4b_colocate`"
    cells = json.loads((ROOT / "recipes" / f"{recipe}.ipynb").read_text())["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    # without comments: an example of a prompt is the recipe's own
    return re.sub(r"  # .*", "", "\n".join(code)).replace(recipe, "qwen3_4b_colocate")


OWN_PARAMETERS = ("qwen3_4b_sft", "qwen3_4b_multi_lora_grpo", "smollm2_grpo")


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r not in OWN_PARAMETERS])
def test_recipes_differ_in_their_settings_alone(recipe):
    "So a run of one notebook is a run of each, and the tests of the others need no kernel"
    assert code_of(recipe) == code_of("qwen3_4b_colocate")


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_recipe_says_to_try_can_be_planned(recipe):
    cells = json.loads((ROOT / "recipes" / f"{recipe}.ipynb").read_text())["cells"]
    pages = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    (page,) = [text for text in pages if text.startswith("## Try next")]
    items = re.findall(r"^- (`.+?`):", page, flags=re.MULTILINE)
    assert len(items) >= 2
    for item in items:
        given = {}
        for code in re.findall(r"`([^`]+)`", item):
            given |= eval(f"dict({code})")
        assert f"{recipe} at scale laptop" in str(make_plan(RECIPES[recipe](**given))), item


def test_the_recipe_with_pictures_looks_at_them(tmp_path):
    """Every sample names its picture; engine and trainer agree; the last export keeps tower and processor

    The pictures are those of the page about one's own."""
    page = ROOT / ".docs" / "pages" / "howto" / "own_pictures.md"
    (program,) = [text for kind, text in steps(page) if kind == "python"]
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    few = {"train.global_batch_size": 8, "data.task": {"level": 1, "per_level": 100}}
    few |= {
        "data.image_key": "images",
        "data.prompt_data": str(tmp_path / "triangles.jsonl"),
    }
    few["data.eval_data"] = str(tmp_path / "held_out.jsonl")
    # it guesses after so few steps: a reward that differs keeps the gradient from being 0
    few["reward.scorers"] = {"exact": 1.0, "run_driver:spread": 1.0}
    folder = run_without_notebook(tmp_path, "qwen3_vl_8b_grpo", **few)
    rows = records(folder)
    assert [row["step"] for row in rows] == [0, 1, 2] and rows[2]["eval_accuracy"] >= 0
    assert all(row["train_rollout_logprob_abs_diff"] < 1e-4 for row in rows[1:])
    for step in (1, 2):
        lines = (folder / f"samples/step_{step:06d}.jsonl").read_text().splitlines()
        for sample in map(json.loads, lines):
            (image,) = sample["images"]
            assert re.search(r"/pictures/t\d+\.png$", image)
    export = folder / "checkpoints/step_000002/hf"
    assert json.loads((export / "config.json").read_text())["model_type"] == "qwen3_vl"
    assert (export / "preprocessor_config.json").is_file()


@pytest.mark.lane("runs")
def test_qwen3_5_looks_at_pictures(tmp_path):
    "Ten steps on drawings; the same run on white paper is the control"
    last = {}
    for blank in (False, True):
        name = f"blank {blank}"
        more = {"output.root": str(tmp_path), "output.name": name, "train.save_every": 0}
        config = RECIPES["qwen3_5_9b_colocate"](
            num_steps=10,
            prompt_data="geometry",
            overrides={**more, "data.blank_images": blank},
        )
        save_config(config, tmp_path / "run.json")
        run(tmp_path / "run.json")
        last[blank] = records(tmp_path / name)[-1]
        assert last[blank]["train_rollout_logprob_abs_diff"] < 1e-4
    assert last[False]["eval_accuracy"] - last[True]["eval_accuracy"] >= 0.5


@pytest.mark.lane("runs")
def test_a_loss_of_the_users_trains_as_the_same_loss_of_the_package(tmp_path):
    "Rewards that differ within every group, so that both move the weights"
    given = {"reward.scorers": {"run_driver:spread": 1.0}, "train.global_batch_size": 8}
    metrics = []
    for name in ("ppo", "run_driver:own_clip"):
        values = {**given, "algorithm.loss": name, "output.name": name[:3]}
        run_without_notebook(tmp_path, "qwen3_4b_colocate", **values)
        metrics.append(records(tmp_path / name[:3]))
    assert metrics[0][2]["grad_norm"] > 0
    for name in ("pg_loss", "grad_norm", "raw_reward"):
        assert metrics[1][2][name] == pytest.approx(metrics[0][2][name], rel=1e-6), name


ABOVE_THE_CALL = """overrides = {
    "reward.scorers": {shortest: 1.0},
    "algorithm.loss": unclipped,
    **(overrides or {}),
}
"""


def cell_of(page: str) -> str:
    "What a how-to page has one write into a cell, without its call of a recipe"
    found = steps(ROOT / ".docs" / "pages" / "howto" / f"{page}.md")
    (cell,) = [text for kind, text in found if kind == "python notebook"]
    return cell.partition("config =")[0]


@pytest.mark.lane("runs")
def test_functions_of_cells_grade_and_train_and_outlive_the_notebook(tmp_path):
    "Trainer and graders import them; a shell resumes and evaluates with their copy in the run folder"
    notebook = json.loads((ROOT / "recipes/qwen3_4b_colocate.ipynb").read_text())
    call = next(c for c in notebook["cells"] if "config = qwen" in "".join(c["source"]))
    code = ABOVE_THE_CALL + "".join(call["source"])
    call["source"] = cell_of("own_reward") + cell_of("own_loss") + code
    mine, root = tmp_path / "mine.ipynb", tmp_path / "runs"
    mine.write_text(json.dumps(notebook))
    folder = tiny_run(root, env=preloaded(), recipe=str(mine), **{"output.name": "own"})
    assert len(list((root / "code").iterdir())) == 2
    assert records(folder)[2]["grad_norm"] > 0
    for place in (mine, folder / "notebook.ipynb"):
        place.unlink()
    shutil.rmtree(root / "code")
    resumed = command(
        "run", "--resume", str(folder), "-p", "num_steps", "3", env=preloaded()
    )
    assert resumed.returncode == 0, resumed.stdout[-2000:] + resumed.stderr[-4000:]
    assert [row["step"] for row in records(folder)] == [0, 1, 2, 3]
    asked = command("eval", str(folder), env=preloaded())
    assert asked.returncode == 0, asked.stdout + asked.stderr
    accuracy = re.search(r"accuracy +([\d.]+)", asked.stdout)[1]
    assert float(accuracy) == pytest.approx(records(folder)[3]["eval_accuracy"], abs=1e-4)


@pytest.mark.lane("runs")
def test_gsm8k_records_run_through_in_a_copy_of_the_notebook(tmp_path):
    lines = [
        {
            "question": f"Tom has {n} apples and buys {n}. How many?",
            "answer": f"{n}+{n}.\n#### {2 * n}",
        }
        for n in range(1, 9)
    ]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    more = ["-p", "prompt_data", str(data)]
    # a copy by hand without metadata, where another kernel has the name of ours
    nb = json.loads((ROOT / "recipes/qwen3_4b_colocate.ipynb").read_text())
    cells = [{"cell_type": c["cell_type"], "source": c["source"]} for c in nb["cells"]]
    mine = tmp_path / "mine.ipynb"
    mine.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))
    kernel = tmp_path / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    kernel.write_text('{"argv": ["false"], "display_name": "", "language": "python"}')
    env = preloaded() | {"JUPYTER_PATH": str(tmp_path)}
    folder = tiny_run(tmp_path / "runs", *more, env=env, recipe=str(mine))
    assert folder.name.startswith("mine-laptop")
    samples = [
        json.loads(line)
        for line in (folder / "samples/step_000001.jsonl").read_text().splitlines()
    ]
    assert {s["label"] for s in samples} <= {str(2 * n) for n in range(1, 9)}
    assert records(folder)[-1]["step"] == 2
    shown = (folder / "notebook.ipynb").read_text()
    assert "set for your prompts" in shown and "8 of 8 prompts have characters" in shown


@more_vllm
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="the vllm extra has no wheel here"
)
def test_the_vllm_engine_runs_the_same_recipe(tmp_path):
    "`make test` rehearses a recipe on this engine (simulator/test_launch.py)"
    folder = tiny_run(tmp_path / "runs", "-p", "engine", "vllm", env=preloaded())
    rows = records(folder)
    assert records(folder)[-1]["step"] == 2
    assert all(r["train_rollout_logprob_abs_diff"] < 0.01 for r in rows[1:])


def test_a_taken_run_folder_is_refused(folder, tmp_path):
    root = tmp_path / "runs"
    shutil.copytree(folder, root / "mine")
    values = {"output.root": str(root), "output.name": "mine"}
    done = command("run", "qwen3_4b_colocate", "-p", "overrides", json.dumps(values))
    assert done.returncode == 2 and "run folder" in done.stderr, done.stderr
    assert sorted(p.name for p in root.iterdir()) == ["mine"]
