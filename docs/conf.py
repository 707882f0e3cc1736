"""How the documentation site is built: `make docs`. Warnings are errors."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # reference_pages

from rbdc import __version__

project = "RBDC"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "reference_pages"]

myst_heading_anchors = 3  # links to headings, as GitHub has them
highlight_language = "text"  # indented blocks are commands, folders and formulas

html_theme = "furo"
html_title = "RBDC"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False

add_module_names = False  # every public name is rbdc.NAME
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
nitpicky = True
# What is not ours, and what is not public, has no page here.
nitpick_ignore_regex = [
    (r"py:class", r"(torch|collections|fractions|pathlib|nn)\..*"),
    (r"py:class", r"rbdc\.\w+\..*"),
]
