"""The documentation site: `make docs`, or `python .docs/make_site.py --help`

Notebooks whose results are missing are executed first, by their tests. Warnings and dead links are errors,
and so is what a browser shows that is cut, or complains of (where Chromium is installed).
"""

import argparse
import posixpath
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import look
import search
from reference import Module, modules
from sphinx.util.inventory import InventoryFile
from stage import ROOT, llms_text, not_executed, stage

SITE = ROOT / "build" / "docs"
PAGES = ROOT / "build" / "html"


class Anchors(HTMLParser):
    "The links of a page and what others can link to"

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        "Called for each element"
        given = dict(attrs)
        self.ids |= {value for value in (given.get("id"), given.get("name")) if value}
        for name in ("href", "src"):
            value = given.get(name)
            if value:
                self.links.append(value)


def dead_links(output: Path) -> list[str]:
    "Links inside the site that lead nowhere: `page: link`"
    pages = {}
    for path in sorted(output.rglob("*.html")):
        pages[path] = Anchors()
        pages[path].feed(path.read_text(encoding="utf-8"))
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            known = pages[target].ids if target in pages else None
            missing = (
                anchor not in ("", "top") and known is not None and anchor not in known
            )
            if missing or not target.exists():
                dead.append(f"{path.relative_to(output)}: {link}")
    return dead


def missing_names(inventory: Path, modules: list[Module]) -> list[str]:
    "Public names that the inventory of the site does not hold"
    with inventory.open("rb") as file:
        objects = InventoryFile.load(file, "", posixpath.join)
    held = {name for kind, found in objects.items() if kind[:3] == "py:" for name in found}
    public = [f"{module.name}.{name}" for module in modules for name in module.names]
    return [name for name in public if name not in held]


def execute(missing: list[Path], workers: str) -> None:
    "Run notebooks as their tests; each leaves its executed copy"
    file = "tests/notebooks/test_notebooks.py"
    names = [str(path.relative_to(ROOT / "nbs")) for path in missing]
    own = [name for name in names if name.startswith("contrib/")]
    tests = [f"{file}::test_notebook[{name}]" for name in names if name not in own]
    tests += ["tests/contrib/test_contrib_notebooks.py"] if own else []
    print(f"executing {len(tests)} notebooks")
    command = [sys.executable, "-m", "pytest", "-n", workers, *tests]
    subprocess.run(command, cwd=ROOT, check=True)


def staged_names() -> set[Path]:
    "The pages that Sphinx would read"
    return {path for path in SITE.rglob("*") if path.suffix in (".md", ".ipynb")}


def sphinx(builder: str, output: Path) -> None:
    "Run Sphinx; a warning is an error"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", builder]
    command += ["-d", str(ROOT / "build" / "doctrees")]
    subprocess.run([*command, "-c", ".docs", SITE, output], cwd=ROOT, check=True)


def publish(output: Path) -> None:
    "Put the finished site in its place"
    if output.exists():
        shutil.rmtree(output)
    left_out = shutil.ignore_patterns(".buildinfo*", "_sources")
    shutil.copytree(PAGES, output, ignore=left_out)
    search.write_texts(output)
    (output / "llms.txt").write_text(llms_text(), encoding="utf-8")


def main() -> int:
    "Build the site; 1 when something in it leads nowhere or is missing"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--no-execute", action="store_true", help="mark pages without results instead"
    )
    parser.add_argument("--workers", default="2", help="processes that execute notebooks")
    parser.add_argument("--output", type=Path, default=ROOT / "_docs")
    parser.add_argument(
        "--external", action="store_true", help="also ask every other site that is linked"
    )
    given = parser.parse_args()
    if not given.no_execute and not_executed():
        execute(not_executed(), given.workers)
    before = staged_names()
    stage(SITE)
    if staged_names() != before:  # every page has the list of pages beside it
        for folder in (PAGES.parent / "doctrees", PAGES):
            shutil.rmtree(folder, ignore_errors=True)
    sphinx("html", PAGES)
    publish(given.output)
    if given.external:
        sphinx("linkcheck", ROOT / "build" / "linkcheck")
    wrong = [f"dead link in {link}" for link in dead_links(given.output)]
    names = missing_names(given.output / "objects.inv", modules())
    wrong += [f"{name} has no entry in objects.inv" for name in names]
    if look.missing_browser():
        print(f"the pages were not looked at: {look.missing_browser()}")
    else:
        wrong += look.problems(given.output)
    print("\n".join(wrong) or f"open {given.output / 'index.html'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
