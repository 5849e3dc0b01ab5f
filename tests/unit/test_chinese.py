"""The pages in Chinese are in step with the English ones: headings, code, links and numbers."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from page_blocks import text_of
from places import ROOT

sys.path.insert(0, str(ROOT / ".docs"))


pytestmark = pytest.mark.lane("docs")

ZH = ROOT / ".docs" / "pages" / "zh"
HOWTO = ROOT / ".docs" / "pages" / "howto"
PAIRS = {
    ROOT / ".github" / "README_zh.md": ROOT / "README.md",
    ZH / "first_hour_910b.md": ROOT / "nbs" / "tutorials" / "first_hour_910b.ipynb",
    ZH / "qwen3_4b_colocate.md": ROOT / "recipes" / "qwen3_4b_colocate.ipynb",
    ZH / "on_910b.md": ROOT / "nbs" / "tutorials" / "on_910b.ipynb",
    ZH / "modelarts.md": ROOT / "nbs" / "tutorials" / "modelarts.ipynb",
    ZH / "grpo_from_scratch.md": ROOT / "nbs" / "tutorials" / "grpo_from_scratch.ipynb",
    ZH / "recipes.md": HOWTO.parent / "recipes" / "index.md",
}
# every how-to page that has a translation of the same name
NAMES = {file.name for file in ZH.glob("*.md")} - {"index.md"}
PAIRS |= {ZH / file.name: file for file in sorted(HOWTO.glob("*.md")) if file.name in NAMES}
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
LIST = "```{toctree}"  # of pages: each language has its own
CODE = re.compile(r"`[^`\n]+`")
HEADING = re.compile(r"^(#+) (.*)$", re.M)
NUMBER = re.compile(r"\d+(?:\.\d+)*(?:e-?\d+)?")
pages = pytest.mark.parametrize("page", PAIRS, ids=lambda path: path.stem)


def parts(file: Path) -> list[tuple[str, list[str], list[str]]]:
    "(level of the heading, lines of prose, rows of tables) of each section, without fenced blocks"
    text = FENCE.sub("", text_of(file))
    marks = [*HEADING.finditer(text)]
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    found = []
    for mark, end in zip(marks, ends, strict=True):
        lines = [mark[2], *text[mark.end() : end].splitlines()]
        rows = [line for line in lines if line.startswith("|")]
        found.append((mark[1], [line for line in lines if line not in rows], rows))
    return found


def numbers(text: str) -> Counter:
    "The numbers of a text, without those in code and in addresses"
    text = re.sub(r"\]\([^)]*\)", "]", CODE.sub("", text))
    return Counter(NUMBER.findall(text))


def names(text: str) -> Counter:
    "What a text links to: addresses, and files of this repository without their ending"
    found = Counter()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if "://" not in target:
            target = Path(target.partition("#")[0]).stem
        found[target] += 1
    return found


def row_facts(row: str) -> tuple:
    "What a row says in any language: code, numbers, links"
    return (
        tuple(sorted(CODE.findall(row))),
        tuple(sorted(numbers(row).elements())),
        tuple(sorted(names(row).elements())),
    )


@pages
def test_a_page_has_the_headings_and_blocks_of_the_other(page):
    english = PAIRS[page]
    assert [level for level, _, _ in parts(page)] == [
        level for level, _, _ in parts(english)
    ]
    ours, theirs = map(FENCE.findall, (text_of(page), text_of(english)))
    assert [b for b in ours if b[:12] != LIST] == [b for b in theirs if b[:12] != LIST]


@pages
def test_a_page_has_the_code_and_the_numbers_of_the_other(page):
    for (_, here, _), (_, there, _) in zip(parts(page), parts(PAIRS[page]), strict=True):
        ours, theirs = "\n".join(here), "\n".join(there)
        assert Counter(CODE.findall(ours)) == Counter(CODE.findall(theirs)), here[0]
        assert numbers(ours) == numbers(theirs), here[0]


@pages
def test_a_table_says_what_the_other_says(page):
    for (_, here, ours), (_, _, theirs) in zip(
        parts(page), parts(PAIRS[page]), strict=True
    ):
        known = [row_facts(row) for row in theirs]
        rows = [row_facts(row) for row in ours]
        assert rows == known, here[0]


def test_readme_and_the_site_lead_to_it():
    for page, english in PAIRS.items():
        if english.name == "README.md":
            assert f"({page.relative_to(ROOT)})" in text_of(english)[:400]
    index = (ROOT / ".docs" / "pages" / "zh" / "index.md").read_text()
    readme = next(page for page in PAIRS if page.name == "README_zh.md")
    for page in PAIRS:
        if ZH in page.parents:
            assert page.stem in index
            assert f"(../{page.relative_to(ROOT)})" in text_of(readme)
