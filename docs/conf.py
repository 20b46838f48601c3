"""How Sphinx builds the documentation site. `make docs` runs it, offline, with warnings as errors."""

import sys
from pathlib import Path

from ipython_pygments_lexers import IPython3Lexer
from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent / "src")]

import fairmesh  # noqa: E402  the package of this clone, so that the API reference is that of its source

project = "fairmesh"
author = "The fairmesh developers"
copyright = "the fairmesh developers, Apache-2.0"
release = version = fairmesh.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "sphinx_copybutton",
    "repository",  # these three are in docs/_extensions
    "reference",
    "mathml",
]
exclude_patterns = ["_build", "README.md"]  # index.md shows README.md
nitpicky = False

# Markdown that also reads well where it is shown without Sphinx.
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_dmath_allow_space = False
myst_dmath_allow_digits = False

# Tutorials are committed with their pictures; `pytest tests/docs` executes them.
nb_execution_mode = "off"

# Docstrings: Google's sections, and single backticks for code.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # what a class promises is documented once, at its base
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_class_signature = "mixed"
add_module_names = False
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = "fairmesh"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_math_renderer = "mathml"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072b2", "color-brand-content": "#0072b2"},
    "dark_css_variables": {"color-brand-primary": "#56b4e9", "color-brand-content": "#56b4e9"},
    "navigation_with_keys": True,
}
pygments_style = "tango"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app: Sphinx) -> None:
    app.add_lexer("python", IPython3Lexer)  # Python, and the `!command` of notebooks
