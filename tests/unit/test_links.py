"""Every link of a notebook or a page leads to a file of this repository, and to a heading in it.

The site rewrites the links (`.docs/stage.py`), so what resolves here resolves in both; `make docs` checks
the links of the site."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.lane("docs")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = [*ROOT.glob("nbs/**/*.ipynb"), *ROOT.glob("recipes/*.ipynb")]
PAGES = [ROOT / "README.md", ROOT / "tests" / "README.md", *ROOT.glob(".github/*.md")]
PAGES += sorted(ROOT.glob(".docs/pages/**/*.md"))
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
TARGET = re.compile(r"\]\(([^)\s]+)\)|\b(?:href|src)=\"([^\"]+)\"")


@cache
def text_of(file: Path) -> str:
    "The prose of a page, without its code"
    if file.suffix == ".md":
        return FENCE.sub("", file.read_text(encoding="utf-8"))
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    prose = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    return FENCE.sub("", "\n\n".join(prose))


def anchors(file: Path) -> set[str]:
    "The names of the headings, as GitHub and MyST make them"
    headings = re.findall(r"^#+ (.+)$", text_of(file), re.M)
    plain = [re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text) for text in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in plain}


@pytest.mark.parametrize(
    "file", [*NOTEBOOKS, *PAGES], ids=lambda file: str(file.relative_to(ROOT))
)
def test_links(file):
    for found in TARGET.finditer(text_of(file)):
        target = found[1] or found[2]
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        place = (file.parent / path).resolve() if path else file
        assert place.exists(), target
        if anchor:
            assert anchor in anchors(place), target
