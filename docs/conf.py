"""Settings of the documentation: `sh scripts/docs.sh` builds it, with no network."""

import re

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


def _without_paths(app, what, name, obj, options, signature, returns):
    """Show a module that is a default value by its name, and not by its file."""
    if "<module " in (signature or ""):
        return re.sub(r"<module '(\w+)' from '[^']*'>", r"\1", signature), returns
    return None


def setup(app):
    """Connect what changes the signatures of the reference."""
    app.connect("autodoc-process-signature", _without_paths)
