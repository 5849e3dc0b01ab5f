"""Every link from a notebook or a page to a file of this repository leads to one"""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = [*ROOT.glob("nbs/**/*.ipynb"), *ROOT.glob("recipes/*.ipynb")]
# links of the chapters' own pages are addresses of the site, which `make docs` checks
PAGES = [ROOT / "README.md", ROOT / "tests" / "README.md", *ROOT.glob(".github/*.md")]
PAGES += [*ROOT.glob(".docs/pages/howto/*.md"), *ROOT.glob(".docs/pages/zh/*.md")]
PAGES.append(ROOT / ".docs" / "pages" / "lab_log.md")


def text_of(file: Path) -> str:
    "The prose of a page"
    if file.suffix == ".md":
        return file.read_text(encoding="utf-8")
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


@pytest.mark.parametrize(
    "file", [*NOTEBOOKS, *PAGES], ids=lambda file: str(file.relative_to(ROOT))
)
def test_links(file):
    targets = re.findall(r"\]\(([^)#\s]+)\)", text_of(file))
    local = [t for t in targets if not t.startswith(("http://", "https://", "mailto:"))]
    missing = [t for t in local if not (file.parent / t).exists()]
    assert not missing
