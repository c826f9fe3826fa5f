"""Settings of the documentation: `sh scripts/docs.sh` builds it, with no network."""

import cufa

project = "cufa"
author = "The cufa developers"
version = release = cufa.__version__

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"cufa {release}"

myst_heading_anchors = 3

# Single backticks in docstrings: a link where the name is documented, else code.
default_role = "py:obj"
autodoc_typehints = "none"  # the parameter lists say more
numpydoc_show_class_members = False
