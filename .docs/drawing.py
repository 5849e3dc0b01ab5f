"""The drawing at the head of each part: its modules, and which of them imports which"""

import ast
from html import escape

import reference

IN_A_ROW, SPACE, HEIGHT, GAP, PER_LETTER = 4, 14, 28, 34, 7.6


def modules_of(part: str) -> dict[str, reference.Module]:
    "The modules of a part that a notebook explains"
    every = [
        m for m in reference.modules() if f"{m.name}.".startswith(f"cookbook_npu.{part}.")
    ]
    return {module.name: module for module in every if module.notebook}


def short_name(name: str, part: str) -> str:
    "A module in its part; the part's own by its last word"
    own = name == f"cookbook_npu.{part}"
    return name.rpartition(".")[2] if own else name.removeprefix(f"cookbook_npu.{part}.")


def imports(part: str) -> dict[str, set[str]]:
    "Each module of a part, with the modules of the part that it imports"
    found = modules_of(part)
    return {
        name: {
            target
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ImportFrom)
            for target in imported(node, name.split(".") + [""] * (name[13:] == part))
            if target in found and target != name
        }
        for name, module in found.items()
    }


def imported(node: ast.ImportFrom, package: list[str]) -> list[str]:
    "The names that an import may load as modules; a package ends with an empty word"
    above = package[: -node.level] if node.level else []
    base = ".".join([*above, *filter(None, [node.module])])
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    "How far each module is from one that imports none: it stands above all that it imports"
    found: dict[str, int] = {}

    def level(name: str, path: tuple[str, ...] = ()) -> int:
        if name not in found:
            inner = [level(one, (*path, name)) for one in graph[name] if one not in path]
            found[name] = 1 + max(inner, default=-1)
        return found[name]

    for name in graph:
        level(name)
    return found


def direct(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    "The graph without the arrows that longer paths imply"

    def reached(name: str, seen: set[str]) -> set[str]:
        for one in graph[name] - seen:
            seen.add(one)
            reached(one, seen)
        return seen

    below = {name: reached(name, set()) for name in graph}
    return {
        name: {one for one in used if not any(one in below[two] for two in used - {one})}
        for name, used in graph.items()
    }


def rows_of(graph: dict[str, set[str]]) -> list[list[str]]:
    "The modules in rows from top to bottom, near those that import them"
    height = levels(graph)
    rows: list[list[str]] = []
    places: dict[str, float] = {}
    for level in range(max(height.values()), -1, -1):
        users = {
            name: [places[one] for one in graph if name in graph[one] and one in places]
            for name in sorted(graph)
            if height[name] == level
        }
        middle = {name: sum(at) / len(at) if at else 0.5 for name, at in users.items()}
        ordered = sorted(middle, key=lambda name: middle[name])
        count = -(-len(ordered) // IN_A_ROW)
        for row in (ordered[start::count] for start in range(count)):
            rows.append(row)
            places |= {name: (i + 0.5) / len(row) for i, name in enumerate(row)}
    return rows


def drawing(part: str) -> str:
    "The modules of a part as an SVG, each a link to its page; a line leads down to what it imports"
    pages = {
        name: f"../{(module.notebook or '').removesuffix('ipynb')}html"
        for name, module in modules_of(part).items()
    }
    graph = direct(imports(part))
    rows = rows_of(graph)
    short = {name: short_name(name, part) for name in graph}
    width = {name: PER_LETTER * len(short[name]) + 18 for name in graph}
    full = max(sum(width[name] + SPACE for name in row) for row in rows)
    at: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        free = (full - sum(width[name] for name in row)) / len(row)
        x = free / 2
        for name in row:
            at[name] = (x + width[name] / 2, 4 + number * (HEIGHT + GAP))
            x += width[name] + free
    lines, boxes = [], []
    for name, (x, y) in at.items():
        left = x - width[name] / 2
        text = f'<text x="{x:.0f}" y="{y + 19:.0f}">{escape(short[name])}</text>'
        box = f'<rect x="{left:.0f}" y="{y:.0f}" width="{width[name]:.0f}" height="{HEIGHT}" rx="5"/>'
        boxes.append(f'<a href="{pages[name]}">{box}{text}</a>')
        for used in graph[name]:
            end, bottom = at[used]
            half = (y + HEIGHT + bottom) / 2
            start = f"M{x:.0f} {y + HEIGHT:.0f}"
            curve = (
                f"{start} C{x:.0f} {half:.0f} {end:.0f} {half:.0f} {end:.0f} {bottom:.0f}"
            )
            lines.append(f'<path d="{curve}"/>')
    size = f"{full:.0f} {len(rows) * (HEIGHT + GAP) - GAP + 8:.0f}"
    label = f"The modules of {part}; a line leads from a module down to one that it imports"
    return "\n".join(
        [
            f'<svg class="modules" viewBox="0 0 {size}" width="{full:.0f}" role="img" aria-label="{label}">',
            *lines,
            *boxes,
            "</svg>",
        ]
    )


def contents(part: str) -> str:
    "The drawing of a part, and one line about each module"
    rows = [
        [f"[{short_name(name, part)}](../{module.notebook})", about]
        for name, module in modules_of(part).items()
        for about in [(ast.get_docstring(module.tree) or "").splitlines()[0]]
    ]
    figure = f"```{{raw}} html\n{drawing(part)}\n```"
    head = "A line leads from a module down to one that it imports."
    return "\n".join(
        [head, "", figure, "", *reference.table(["module", "what it does"], rows)]
    )
