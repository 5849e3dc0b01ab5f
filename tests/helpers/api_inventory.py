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


# What the simulator offers and the wheel does not have.
OURS = {
    "set_capacity": "control of the simulation: the memory of a simulated device",
    "DeviceProperties": "the type of get_device_properties(); the wheel keeps its own in C++",
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


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
