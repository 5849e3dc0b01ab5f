"""The documentation site, of the pages that stage.py writes"""

import sys
from configparser import ConfigParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from docutils import nodes  # noqa: E402
from latex2mathml.converter import convert  # noqa: E402
from reference import source_of  # noqa: E402
from search import SearchBoth  # noqa: E402
from stage import source_path  # noqa: E402

settings = ConfigParser()
settings.read(Path(__file__).parent.parent / "settings.ini", "utf-8")
settings = settings["DEFAULT"]
project = "cookbook_npu"
author = settings["author"]
copyright = settings["copyright"]
# the site names its repository where settings.ini does
repository = settings["git_url"].rstrip("/")
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
nb_render_markdown_format = "myst"  # tables in outputs, too
# a picture before a page, a page before its text
nb_mime_priority_overrides = [("html", "application/json", 10000)]
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath", "html_image", "colon_fence"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "cookbook_npu"
html_baseurl = settings["doc_host"].rstrip("/") + settings["doc_baseurl"]
html_theme_options = {}
if repository:
    html_theme_options["top_of_page_buttons"] = ["view", "edit"]
    html_theme_options["footer_icons"] = [
        {"name": "repository", "url": repository, "html": "⌂", "class": ""}
    ]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
# summaries are fetched, which a browser refuses for pages that are files: see static/snippets.js
html_show_search_summary = False
html_search_scorer = str(Path(__file__).parent / "static" / "scorer.js")
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


def change_page(app, page: str, template: str, context: dict, *_: object) -> None:
    "Called for each page: snippets for the search, links to the source in the repository"
    if page == "search":
        app.add_js_file("snippets.js")
    source = source_path(page)
    if repository and source:
        branch = settings["branch"]
        context["theme_source_edit_link"] = f"{repository}/edit/{branch}/{source}"
        context["theme_source_view_link"] = f"{repository}/blob/{branch}/{source}"
    else:
        context["page_source_suffix"] = ""  # no button


def setup(app) -> dict[str, bool]:
    "Called by Sphinx"
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
    app.connect("viewcode-find-source", find_source)
    app.connect("html-page-context", change_page)
    app.add_search_language(SearchBoth)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
