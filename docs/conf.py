"""The documentation as a site: ``make docs`` builds it into ``docs/_build``, and a warning is an error."""

import functools
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

project = "lit_fedad"
author = "the authors of lit_fedad"
version = release = re.findall(r'__version__ = "(.+)"', (ROOT / "lit_fedad" / "__init__.py").read_text())[0]
html_theme = "furo"
highlight_language = "none"  # of commands and what they print
html_title = f"lit_fedad {release}"
html_search_scorer = str(Path(__file__).parent / "search_order.js")
exclude_patterns = ["_build", "notebooks"]

extensions = ["myst_parser", "sphinx.ext.apidoc", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # the anchors that GitHub gives to headings

# One page a module, written anew by every build. Packages that the reference can do without are not imported.
apidoc_modules = [
    {
        "path": str(ROOT / "lit_fedad"),
        "destination": "reference",
        "separate_modules": True,
        "module_first": True,
        "automodule_options": {"members", "show-inheritance"},
    }
]
napoleon_use_ivar = True  # attributes are fields of their class, which describes them once
autodoc_mock_imports = ["flwr", "gradio", "httpx", "medmnist", "nncf", "openvino", "pydicom"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_use_type_comments = False  # there are none, and looking for them took 8 % of a build
# What `lit_fedad.contracts` hands on from its modules has two places; a name leads to either.
# The start page leads to the reference: in the tour its modules would be written into the margin of each page.
suppress_warnings = ["ref.python", "toc.not_included"]


def links_into_package(app: Sphinx, page: str, source: list[str]) -> None:
    """Leads links to the package's modules to their pages of the reference; its other files can be downloaded."""
    up = "../" * page.count("/")  # pages of docs/lab lie a folder deeper
    source[0] = re.sub(
        rf"\]\({up}\.\./(lit_fedad(?:/\w+)*)(?:\.py)?\)",
        lambda link: f"]({up}reference/{link[1].replace('/', '.')}.rst)",
        source[0],
    )
    for folder in ("lit_fedad", "containers"):
        source[0] = source[0].replace(f"]({up}../{folder}/", f"](path:{up}../{folder}/")


class QuickDomain(PythonDomain):
    """Looks names up among the package's: Sphinx compares each type of each signature with every name there is."""

    @functools.cached_property
    def last_parts(self) -> set[str]:
        """What stands behind the last dot of each name; read once, when all pages are read."""
        return {name.rpartition(".")[2] for name in self.objects}

    def find_obj(self, env: Any, modname: str, classname: str, name: str, *how: Any) -> list[Any]:
        """Finds what has a name; nothing, at once, where no name ends in the same part."""
        if name.removesuffix("()").rpartition(".")[2] not in self.last_parts:
            return []
        return super().find_obj(env, modname, classname, name, *how)


def setup(app: Sphinx) -> None:
    """Registers with Sphinx what becomes of links, and a quicker search for names."""
    app.connect("source-read", links_into_package)
    app.add_domain(QuickDomain, override=True)
