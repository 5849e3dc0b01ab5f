"""Names of torch_npu in source text: those that we use, that the simulator offers, that a wheel has.

Nothing of a wheel is imported.
"""

import ast
import re
from functools import cache
from pathlib import Path

from places import PACKAGE

SIMULATOR = PACKAGE / "npu" / "simulator"
ROOTS = {"torch.npu": "torch_npu.npu", "torch_npu": "torch_npu"}
# Expressions that stand for torch.npu in our code; the first only in device.py.
ALIASES = ("self.module", "npu", "device_module", "torch.get_device_module(npu_type())")

# Operators that torch_npu exports although its own list of public ones lacks them; tests/wheel looks at
# the module.
OPERATORS = {"get_npu_format", "npu_fusion_attention_grad"}

# What the simulator offers and the wheel does not have.
OURS = {
    "set_capacity": "control of the simulation: the memory of a simulated device",
    "DeviceProperties": "the type of get_device_properties(); the wheel keeps its own in C++",
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def source(module: str, root: Path) -> Path | None:
    "File of a module of the wheel that lies unpacked in `root`"
    where = root.joinpath(*module.split("."))
    return next(
        (
            path
            for path in (where / "__init__.py", where.with_suffix(".py"))
            if path.is_file()
        ),
        None,
    )


def listed(path: Path, variable: str) -> list[str]:
    "The strings in an assignment such as __all__, or the keys where it is a dictionary"
    if not path.is_file():
        return []
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == variable for t in node.targets
        ):
            value = ast.literal_eval(node.value)
            return list(value)
    return []


def bound(node: ast.stmt, package: str, root: Path) -> set[str]:
    "Names that a statement of a module defines"
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {
            n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)
        }
    if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
        return offered(f"{package}.{node.module}" if node.level else node.module, root)
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return {
        name
        for part in ast.iter_child_nodes(node)
        if isinstance(part, ast.stmt)
        for name in bound(part, package, root)
    }


@cache
def offered(module: str, root: Path) -> frozenset[str]:
    "Names of a module of the wheel"
    path = source(module, root)
    if path is None:
        return frozenset()
    names = set(listed(path, "__all__")).union(
        *(bound(node, module, root) for node in tree(path).body)
    )
    if path.name == "__init__.py":
        names |= {p.stem for p in path.parent.glob("*.py")} | {
            p.parent.name for p in path.parent.glob("*/__init__.py")
        }
    if module == "torch_npu":  # what its start adds
        names |= set(
            listed(root / "torch_npu/utils/exposed_api.py", "public_npu_functions")
        )
        names |= set(
            listed(root / "torch_npu/_init/core/_exports.py", "_LAZY_PYTHON_SYMBOLS")
        )
        names |= OPERATORS
    return frozenset(names)


def exists(name: str, root: Path) -> bool:
    "Whether a dotted name leads somewhere, as far as modules go; what lies in classes is not looked at"
    module, parts = "torch_npu", name.split(".")[1:]
    for part in parts:
        if part not in offered(module, root):
            return False
        module = f"{module}.{part}"
        if source(module, root) is None:
            return True
    return True


def used(path: Path) -> set[str]:
    "Names below torch_npu in the code of a file: attributes, and strings that are such a name"
    found, elsewhere = set(), foreign(path)
    for node in ast.walk(tree(path)):
        text = (
            node.value
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            else None
        )
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            for alias in ALIASES if path.name == "device.py" else ALIASES[1:]:
                if alias not in elsewhere and text.startswith(f"{alias}."):
                    text = text.replace(alias, "torch.npu", 1)
        for root, real in ROOTS.items():
            if isinstance(node, ast.Attribute) and root in elsewhere:
                continue
            if text and re.fullmatch(rf"{re.escape(root)}(\.[A-Za-z_]\w*)+", text):
                found.add(real + text[len(root) :])
    # What lies in C++ cannot be read here; tests/wheel asks the imported module.
    return {
        name
        for name in found
        if name != "torch_npu.__simulated__" and not name.startswith("torch_npu._C.")
    }


def foreign(path: Path) -> set[str]:
    """Our short names for torch.npu that mean something else in a file: imported from another project,
    or a variable of text
    """
    imported = {
        a.asname or a.name
        for n in ast.walk(tree(path))
        if isinstance(n, ast.ImportFrom)
        for a in n.names
    }
    given = {
        a.arg
        for n in ast.walk(tree(path))
        if isinstance(n, ast.FunctionDef)
        for a in n.args.args
    }
    stored = {
        n.id
        for n in ast.walk(tree(path))
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    torch = "torch" in {
        a.name for n in ast.walk(tree(path)) if isinstance(n, ast.Import) for a in n.names
    }
    return imported | (set() if torch else given | stored | {"torch_npu"})


def sources() -> list[Path]:
    return [
        p
        for p in PACKAGE.rglob("*.py")
        if p.name != "_modidx.py" and "simulator" not in p.relative_to(PACKAGE).parts
    ]


NAMES = sorted(set().union(*map(used, sources())))


def simulated() -> dict[str, list[str]]:
    "Names that the simulator offers, by module of torch_npu"
    npu = listed(SIMULATOR / "runtime.py", "__all__")
    fused = listed(SIMULATOR / "fused.py", "__all__")
    return {"torch_npu.npu": [name for name in npu if name not in OURS], "torch_npu": fused}
