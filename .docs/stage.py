"""The pages of the site, as Sphinx reads them, in one folder

`make test` leaves the executed copy of every notebook that passed in build/executed; recipes carry the
outputs of a recorded run. Nothing that ran on this machine otherwise is shown.
"""

import json
import re
import shutil
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import drawing
import plans
import reference
import typer
from reference import code, table

from cookbook_npu.cli import app
from cookbook_npu.config import config_keys
from cookbook_npu.runs.report import RESULT_TYPE

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
EXECUTED = ROOT / "build" / "executed"
# subpackage -> its title; the order is that of a reader, from what is run down to what it stands on
SUBPACKAGES = {
    "train": "Training loop",
    "policy": "The trained policy",
    "rl": "Reinforcement learning",
    "data": "Data and rewards",
    "rollout": "Rollout engines",
    "weights": "Weight update",
    "model": "Model",
    "runs": "During and after a run",
    "plan": "Before a run",
    "config": "Configuration",
    "cluster": "Cluster",
    "targets": "Targets: laptop, accelerators",
    "contrib": "Contributed adapters",
}
SHIMS = "torch transformer_engine megatron_core mindspeed".split()
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
Notebook = dict[str, Any]


# ---- notebooks


def read(path: Path) -> Notebook:
    "A notebook as JSON"
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell: dict[str, Any]) -> str:
    "The text of a cell"
    return "".join(cell["source"])


def sources(notebook: Notebook) -> list[str]:
    "The text of each cell, but of what papermill put in"
    tags = [cell["metadata"].get("tags", []) for cell in notebook["cells"]]
    cells = zip(notebook["cells"], tags, strict=True)
    return [source(cell) for cell, own in cells if "injected-parameters" not in own]


def executed_copy(notebook: Path) -> Path | None:
    "The executed copy of a notebook, if there is one of the same cells"
    copy = EXECUTED / notebook.relative_to(ROOT)
    if copy.is_file() and sources(read(copy)) == sources(read(notebook)):
        return copy
    return None


def visible(cell: dict[str, Any]) -> bool:
    "A reader sees the cell: it has more than directives and is not hidden"
    lines = source(cell).splitlines()
    hidden = any(re.match(r"#\|\s*hide\b", line) for line in lines)
    return not hidden and any(line.strip() and line[:2] != "#|" for line in lines)


def note(kind: str, text: str) -> dict[str, Any]:
    "A cell that says something about the page"
    return {
        "cell_type": "markdown",
        "metadata": {},
        "source": f":::{{{kind}}}\n{text}\n:::",
    }


# folders of the repository, which the site has not: they are named
NO_PAGE = re.compile(
    r"\[([^]]+)\]\((?:\.\./)+(?:tests/README\.md|LICENSE|cookbook_npu/[^).]+)\)"
)


# what the repository shows in place of a page that only the site has
ONLY_ON_THE_SITE = {
    ".github/CONTRIBUTING.md": "contributing.md",
    ".github/README_zh.md": "zh/readme.md",
    "cookbook_npu": "reference/api/index.md",
    "cookbook_npu/cli.py": "reference/commands.md",
    "cookbook_npu/config/sections.py": "reference/configuration.md",
    "nbs": "modules/index.md",
}


def site_links(text: str) -> str:
    "Prose whose links to what only the repository shows lead to the pages of the site"
    for path, page in ONLY_ON_THE_SITE.items():
        text = re.sub(rf"\]\(((?:\.\./)+){re.escape(path)}\)", rf"](\1{page})", text)
    return NO_PAGE.sub(r"`\1`", text)


def on_the_site(text: str) -> str:
    "The prose of a notebook, which is in the same folder on the site"
    text = site_links(text)
    return re.sub(r"\]\(((?:\.\./)+)\.docs/pages/", r"](\1", text)


def page_on_the_site(
    text: str,  # of a page
    depth: int = 1,  # folders between the front page and it
) -> str:
    "The prose of a page that the repository has two folders deeper down than the site"
    for name in TRANSLATED:
        text = text.replace(f"]({name}.md)", f"]({name}.ipynb)")
    text = site_links(text)
    return re.sub(rf"\]\((?:\.\./){{{depth + 2}}}", "](" + "../" * depth, text)


