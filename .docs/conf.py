"""The documentation site: every notebook as it stands in the tree, without running it."""

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
suppress_warnings = ["myst.header"]
