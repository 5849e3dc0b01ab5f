"""The how-to pages, followed from the text alone.

Quick: files written, code run, commands run or, if they start a run, checked as `run` does. Slow: pages are
typed, line by line, in the environment that README's first command makes. `page_blocks.py` knows which test
runs what."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from page_blocks import ELSEWHERE, IN_PROCESS, NPU, TYPED, all_pages, how_run, steps, typed
from reader import CAPTION, Reader, blocks, make_environment
from text_samples import text_sample
from typer.testing import CliRunner

from cookbook_npu.cli import app, check_machine, find_notebook, join_pairs, resolve_run
from cookbook_npu.config import OutputConfig, config_keys
from cookbook_npu.data.prompts import load_prompts
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.errors import CookbookError
from cookbook_npu.parameters import read_parameters
from cookbook_npu.recipes import RECIPES, qwen3_4b_colocate
from cookbook_npu.runs.folder import RunFolder, append_line, write_json

pytestmark = pytest.mark.lane("docs")

PAGES = Path(__file__).parents[2] / ".docs" / "pages" / "howto"


def write_files(page: Path, folder: Path) -> None:
    "The files of a page"
    for head, body in blocks(page):
        if head.startswith("{code-block}"):
            caption = CAPTION.match(body)
            assert caption, f"{page.name}: a file without a name"
            (folder / caption[1]).write_text(body[caption.end() :])


def check_run(words: list[str]) -> None:
    "As `run` does until it would start: configuration, environment, files, every record"
    pairs = [word for word in join_pairs(words) if "=" in word]
    parameters = read_parameters(pairs)
    if "-f" in words:
        parameters = json.loads(Path(words[words.index("-f") + 1]).read_text()) | parameters
    config = resolve_run(find_notebook(words[0]), parameters)
    check_machine(config)
    if config.data.image_key:  # its processor belongs to the model
        return
    prompts = load_prompts(config.data, build_tokenizer())
    assert len(prompts.prompts) >= config.rollout.prompts_per_step


def check_options(words: list[str]) -> None:
    "Whether a command has the options that it is given"
    shown = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, words
    for word in words[1:]:
        assert not word.startswith("--") or word in shown.output, word


SAMPLE = text_sample("2", "2", metadata={"prompt": "1+1="}).record()


def record_runs(folder: Path) -> None:
    """runs/A and runs/B, as a page calls them: complete, and different in one number

    C has another seed, and NPU is of scale 910b."""
    real = dict(scale="910b", model="/data/Qwen3-4B", prompt_data="arithmetic")
    runs = (("NPU", 0.5, 0), ("A", 0.5, 0), ("B", 0.625, 0), ("C", 0.5, 1))
    for name, last, seed in runs:
        output = {"root": str(folder / "runs"), "name": name}
        given = real if name == "NPU" else {}
        config = qwen3_4b_colocate(num_steps=2, seed=seed, **given)
        config = config.model_copy(update={"output": OutputConfig(**output)})
        with RunFolder.create(config) as run:
            if name == "NPU":  # its model is not here, so the checksum is left out
                device = {"name": "NPU", "count": 8, "simulated": False}
                write_json(run.stack_file, {"device": device})
            else:
                run.save_stack({"name": "simulated NPU", "count": 2, "simulated": True})
            for step, reward in enumerate((0.25, last), 1):
                row = {"step": step, "raw_reward": reward}
                if name == "NPU":
                    row |= {"time/actor_train": 100.0, "time/step": 500.0}
                append_line(run.metrics_file, row)
                run.save_samples(step, [SAMPLE | {"reward": reward}])


def write_verl_file(file: Path) -> None:
    "A parquet file of verl, as the page of migration takes it"
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n}+1="}],
            "reward_model": {"ground_truth": str(n + 1)},
            "data_source": "mine",
        }
        for n in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)


# command -> its exit code, where it is not 0
CODES = {
    "compare runs/A runs/B": 1,
    "compare runs/A runs/B --html both.html": 1,
    "compare runs/A --against expected": 2,  # two steps say nothing of its curve
    "doctor --bundle report.zip --run runs/A": 1,  # of a machine that the record leaves out
    "doctor --bundle evidence --run runs/A --format acceptance": 1,
}


def try_command(words: list[str]) -> None:
    "Run a command that starts no run, NAME being A"
    words = [word.replace("runs/NAME", "runs/A") for word in join_pairs(words)]
    line = " ".join(words)
    done = CliRunner().invoke(app, words)
    code = 2 if isinstance(done.exception, CookbookError) else done.exit_code
    assert code == CODES.get(line, 0), (line, done.output, done.exception)


@pytest.mark.parametrize(
    "name", sorted(p.stem for p in PAGES.glob("[!i]*.md") if p.stem != "commands")
)
def test_a_page_works_as_it_stands(name, tmp_path, monkeypatch):
    "Its files, its Python and its commands, in this order"
    page = PAGES / f"{name}.md"
    write_files(page, tmp_path)
    record_runs(tmp_path)
    write_verl_file(tmp_path / "train.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for kind, text in steps(page):
        if kind == "python":
            exec(compile(text, page.name, "exec"), {})
    for kind, text in steps(page):
        if kind != "command" or not text.startswith("cookbook-npu "):
            continue
        words = shlex.split(text)[1:]
        check_options(words)
        if name in TYPED or how_run(page, kind, text) == [NPU]:
            continue
        if words[0] == "run" and words[1] in RECIPES:
            check_run(words[1:])
        elif how_run(page, kind, text) == [IN_PROCESS]:
            try_command(words)


@pytest.mark.parametrize("page", all_pages(), ids=lambda page: page.stem)
def test_something_runs_each_step_of_a_page(page):
    "One test or one reason for each file, program and command: a new one must be listed"
    for kind, text in steps(page):
        found = how_run(page, kind, text)
        assert len(found) == 1, f"{page.name}: {kind} {text[:80]!r} is run by {found}"


# migrate.md also names the keys of others
@pytest.mark.parametrize("page", sorted(PAGES.glob("[!m]*.md")), ids=lambda page: page.stem)
def test_a_key_that_a_page_names_exists(page):
    "`section.key` of a configuration"
    keys = {key.name for key in config_keys()}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    named = set(re.findall(r"[`\"]([a-z_]+\.[a-z_.]+)[`\"]", page.read_text()))
    here = {name for name in named if name.partition(".")[0] in sections}
    assert here <= keys, sorted(here - keys)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    "What README's first command installs"
    return make_environment(tmp_path_factory.mktemp("reader") / "env")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [typed("own_shim")])
def test_the_page_of_shims_as_typed(name, environment, tmp_path):
    "The shim is in the table, and every worker of the run has it"
    shown = Reader(environment, tmp_path).follow(PAGES / f"{name}.md")
    assert any("proved" in text for text in shown)
    assert any("vectors.empty_mean" in text and "applied" in text for text in shown)
    (run,) = (tmp_path / "runs").iterdir()
    rows = json.loads((run / "stack.json").read_text())["shims"]
    assert {"vectors.empty_mean": "applied"}.items() <= {
        row["name"]: row["state"] for row in rows
    }.items()


def pages_of(test: str) -> list:
    "The pages that a test follows"
    return [typed(name) for name, how in TYPED.items() if how.endswith(f"::{test}")]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", pages_of("test_a_page_as_typed"))
def test_a_page_as_typed(name, environment, tmp_path):
    (tmp_path / "recipes").symlink_to(PAGES.parents[2] / "recipes")  # of the checkout
    left_out = tuple(ELSEWHERE.get(name, ()))
    shown = Reader(environment, tmp_path).follow(PAGES / f"{name}.md", left_out=left_out)
    assert len(list((tmp_path / "runs").glob("*/report.html"))) >= 1
    if name == "own_data":  # the curve of the page rises, and the table is the page's
        first, last = re.search(
            r"eval accuracy, first . last +(\S+) . (\S+)", shown[-1]
        ).groups()
        assert float(first) < 0.4 and float(last) > 0.85
        table = next(b for h, b in blocks(PAGES / "own_data.md") if h == "text")
        assert " ".join(table.split()) in " ".join(shown[-1].split())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", pages_of("test_a_page_about_runs_as_typed"))
def test_a_page_about_runs_as_typed(name, environment, tmp_path):
    "With the recorded runs A, B and C"
    record_runs(tmp_path)
    codes = {f"cookbook-npu {line}": code for line, code in CODES.items()}
    Reader(environment, tmp_path).follow(PAGES / f"{name}.md", codes)
