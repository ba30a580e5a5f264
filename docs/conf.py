"""Sphinx configuration."""

project = "servax"
author = "the servax developers"
project_copyright = "the servax developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "servax"
exclude_patterns = ["_build"]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
default_role = "code"  # docstrings write `code` as Markdown does
autodoc_member_order = "bysource"
