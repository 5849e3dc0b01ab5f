"""The documentation site: every notebook as it stands in the tree, not run, without what only nbdev reads"""

import json

from docutils import nodes
from latex2mathml.converter import convert

project = "cookbook_npu"
author = "The cookbook_npu authors"
root_doc = ".docs/index"
extensions = ["myst_nb"]
include_patterns = [".docs/*.md", "nbs/**", "recipes/**"]
exclude_patterns = ["**/.ipynb_checkpoints"]
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "amsmath", "html_image"]
html_theme = "furo"
html_title = "cookbook_npu"
# what the browser itself knows: the site is also read where no other site can be reached
html_math_renderer = "mathml"
suppress_warnings = ["myst.header"]


def without_directives(app, docname: str, source: list[str]) -> None:
    "Leave out `#|` lines, and cells that have nothing else or are hidden"
    if not source[0].lstrip().startswith("{"):
        return
    notebook = json.loads(source[0])
    shown = []
    for cell in notebook["cells"]:
        if "#| hide\n" in cell["source"]:
            continue
        cell["source"] = [line for line in cell["source"] if not line.startswith("#|")]
        if any(line.strip() for line in cell["source"]):
            shown.append(cell)
    notebook["cells"] = shown
    source[0] = json.dumps(notebook)


def write_math(translator, node: nodes.Element) -> None:
    "A formula as MathML"
    if isinstance(node, nodes.math_block):
        markup = convert(node.astext(), display="block")
        # room for tall signs, else it scrolls
        markup = f'<div style="padding: 0.4em 0">{markup}</div>'
    else:
        markup = convert(node.astext(), display="inline")
    translator.body.append(markup)
    raise nodes.SkipNode


def setup(app) -> None:
    "Called by Sphinx"
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
    app.connect("source-read", without_directives)