WARNED = re.compile(r"^\S+\.py:\d+: \w*Warning: .*\n(?:[ \t]+.*\n)?", re.MULTILINE)
ENVIRONMENT = re.compile(r"(?:/[\w.+-]+)+/(?=(?:\.venv|cookbook_npu)/)")


def of_no_machine(lines: str | list[str]) -> list[str]:
    "What a program printed, without Python's warnings and without the folder of a checkout"
    kept = WARNED.sub("", "".join(lines)).replace(f"{ROOT}/", "")
    return ENVIRONMENT.sub("", kept).splitlines(keepends=True)


def clean_output(output: dict[str, Any]) -> None:
    "The same for an output of a cell"
    if "text" in output:
        output["text"] = of_no_machine(output["text"])
    data = output.get("data", {})
    if "text/plain" in data:
        data["text/plain"] = of_no_machine(data["text/plain"])


def shown_notebook(path: Path, remark: tuple[str, str] | None) -> Notebook:
    "A notebook as a page: without what only nbdev reads, without what programs print to stderr"
    notebook = read(path)
    cells = [cell for cell in notebook["cells"] if visible(cell)]
    for cell in cells:
        lines = source(cell).splitlines(keepends=True)
        cell["source"] = "".join(line for line in lines if not line.startswith("#|"))
        if cell["cell_type"] == "markdown":
            cell["source"] = on_the_site(cell["source"])
        cell.pop("id", None)
        cell["metadata"] = {}
        if cell["cell_type"] == "code":
            outputs = cell.get("outputs", [])
            cell["outputs"] = [o for o in outputs if o.get("name") != "stderr"]
            for output in cell["outputs"]:
                # a record for programs; its text beside it is for readers
                output.get("data", {}).pop(RESULT_TYPE, None)
                clean_output(output)
            cell["execution_count"] = None
    if remark:
        cells.insert(1, note(*remark))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}


def has_code(notebook: Path) -> bool:
    "There is something to execute whose results a reader would see"
    cells = read(notebook)["cells"]
    return any(cell["cell_type"] == "code" and visible(cell) for cell in cells)


NOT_EXECUTED = (
    "This page was **not executed** when the site was built: it shows no results."
)


def copy_to_show(notebook: Path) -> tuple[Path, tuple[str, str] | None]:
    "The copy of a notebook or a recipe that has results, and what has to be said of it"
    if notebook.parent.name == "recipes":
        return notebook, ("note", read(notebook)["metadata"]["recorded"]["where"])
    copy = executed_copy(notebook)
    if copy or not has_code(notebook):
        return copy or notebook, None
    return notebook, ("warning", NOT_EXECUTED)


def notebook_page(notebook: Path) -> Notebook:
    "The page of a notebook or a recipe"
    return shown_notebook(*copy_to_show(notebook))


# ---- pages in Chinese

ZH = HERE / "pages" / "zh"
MARK = "<!-- code -->"
# page -> the notebook whose code cells and results it shows
TRANSLATED = {
    "qwen3_4b_colocate": "recipes/qwen3_4b_colocate.ipynb",
    "grpo_from_scratch": "nbs/tutorials/grpo_from_scratch.ipynb",
    "first_hour_910b": "nbs/tutorials/first_hour_910b.ipynb",
    "on_910b": "nbs/tutorials/on_910b.ipynb",
    "modelarts": "nbs/tutorials/modelarts.ipynb",
}


def translated(
    page: Path,  # prose in another language, with a mark for each run of code cells
    notebook: Notebook,  # as it is shown
) -> Notebook:  # prose of the page, code and results of the notebook
    "A page in another language; raises `ValueError` when the marks are not as many"
    kinds = groupby(notebook["cells"], key=lambda cell: cell["cell_type"])
    runs = [list(cells) for kind, cells in kinds if kind == "code"]
    prose = page_on_the_site(page.read_text(encoding="utf-8")).split(MARK)
    if len(prose) != len(runs) + 1:
        raise ValueError(
            f"{page.name} has {len(prose) - 1} marks for {len(runs)} runs of code cells"
        )
    cells = []
    for text, code_cells in zip_longest(prose, runs, fillvalue=[]):
        if text.strip():
            cells.append({"cell_type": "markdown", "metadata": {}, "source": text.strip()})
        cells += code_cells
    return notebook | {"cells": cells}


