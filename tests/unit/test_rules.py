"""Rules of the whole package: what may name the accelerator, how long functions are, what importing costs."""

import ast
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from places import PACKAGE

MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "_modidx.py")
DEVICE_ROOMS = ("npu",)
LIGHT = [
    "cookbook_npu",
    *(
        f"cookbook_npu.{m}"
        for m in (
            "errors",
            "config",
            "presets",
            "npu.device",
            "cli",
            "data.sample",
            "data.prompts",
            "data.tasks",
            "cluster.ray_cluster",
            "runs.folder",
            "npu.stack.stacks",
            "npu.stack.machine",
            "npu.stack.checks",
            "npu.stack.settings",
            "npu.stack.doctor",
            "plan.plan",
            "plan.preflight",
        )
    ),
]

HEAVY = ("torch", "torch_npu", "ray", "transformers", "megatron", "vllm")


def functions(path: Path):
    "(name, node, lines without the docstring) of every function of a module"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            yield node.name, node, (node.end_lineno - body[0].lineno + 1) if body else 1


def test_there_are_modules():
    assert len(MODULES) > 30


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_device_rooms_name_the_accelerator(path):
    if path.relative_to(PACKAGE).parts[0] in DEVICE_ROOMS:
        return
    found = re.findall(r"torch\.(?:cuda|npu)\b", path.read_text())
    assert not found, f"{path} names {found[0]}: ask cookbook_npu.npu.device instead"


def test_functions_are_small():
    sizes = [
        (lines, f"{p.relative_to(PACKAGE)}:{name}")
        for p in MODULES
        for name, _, lines in functions(p)
    ]
    assert max(sizes)[0] <= 60, f"too long: {sorted(sizes)[-3:]}"
    assert statistics.median(s for s, _ in sizes) <= 8


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_public_parameters_are_annotated(path):
    for name, node, _ in functions(path):
        if name.startswith("_"):
            continue
        args = [
            a
            for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            if a.arg not in ("self", "cls")
        ]
        bare = [a.arg for a in args if a.annotation is None]
        assert not bare, f"{name}({', '.join(bare)}) lacks annotations"


def broad(handler: ast.ExceptHandler) -> bool:
    "Catches everything and does not hand it on"
    names = (
        {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)}
        if handler.type
        else {"Exception"}
    )
    return bool(names & {"BaseException", "Exception"}) and not any(
        isinstance(n, ast.Raise) for n in ast.walk(handler)
    )


def test_nothing_is_swallowed():
    handlers = [
        (p, n)
        for p in MODULES
        for n in ast.walk(ast.parse(p.read_text()))
        if isinstance(n, ast.ExceptHandler)
    ]
    assert not [f"{p.relative_to(PACKAGE)}:{n.lineno}" for p, n in handlers if broad(n)]


def test_light_modules_import_without_torch_in_a_second():
    code = (
        "import sys, time; began = time.perf_counter(); import cookbook_npu; took = time.perf_counter() - began; "
        f"[__import__(m) for m in {LIGHT!r}]; "
        f"print(took, [m for m in {HEAVY} if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    took, heavy = out.split(" ", 1)
    assert heavy.strip() == "[]", f"importing the light modules loads {heavy}"
    assert float(took) < 1.0
