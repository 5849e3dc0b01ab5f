"""Is what is generated in step with the notebooks? `python tests/drift.py [--write]`

Exports every notebook into a copy of the package and compares bytes; converts nbs/index.ipynb and
compares README.md; checks that committed notebooks carry no outputs, but for the recipes.
"""

import ast
import filecmp
import io
import re
import shutil
import subprocess
import sys
import tempfile
import token
import tokenize
from pathlib import Path
from posixpath import normpath

import nbformat
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import RegexRemovePreprocessor

ROOT = Path(__file__).resolve().parent.parent
HAND_WRITTEN = (
    "algorithms.toml",
    "expected.toml",
    "model/tiny_models",
    "names.toml",
    "npu/simulator/csrc",
    "npu/stack/checks.toml",
    "npu/stack/compatibility.toml",
    "npu/stack/stacks",
    "plan/models.json",
    "plan/published_runs.toml",
    "py.typed",
    "reported.toml",
    "runs/templates",
)


def use_relative_imports(package: Path) -> None:
    "Make all imports of the package relative; nbdev does so for one-line imports at the top level"
    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        depth = "." * len(file.relative_to(package).parts)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "cookbook_npu."
            ):
                line = lines[node.lineno - 1]
                lines[node.lineno - 1] = line.replace(
                    "from cookbook_npu.", f"from {depth}", 1
                )
        if "".join(lines) != text:
            file.write_text("".join(lines), encoding="utf-8")


# tokens of strings; from Python 3.12 on the text of an f-string has one of its own
TEXT = {token.STRING, getattr(token, "FSTRING_MIDDLE", token.STRING)}


def patched_class(node: ast.stmt) -> str | None:
    "The class that a function with fastcore's `@patch` is a method of"
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    for decorator in node.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(call, ast.Name) and call.id == "patch":
            return ast.unparse(node.args.args[0].annotation).strip("\"'")
    return None


def as_method(lines: list[str], node: ast.FunctionDef) -> str:
    "Source of a function with `@patch`, as a method in the body of its class"
    last = node.end_lineno
    source = io.StringIO(
        "".join([*["\n"] * (node.lineno - 1), *lines[node.lineno - 1 : last]])
    )
    fixed: set[int] = set()  # lines that begin inside a string
    for word in tokenize.generate_tokens(source.readline):
        if word.type in TEXT:
            fixed |= set(range(word.start[0] + 1, word.end[0] + 1))
    if ast.get_docstring(node) is not None:
        doc = node.body[0]
        fixed -= set(range(doc.lineno, doc.end_lineno + 1))
    out = []
    for decorator in node.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        if not (isinstance(call, ast.Name) and call.id == "patch"):
            out.append(f"    @{ast.unparse(decorator)}\n")
        elif isinstance(decorator, ast.Call):
            kind = {"as_prop": "property", "cls_method": "classmethod", "set_prop": None}
            (option,) = [k.arg for k in decorator.keywords]
            out.append(f"    @{kind[option]}\n")
    annotation = node.args.args[0].annotation
    for number in range(node.lineno, node.end_lineno + 1):
        line = lines[number - 1]
        if number == annotation.lineno:
            before = line.encode()[: annotation.col_offset].decode()
            line = before.rstrip(": ") + line.encode()[annotation.end_col_offset :].decode()
        out.append(line if number in fixed or not line.strip() else "    " + line)
    return "".join(out)


def put_methods_into_classes(file: Path) -> None:
    "Move what a notebook adds to a class with `@patch`, cell by cell, into the body of the class"
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    methods = [(name, n) for n in tree.body if (name := patched_class(n))]
    if not methods:
        return
    lines = text.splitlines(keepends=True)
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    added: dict[str, str] = {}
    gone: set[int] = set()
    for name, node in methods:
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        while lines[first - 2].startswith("#") and not lines[first - 2].startswith("# %%"):
            first -= 1
        comment = "".join(
            "    " + line for line in lines[first - 1 : node.lineno] if line.startswith("#")
        )
        added[name] = added.get(name, "") + "\n" + comment + as_method(lines, node)
        gone |= set(range(first, node.end_lineno + 1))
    ends = {classes[name].end_lineno: body for name, body in added.items()}
    kept = "".join(
        ("" if number in gone else line) + ends.get(number, "")
        for number, line in enumerate(lines, 1)
    )
    kept = re.sub(r"^from fastcore\.basics import patch\n", "", kept, flags=re.M)
    # a cell that is empty now keeps no marker
    kept = re.sub(r"(?:^# %% [^\n]*\n\s*)+(?=^# %% |\Z)", "", kept, flags=re.M)
    kept = re.sub(r"\n{4,}", "\n\n\n", kept)
    file.write_text(kept.rstrip("\n") + "\n", encoding="utf-8")


