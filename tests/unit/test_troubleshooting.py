"""The troubleshooting page quotes messages as the package prints them."""

import ast
import re

import pytest
from places import ROOT

pytestmark = pytest.mark.lane("docs")

PAGES = [ROOT / ".docs" / "pages" / "howto" / "troubleshooting.md"]
PAGES += [ROOT / ".docs" / "pages" / "zh" / "troubleshooting.md"]
BLOCK = re.compile(r"^```text\n(.*?)^```$", re.M | re.S)
HOLE = "\0"  # a value that is formatted into a message
LEAST = 12  # letters that a message must share with the source


def texts_of(scope: ast.AST) -> dict[str, ast.expr]:
    "Names that hold one text: a remedy may be written once for several errors"
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, []).append(node.value)
    texts = {name: found[0] for name, found in values.items() if len(found) == 1}
    return {n: v for n, v in texts.items() if isinstance(v, ast.JoinedStr | ast.Constant)}


def template(node: ast.expr, known: dict[str, ast.expr]) -> str | None:
    "A text with a hole for each value; None: it is no text"
    if isinstance(node, ast.Name) and node.id in known:
        return template(known[node.id], {})
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = []
        for part in node.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            parts.append(template(inner, known) or HOLE)
        return "".join(parts)
    return None


def templates() -> set[str]:
    "Every text of the package, and `what. remedy` of every error"
    found = set()
    for file in (ROOT / "cookbook_npu").rglob("*.py"):
        tree = ast.parse(file.read_text())
        outside = texts_of(tree)
        scopes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        for scope in [*scopes, tree]:
            known = outside | texts_of(scope)
            for node in ast.walk(scope):
                found.add(template(node, {}) if isinstance(node, ast.expr) else None)
                if isinstance(node, ast.Call) and len(node.args) == 2:
                    what, remedy = (template(arg, known) or HOLE for arg in node.args)
                    found.add(f"{what}. {remedy}")
    return {text for text in found if text and len(re.findall("[a-z]", text)) >= LEAST}


@pytest.fixture(scope="module")
def printed() -> list[re.Pattern]:
    return [
        re.compile(".*".join(map(re.escape, text.strip().split(HOLE))), re.S)
        for text in templates()
    ]


def quotes() -> list[str]:
    "The messages of the page, one a line"
    return [
        line for text in BLOCK.findall(PAGES[0].read_text()) for line in text.splitlines()
    ]


@pytest.mark.parametrize("line", quotes(), ids=lambda line: line[:50])
def test_a_quoted_message_stands_in_the_source(line, printed):
    "`<...>` is a value of the reader's run"
    assert any(pattern.fullmatch(line) for pattern in printed)
