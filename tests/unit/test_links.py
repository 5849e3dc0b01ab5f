"""Every link of a notebook or a page leads to a file of this repository, and to a heading in it.

The site rewrites the links (`.docs/stage.py`), so what resolves here resolves in both; `make docs` checks
the links of the site."""

import re
from functools import cache
from pathlib import Path

import pytest
from page_blocks import text_of
from places import ROOT

pytestmark = pytest.mark.lane("docs")

NOTEBOOKS = [*ROOT.glob("nbs/**/*.ipynb"), *ROOT.glob("recipes/*.ipynb")]
PAGES = [ROOT / "README.md", ROOT / "tests" / "README.md", *ROOT.glob(".github/*.md")]
PAGES += sorted(ROOT.glob(".docs/pages/**/*.md"))
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
TARGET = re.compile(r"\]\(([^)\s]+)\)|\b(?:href|src)=\"([^\"]+)\"")


@cache
def prose_of(file: Path) -> str:
    "What a page says beside its code"
    return FENCE.sub("", text_of(file))


def anchors(file: Path) -> set[str]:
    "The names of the headings, as GitHub and MyST make them"
    headings = re.findall(r"^#+ (.+)$", prose_of(file), re.M)
    plain = [re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text) for text in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in plain}


@pytest.mark.parametrize(
    "file", [*NOTEBOOKS, *PAGES], ids=lambda file: str(file.relative_to(ROOT))
)
def test_links(file):
    for found in TARGET.finditer(prose_of(file)):
        target = found[1] or found[2]
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        place = (file.parent / path).resolve() if path else file
        assert place.exists(), target
        if anchor:
            assert anchor in anchors(place), target
