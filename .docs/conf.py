"""The documentation site: every notebook as it stands in the tree, without running it."""

project = "cookbook_npu"
author = "The cookbook_npu authors"
root_doc = "nbs/index"
extensions = ["myst_nb"]
include_patterns = ["nbs/**", "recipes/**"]
exclude_patterns = ["**/.ipynb_checkpoints"]
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "amsmath", "html_image"]
html_theme = "furo"
html_title = "cookbook_npu"
# README paths are relative to the root of the repository, the site's index lies in nbs/.
suppress_warnings = ["myst.xref_missing", "myst.header"]
