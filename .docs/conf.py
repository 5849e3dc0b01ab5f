"""The documentation site, of the pages that stage.py writes"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from docutils import nodes  # noqa: E402
from latex2mathml.converter import convert  # noqa: E402
from reference import source_of  # noqa: E402
from search import SearchBoth  # noqa: E402

project = "cookbook_npu"
author = "The cookbook_npu authors"
extensions = [
    "myst_nb",
    "sphinx_copybutton",
    "sphinx.ext.viewcode",
    "sphinx.ext.githubpages",
]
exclude_patterns = [
    "tests",
    ".devcontainer",
    ".github",
]  # files that pages offer for download
nb_execution_mode = "off"
# a picture before a page, a page before its text
nb_mime_priority_overrides = [("html", "application/json", 10000)]
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath", "html_image", "colon_fence"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "cookbook_npu"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
# summaries are fetched, which a browser refuses for pages that are files: see static/snippets.js
html_show_search_summary = False
html_search_scorer = "static/scorer.js"
# what the browser itself knows: the site is also read where no other site can be reached
html_math_renderer = "mathml"
python_maximum_signature_line_length = 72
# a sidebar of every function would be made anew for every page
toc_object_entries = False
# a link to the source, which is read and never imported
viewcode_follow_imported_members = False
copybutton_selector = "div:not(.output) > div.highlight > pre"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
suppress_warnings = ["myst.header"]


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


def find_source(app, module: str):
    "Source and tags of a module of the package"
    return source_of(module)


def add_snippets(app, page: str, *_: object) -> None:
    "Called for each page"
    if page == "search":
        app.add_js_file("snippets.js")


def setup(app) -> dict[str, bool]:
    "Called by Sphinx"
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
    app.connect("viewcode-find-source", find_source)
    app.connect("html-page-context", add_snippets)
    app.add_search_language(SearchBoth)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