def translated_pages() -> dict[str, str]:
    "The pages in Chinese: file name -> text"
    pages = {}
    for name, source in TRANSLATED.items():
        copy, remark = copy_to_show(ROOT / source)
        page = translated(ZH / f"{name}.md", shown_notebook(copy, None))
        if remark:
            kind, text = remark
            text = text.replace(NOT_EXECUTED, "建站时本页**没有执行**，因此没有结果。")
            page["cells"].insert(1, note(kind, text))
        pages[f"zh/{name}.ipynb"] = json.dumps(page, indent=1)
    return pages


def notebooks() -> list[Path]:
    "Every notebook that is a page"
    found = [*ROOT.glob("nbs/**/*.ipynb"), *ROOT.glob("recipes/*.ipynb")]
    return sorted(p for p in found if ".ipynb_checkpoints" not in p.parts)


def not_executed() -> list[Path]:
    "Notebooks under nbs/ whose results are missing or belong to other cells"
    found = [p for p in notebooks() if p.parent.name != "recipes" and has_code(p)]
    return [p for p in found if executed_copy(p) is None]


def linked_files(notebook: Path) -> list[Path]:
    "Files of the repository that a notebook links to and that are no pages: they become downloads"
    prose = [source(c) for c in read(notebook)["cells"] if c["cell_type"] == "markdown"]
    shown = [on_the_site(text) for text in prose]
    targets = [notebook.parent / t for text in shown for t in LINK.findall(text)]
    files = [target.resolve() for target in targets if target.is_file()]
    return [f for f in files if f.suffix != ".ipynb" and f.is_relative_to(ROOT)]


# ---- pages without a notebook


def configuration_page() -> str:
    "Every configuration key, from where `cookbook-npu config` has them"
    keys = list(config_keys())
    lines = ["# Configuration keys", ""]
    lines += [f"{len(keys)} keys. Any of them goes into a recipe's `overrides`:", ""]
    lines += ["```bash", "cookbook-npu run qwen3_4b_colocate -p overrides \\"]
    lines += ["""  '{"optim.clip_grad": 0.5}'""", "```", ""]
    lines += ["**Basic** keys are what a first run changes. The same list in a terminal: "]
    lines += ["`cookbook-npu config --all`.", ""]
    sections: dict[str, list[list[str]]] = {}
    for key in keys:
        section = key.name.rpartition(".")[0]
        meaning = re.sub(r"([\\*_{}\[\]<>$#|~^])", r"\\\1", key.meaning)
        row = [f"`{key.name}`", code(str(key.default)), key.tier, meaning]
        sections.setdefault(section, []).append(row)
    for section, rows in sections.items():
        lines += [f"## {section or 'The run'}", ""]
        lines += table(["key", "default", "tier", "meaning"], rows)
    return "\n".join(lines) + "\n"


def option_rows(command: Any) -> list[list[str]]:
    "Arguments and options of a command"
    context = typer.Context(command)
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        name, meaning = record or (parameter.human_readable_name, "")
        given = getattr(parameter, "help", None) or meaning
        given = re.sub(r"([\\*_{}<>$#|~^])", r"\\\1", given)
        rows.append([code(name), given])
    return rows


def commands_page() -> str:
    "Every command with its arguments and options"
    group: Any = typer.main.get_command(app)
    lines = ["# Commands", "", "`cookbook-npu COMMAND --help` says the same.", ""]
    for name, command in sorted(group.commands.items()):
        usage = " ".join(command.collect_usage_pieces(typer.Context(command)))
        lines += [f"## {name}", "", (command.help or "").strip(), ""]
        lines += ["```text", f"cookbook-npu {name} {usage}", "```", ""]
        lines += table(["argument or option", "meaning"], option_rows(command))
        if command.epilog:
            lines += [command.epilog, ""]
    return "\n".join(lines) + "\n"


def chapter(title: str, about: str, entries: list[str]) -> str:
    "A page that lists pages; a table of them replaces the list"
    lines = [f"# {title}", "", about, "", "```{toctree}", ":glob:", ":maxdepth: 1"]
    lines += [":hidden:"] if "| --- |" in about else []
    return "\n".join([*lines, *entries, "```", ""])


