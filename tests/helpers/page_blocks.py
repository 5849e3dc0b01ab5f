"""Which test runs each file, program and command of the pages; `test_howto.py` finds those that none runs.

A page of `TYPED` is followed from top to bottom in README's environment. On the other how-to pages
`test_a_page_works_as_it_stands` writes the files, and runs the programs and the commands that start no run.
What is left is listed in `ELSEWHERE`, by its first words.
"""

import json
import re
from pathlib import Path

import pytest
from places import ROOT
from reader import BLOCK, CAPTION, SHOWN, command_lines

# page -> the test that follows it
TYPED = {
    "compare_and_rerun": "unit/test_howto.py::test_a_page_about_runs_as_typed",
    "resume": "unit/test_howto.py::test_a_page_about_runs_as_typed",
    "long_responses": "unit/test_howto.py::test_a_page_as_typed",
    "lora": "unit/test_howto.py::test_a_page_as_typed",
    "own_conversations": "unit/test_howto.py::test_a_page_as_typed",
    "own_data": "unit/test_howto.py::test_a_page_as_typed",
    "own_loss": "unit/test_howto.py::test_a_page_as_typed",
    "own_model": "unit/test_model_hubs.py::test_the_page_of_models_as_typed",
    "own_recipe": "unit/test_howto.py::test_a_page_as_typed",
    "own_reward": "unit/test_howto.py::test_a_page_as_typed",
    "own_shim": "unit/test_howto.py::test_the_page_of_shims_as_typed",
}
# the pages that `make test` types, too; the others are long
ALWAYS_TYPED = ("own_reward",)
IN_PROCESS = "unit/test_howto.py::test_a_page_works_as_it_stands"
WHOLE_RUN = "recipes/test_recipe.py::test_a_run_leaves_everything_behind"
RESUMES = "recipes/test_resumes.py::test_it_trains_and_resumes_bit_for_bit"
CELLS = (
    "recipes/test_recipe.py::"
    "test_functions_of_cells_grade_and_train_and_outlive_the_notebook"
)
LAB = "recipes/test_lab.py::test_the_recipe_is_run_stopped_and_gone_on_with"
CRON = (
    "unit/test_scheduled_runs.py::"
    "test_the_line_of_cron_starts_the_run_in_its_bare_environment"
)
INSTALL = "unit/test_stacks.py::test_each_documented_line_resolves"
NOTEBOOK = "notebooks/test_notebooks.py::test_notebook"
NPU = "needs an Ascend machine"
DOCKER = "needs docker"
DOWNLOAD = "downloads from a hub or a package index"
SERVICE = "starts a service of the machine"


def typed(name: str):
    "The page as a parameter of a test"
    return pytest.param(
        name, marks=() if name in ALWAYS_TYPED else pytest.mark.lane("runs")
    )


