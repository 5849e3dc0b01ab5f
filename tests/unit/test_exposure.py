"""What a run trusts: no code that comes with a model."""

import ast

from places import PACKAGE, ROOT

SOURCES = sorted(PACKAGE.rglob("*.py"))
LOADERS = ("from_pretrained", "from_config")


def loads(tree: ast.Module):
    "Calls of the automatic classes of transformers, which may run a model's own code"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        is_auto = isinstance(owner, ast.Name) and owner.id.startswith("Auto")
        if is_auto and node.func.attr in LOADERS:
            yield node


def test_a_model_never_brings_code():
    "Left out, transformers asks in a terminal, and a run that nobody watches waits for the answer"
    found = 0
    for path in SOURCES:
        for node in loads(ast.parse(path.read_text())):
            found += 1
            said = {k.arg: ast.unparse(k.value) for k in node.keywords}
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            assert said.get("trust_remote_code") == "False", where
    assert found >= 8


def test_a_vllm_engine_brings_no_code_either():
    text = (PACKAGE / "rollout" / "vllm.py").read_text()
    assert '"trust_remote_code": False' in text