def api_entry(page: str) -> str:
    "A module in the list of the API: with places to break the line"
    breakable = page.replace(".", ".\u200b")  # a space of no width
    return f"{breakable} <cookbook_npu.{page}>"


def api_index(names: list[str]) -> str:
    "The list of all modules, by subpackage"
    lines = [
        "# API",
        "",
        "Every public name: signature, parameters, what it returns and raises.",
        "",
    ]
    entries = [
        name.removeprefix("cookbook_npu.") for name in names if name != "cookbook_npu"
    ]
    groups: dict[str, list[str]] = {}
    for name in entries:
        first = name.partition(".")[0] if "." in name else ""
        groups.setdefault(first, []).append(name)
    for first in ["", *[name for name in SUBPACKAGES if name in groups], "npu"]:
        title = SUBPACKAGES.get(
            first, "NPU" if first else "Package, configuration, command"
        )
        lines += [f"## {title}", "", "```{toctree}", ":maxdepth: 1"]
        lines += [] if first else ["cookbook_npu"]
        lines += [api_entry(name) for name in groups[first]] + ["```", ""]
    return "\n".join(lines)


def written_pages() -> dict[str, str]:
    "The pages that are written by hand: file name -> text"
    root = HERE / "pages"
    pages = {}
    for page in root.rglob("*.md"):
        if not (page.parent == ZH and page.stem in TRANSLATED):
            text = page.read_text(encoding="utf-8")
            name = page.relative_to(root)
            pages[str(name)] = page_on_the_site(text, len(name.parts) - 1)
    return pages


def front_page(text: str) -> str:
    "The front page with its table of plans"
    part = plans.page_part()
    return text.replace("<!-- plans -->", f"```{{raw}} html\n{part}\n```")


def contributing_page() -> str:
    "CONTRIBUTING.md, as a page of the site"
    text = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    # files that are no pages are named
    text = re.sub(r"\[([^]]+)\]\(\.\./(?:tests/[^)]+|LICENSE)\)", r"`\1`", text)
    return text.replace("](../.docs/pages/", "](").replace("](../", "](")


def readme_zh_page() -> str:
    "The README in Chinese, as a page beside the other Chinese ones"
    text = (ROOT / ".github" / "README_zh.md").read_text(encoding="utf-8")
    text = text.replace("](../README.md)", "](../nbs/index.ipynb)")
    text = text.replace("](CONTRIBUTING.md)", "](../contributing.md)")
    text = text.replace("](../.docs/pages/zh/", "](").replace("](../.docs/pages/", "](../")
    for name in TRANSLATED:
        text = text.replace(f"]({name}.md)", f"]({name}.ipynb)")
    return text


def chapter_pages() -> dict[str, str]:
    "The pages between the front page and the notebooks: file name -> text"
    folders = [p.name for p in sorted((ROOT / "nbs").iterdir()) if p.is_dir()]
    others = [name for name in folders if name not in ("npu", "tutorials", "howto")]
    names = [name for name in SUBPACKAGES if name in others]
    names += [name for name in others if name not in SUBPACKAGES and name[0] != "."]
    pages = {}
    for name in names:
        about = f"Notebooks of `cookbook_npu.{name}`: each explains, defines and tests one module."
        about += f"\n{drawing.contents(name)}"
        pages[f"modules/{name}.md"] = chapter(
            SUBPACKAGES.get(name, name), about, [f"../nbs/{name}/*"]
        )
    about = "Each notebook explains, defines and tests one module of the package."
    pages["modules/index.md"] = chapter(
        "Modules", about, [*names, "base", "../nbs/98_command", "../nbs/99_cli"]
    )
    about = "What everything else stands on: recipes, parameters, errors."
    pages["modules/base.md"] = chapter("Recipes and errors", about, ["../nbs/0*"])
    shims = [f"../nbs/npu/shims/{name}/*" for name in SHIMS]
    listed = {
        "device": ("Device and roles", ["../nbs/npu/*"]),
        "stack": ("Stack and machine", ["../nbs/npu/stack/*"]),
        "shims": ("Shims", ["../nbs/npu/shims/*", *shims]),
        "simulator": ("Simulator", ["../nbs/npu/simulator/*"]),
    }
    for name, (title, entries) in listed.items():
        about = drawing.contents(f"npu.{name}") if name != "device" else ""
        pages[f"npu/{name}.md"] = chapter(title, about, entries)
    about = "The device, what is patched for it and why, and the simulated NPU of the laptop scale."
    pages["npu/index.md"] = chapter("NPU", about, list(listed))
    api = sorted(name.removesuffix(".md") for name in reference.pages())
    pages["reference/api/index.md"] = api_index(api)
    return pages