# page -> first words of a step -> the test that runs it, or the reason why none does
ELSEWHERE: dict[str, dict[str, str]] = {
    "smollm2_grpo": {
        "import re": "recipes/test_smollm2.py::test_a_lenient_reward_is_hacked"
    },
    "README": {
        "make run ": "installs gigabytes; then it is `cookbook-npu run`",
        "make test ": "is the tests",
        "from cookbook_npu": "unit/test_readme.py::test_its_python_runs_as_typed",
    },
    "lora": {
        "cookbook-npu run qwen3_4b_multi_lora_grpo": "recipes/test_tenant_run.py::"
        "test_a_tenant_that_fails_is_closed_and_named"
    },
    "migrate": {
        "cookbook-npu run qwen3_4b_colocate -p num_steps 10": WHOLE_RUN,
        "cookbook-npu run qwen3_4b_colocate -p prompt_data train.parquet": IN_PROCESS,
    },
    "own_data": {
        "cookbook-npu run qwen3_4b_colocate -p model Qwen": "takes minutes with a real model; "
        "own_model.md has the same line, which is typed"
    },
    "own_loss": {"import torch\n\nfrom": CELLS},
    "own_reward": {"import re": CELLS},
    "own_environment": {
        "python3 -m venv /opt": DOWNLOAD,
        "/opt/verifiers/bin/pip": DOWNLOAD,
        "cookbook-npu run qwen3_4b_colocate -p prompt_data numbers": RESUMES,
        "cookbook-npu run qwen3_4b_colocate -p prompt_data wordle": "contrib/test_verifiers.py::"
        "test_several_turns_are_carried_forward_without_loss",
    },
    "own_pictures": {
        "cookbook-npu run": "recipes/test_recipe.py::"
        "test_the_recipe_with_pictures_looks_at_them"
    },
    "resume": {"from contextlib": LAB, "for row in": LAB, "opened.close": LAB},
    "schedule": {
        "cookbook-npu run": CRON,
        "chmod": "makes its script executable",
        "systemctl": SERVICE,
        "loginctl": SERVICE,
        "journalctl": SERVICE,
    },
    "schedule_modelarts": {"cookbook-npu plan": "reads a file of the shared disk"},
    "troubleshooting": {
        "export HCCL_": NPU,
        "cookbook-npu run qwen3_4b_colocate --scale 910b": NPU,
        "cookbook-npu run --resume": "faults/test_commands.py::"
        "test_a_disk_that_others_fill_ends_a_run_that_can_be_resumed",
        "cookbook-npu eval": "recipes/test_trained_policy.py::"
        "test_the_runs_own_evaluations_come_out_again",
    },
    "qwen3_4b_multi_lora_grpo": {"overrides = {": "is a value of `overrides`"},
    "qwen3_4b_sft": {"cookbook-npu run": RESUMES},
    "smoke": {"cookbook-npu run smoke -p scale 910b": NPU},
    "first_hour_910b": {
        "npu-smi": NPU,
        "git clone": DOWNLOAD,
        "docker build": DOCKER,
        "hf download": DOWNLOAD,
        "cookbook-npu doctor qwen3_4b_colocate": NPU,
        "cookbook-npu doctor --bundle": NPU,
        "cookbook-npu plan": NOTEBOOK,
        "cookbook-npu launch qwen3_4b_colocate --rehearse": "simulator/test_launch.py::"
        "test_rehearsal",
        "cookbook-npu run smoke": NPU,
        "cookbook-npu launch qwen3_4b_colocate -p model": NPU,
        "cookbook-npu launch ID --resume -p num_steps 300": NPU,
    },
    "modelarts": {"pip install": DOWNLOAD, "export": "sets secrets of the reader's"},
    "on_910b": {
        "git clone": DOWNLOAD,
        "docker": DOCKER,
        "source": NPU,
        "cookbook-npu doctor": NPU,
        "export": "names the reader's network",
        "mkdir -p ~/.ray": "copies a file from another machine",
        "ray ": NPU,
        "cookbook-npu launch ID --resume": NPU,
        "cookbook-npu launch qwen3_4b_colocate -f parameters.json": NPU,
        "cookbook-npu launch qwen3_4b_colocate -p model": NPU,
        "cookbook-npu run qwen3_4b_colocate -f parameters.json": NPU,
        "bash -ic": NPU,
        "papermill": "has `...` to fill in",
        "python3.11 -m venv": DOWNLOAD,
        "apt-get": DOWNLOAD,
        "pip install torch==": INSTALL,
        "pip install -c .devcontainer/910b/": INSTALL,
        "TORCH_DEVICE": INSTALL,
        "pip install --no-deps vllm-ascend==": INSTALL,
        "pip uninstall -y triton triton-ascend": INSTALL,
        "pip install triton-ascend==": INSTALL,
        "pip install --no-deps 'git+https://gitcode.com/Ascend/MindSpeed.git@": INSTALL,
    },
}


def all_pages() -> list[Path]:
    "README, the how-to pages, the recipes and the tutorials"
    pages = [ROOT / "README.md", *ROOT.glob(".docs/pages/howto/*.md")]
    return sorted(
        [*pages, *ROOT.glob("recipes/*.ipynb"), *ROOT.glob("nbs/tutorials/*.ipynb")]
    )


def text_of(page: Path) -> str:
    "The prose of a page"
    if page.suffix == ".md":
        return page.read_text("utf-8")
    cells = json.loads(page.read_text("utf-8"))["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def is_run(line: str) -> bool:
    "Whether a command starts a run"
    return bool(re.match(r"cookbook-npu (run|launch|eval|export)\b", line))


def steps(page: Path) -> list[tuple[str, str]]:
    "(kind, text) of what a reader does: writes a `file`, runs a `program`, or types a `command`"
    found = []
    for match in BLOCK.finditer(text_of(page)):
        head, body = match["head"].strip(), match["body"]
        if head.startswith("{code-block}"):
            found.append(("file", CAPTION.match(body)[1]))
        elif head in ("python", "python notebook"):
            found.append((head, body))
        elif head in ("bash", "sh", "console"):
            found += [("command", line) for line in command_lines(head, body)]
        elif head not in SHOWN and not head.startswith(("{toctree}", "{raw}")):
            raise ValueError(f"{page.name}: a block {head!r} that nobody types")
    return found


def how_run(page: Path, kind: str, text: str) -> list[str]:
    "The test that runs a step, or the reason why none does; empty: nothing is known of it"
    known = ELSEWHERE.get(page.stem, {})
    listed = [how for start, how in known.items() if text.startswith(start)]
    if listed:
        return listed
    if page.stem in TYPED and kind != "python notebook":
        return [TYPED[page.stem]]
    in_process = kind in ("file", "python")
    in_process |= text.startswith("cookbook-npu ") and not is_run(text)
    return [IN_PROCESS] if page.parent.name == "howto" and in_process else []
