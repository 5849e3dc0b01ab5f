"""The how-to pages, followed from the text alone: files written, code run, commands checked as `run` does."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cookbook_npu.cli import (
    app,
    check_machine,
    find_recipe,
    join_pairs,
    read_parameters,
    resolve_run,
)
from cookbook_npu.data.prompts import load_prompts
from cookbook_npu.data.tasks import build_tokenizer

PAGES = Path(__file__).parents[2] / ".docs" / "pages" / "howto"
BLOCK = re.compile(r"^```(?P<head>.*?)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
CAPTION = re.compile(r":caption: (\S+)\n\n")


def blocks(page: Path) -> list[tuple[str, str]]:
    "(language or directive, text) of each fenced block"
    text = page.read_text()
    return [(m["head"].strip(), m["body"]) for m in BLOCK.finditer(text)]


def write_files(page: Path, folder: Path) -> None:
    "The files of a page"
    for head, body in blocks(page):
        if head.startswith("{code-block}"):
            caption = CAPTION.match(body)
            assert caption, f"{page.name}: a file without a name"
            (folder / caption[1]).write_text(body[caption.end() :])


def commands(page: Path) -> list[list[str]]:
    "The command lines of a page, without the program"
    found = []
    for head, body in blocks(page):
        if head == "bash":
            found += [shlex.split(line) for line in body.splitlines() if line]
    assert all(words[0] == "cookbook-npu" for words in found)
    return [words[1:] for words in found]


def check_run(words: list[str]) -> None:
    "As `run` does until it would start: configuration, environment, files, every record"
    pairs = [word for word in join_pairs(words) if "=" in word]
    parameters = read_parameters(pairs)
    if "-f" in words:
        parameters = json.loads(Path(words[words.index("-f") + 1]).read_text()) | parameters
    config = resolve_run(find_recipe(words[0]), parameters)
    check_machine(config)
    prompts = load_prompts(config.data, build_tokenizer())
    assert len(prompts.prompts) >= config.rollout.prompts_per_step


def check_options(words: list[str]) -> None:
    "Whether a command has the options that it is given"
    shown = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, words
    for word in words[1:]:
        assert not word.startswith("--") or word in shown.output, word


@pytest.mark.parametrize("name", sorted(p.stem for p in PAGES.glob("[!i]*.md")))
def test_a_page_works_as_it_stands(name, tmp_path, monkeypatch):
    "Its files, its Python and its commands, in this order"
    page = PAGES / f"{name}.md"
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for head, body in blocks(page):
        if head == "python":
            exec(compile(body, page.name, "exec"), {})
    lines = commands(page)
    assert lines
    for words in lines:
        check_options(words)
        if words[0] == "run" and not words[1].startswith("--"):
            check_run(words[1:])