def source_path(page: str) -> str | None:
    "The file of the repository that a page is written in; None: it is generated"
    if page == "contributing":
        return ".github/CONTRIBUTING.md"
    for path in (f"{page}.ipynb", f".docs/pages/{page}.md"):
        if (ROOT / path).is_file():
            return path
    return None


def llms_text() -> str:
    "llms.txt: the pages that explain something, one line each (llmstxt.org)"
    index = read(ROOT / "nbs" / "index.ipynb")
    about = next(line for line in source(index["cells"][0]).splitlines() if line[:1] == ">")
    lines = ["# cookbook_npu", "", about, ""]
    pages = {name.removesuffix(".md"): text for name, text in written_pages().items()}
    pages |= {"reference/configuration": configuration_page(), "reference/commands": ""}
    for notebook in notebooks():
        page = str(notebook.relative_to(ROOT).with_suffix(""))
        pages[page] = "\n".join(sources(read(notebook))[:1])
    groups: dict[str, list[str]] = {"Start": ["index", "agents", "nbs/index"]}
    groups["How-to"] = [p for p in pages if p.startswith("howto/")]
    groups["Recipes and tutorials"] = [
        p for p in pages if re.match("recipes/|nbs/tutorials/", p)
    ]
    groups["Reference"] = [p for p in pages if p.startswith("reference/")]
    groups["Modules"] = [p for p in pages if p.startswith("nbs/") and "tutorials" not in p]
    for title, names in groups.items():
        lines += [f"## {title}", ""]
        for name in sorted(
            n for n in dict.fromkeys(names) if n != "nbs/index" or title == "Start"
        ):
            lines.append(
                f"- [{page_title(name, pages[name])}]({name}.html){page_about(pages[name])}"
            )
        lines.append("")
    return "\n".join(lines)


def page_title(name: str, text: str) -> str:
    "The heading of a page"
    found = re.search(r"^# (.+)$", text, re.M)
    return found[1] if found else name.rpartition("/")[2].capitalize()


def page_about(text: str) -> str:
    "The line below the heading of a notebook, `: ...`; empty: there is none"
    found = re.search(r"^> (.+)$", text, re.M)
    return f": {found[1]}" if found else ""


# ---- all of it


def write(path: Path, text: str) -> Path:
    "Write a page, unless it is there: Sphinx reads again what is newer"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return path


def stage(
    site: Path,  # folder of the pages, made anew where they changed
) -> None:
    "Write every page of the site"
    kept = set()
    for page in (HERE / "pages").rglob("*.svg"):
        target = site / page.relative_to(HERE / "pages")
        target.parent.mkdir(parents=True, exist_ok=True)
        kept.add(Path(shutil.copy2(page, target)))
    written = written_pages()
    texts = {
        **written,
        "contributing.md": contributing_page(),
        "zh/readme.md": readme_zh_page(),
        "index.md": front_page(written["index.md"]),
        "reference/configuration.md": configuration_page(),
        "reference/commands.md": commands_page(),
        **chapter_pages(),
        **translated_pages(),
        **{f"reference/api/{n}": text for n, text in reference.pages().items()},
    }
    for notebook in notebooks():
        page = notebook_page(notebook)
        texts[str(notebook.relative_to(ROOT))] = json.dumps(page, indent=1)
        for file in linked_files(notebook):
            texts[str(file.relative_to(ROOT))] = file.read_text(encoding="utf-8")
    kept |= {write(site / name, text) for name, text in texts.items()}
    for old in site.rglob("*"):
        if old.is_file() and old not in kept:
            old.unlink()
