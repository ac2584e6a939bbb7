"""Sphinx configuration. `make docs` builds the site from nothing."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import onnxtrain  # noqa: E402
from tools import reference_pages  # noqa: E402

reference_pages.write_pages(Path(__file__).parent / "reference")

project = "onnxtrain"
author = "onnxtrain authors"
copyright = "onnxtrain authors, MIT licence"
version = release = onnxtrain.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build", "**/_*.md"]
nitpick_ignore_regex = [("py:.*", r"(?!onnxtrain).*")]  # names of other projects have no page

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

default_role = "code"  # single backticks, as docstrings have them
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "pydata_sphinx_theme"
html_title = f"onnxtrain {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "onnxtrain"},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "show_prev_next": True,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_nav_level": 1,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 6,
}
copybutton_prompt_text = "$ "


def _indented_blocks_as_code(app, what, name, obj, options, lines) -> None:
    """Mark the indented paragraphs of a docstring as code."""
    marked = []
    for number, line in enumerate(lines):
        before = lines[number - 2] if number > 1 else " "
        if line.startswith("    ") and not lines[number - 1] and before and not before.startswith(" "):
            marked += ["::", ""]
        marked.append(line)
    lines[:] = marked


def setup(app) -> None:
    """Register the change of docstrings before napoleon reads them."""
    app.connect("autodoc-process-docstring", _indented_blocks_as_code, priority=100)