def finish(package: Path) -> None:
    "What nbdev's export leaves to do: relative imports, and methods inside their classes"
    use_relative_imports(package)
    for file in package.rglob("*.py"):
        if file.name != "_modidx.py":
            put_methods_into_classes(file)


def exported(folder: Path) -> Path:
    "Export the notebooks into a copy of the package without generated files; returns the package folder"
    shutil.copytree(
        ROOT / "nbs", folder / "nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints")
    )
    shutil.copy(ROOT / "settings.ini", folder)
    package = folder / "cookbook_npu"
    package.mkdir()
    for written in (ROOT / "cookbook_npu").rglob("__init__.py"):  # what a room holds
        if text := written.read_text("utf-8"):
            copy = package / written.relative_to(ROOT / "cookbook_npu")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, "utf-8")
    for part in HAND_WRITTEN:
        source = ROOT / "cookbook_npu" / part
        (package / part).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, package / part)
        elif source.is_file():
            shutil.copy(source, package / part)
    subprocess.run(
        [sys.executable, "-c", "from nbdev.doclinks import nbdev_export; nbdev_export()"],
        cwd=folder,
        check=True,
    )
    finish(package)
    return package


def files(package: Path) -> set[str]:
    "Relative paths of the package's sources"
    skip = {"__pycache__"}
    return {
        str(p.relative_to(package))
        for p in package.rglob("*")
        if p.is_file() and not skip & set(p.parts) and p.name != "_modidx.py"
    }


def package_drift() -> list[str]:
    "Sources that differ from what the notebooks export"
    with tempfile.TemporaryDirectory() as tmp:
        fresh, here = exported(Path(tmp)), ROOT / "cookbook_npu"
        both = files(fresh) | files(here)
        same = [f for f in both if (fresh / f).is_file() and (here / f).is_file()]
        differ = {f for f in same if not filecmp.cmp(fresh / f, here / f, shallow=False)}
        return [f"cookbook_npu/{f}" for f in sorted(differ | (both - set(same)))]


def readme() -> str:
    "README.md as nbs/index.ipynb gives it"
    exporter = MarkdownExporter()
    exporter.register_preprocessor(
        RegexRemovePreprocessor(patterns=[r"\A#\|\s*hide"]), enabled=True
    )
    body, _ = exporter.from_filename(str(ROOT / "nbs" / "index.ipynb"))
    # Links are written for nbs/, where the notebook lies; README.md lies one folder up.
    return (
        re.sub(
            r"\]\((?!https?:|#)([^)]+)\)",
            lambda m: f"]({normpath('nbs/' + m[1])})",
            body.strip(),
        )
        + "\n"
    )


def with_outputs() -> list[str]:
    "Committed notebooks that carry outputs; tests/unit/test_recorded.py looks at those of recipes"
    found = [p for p in sorted(ROOT.glob("nbs/**/*.ipynb")) if "checkpoint" not in p.name]
    cells = {p: nbformat.read(p, as_version=4).cells for p in found}
    return [
        str(p.relative_to(ROOT))
        for p, cs in cells.items()
        if any(c.get("outputs") or c.get("execution_count") for c in cs)
    ]


def main() -> int:
    "Write what nbdev leaves to do, or print what drifted; 1 if anything did"
    if "--write" in sys.argv:
        finish(ROOT / "cookbook_npu")
        (ROOT / "README.md").write_text(readme(), encoding="utf-8")
        return 0
    wrong = {
        "differs from its notebook (run `make export`)": package_drift(),
        "differs from nbs/index.ipynb (run `make export`)": []
        if (ROOT / "README.md").read_text(encoding="utf-8") == readme()
        else ["README.md"],
        "carries outputs (clear them: jupyter nbconvert --clear-output --inplace)": with_outputs(),
    }
    for why, names in wrong.items():
        for name in names:
            print(f"drift: {name} {why}")
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
