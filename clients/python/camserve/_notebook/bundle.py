"""Join the modules of the page that the notebook's view needs into one script."""

from __future__ import annotations

import functools
import re
from importlib import resources

_FOLDER = "page/lib"
_MODULES = ("maps", "colormaps", "draw", "words")  # each after those that it imports
_COMMENT = re.compile(r"^ *(/\*\*.*?\*/|// [^\n]*)\n", re.DOTALL | re.MULTILINE)
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "[^"]*?(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function\*?|const|class) (\w+)", re.MULTILINE)


@functools.cache
def script() -> str:
    """Return the script: an expression whose value has the functions of ``view.js``."""
    sources = {name: _read(f"{_FOLDER}/{name}.js") for name in _MODULES}
    sources["view"] = _read("_notebook/view.js")
    return "(() => {\n" + "".join(_module(name, text) for name, text in sources.items()) + "return $view;\n})()"


@functools.cache
def styles() -> str:
    """Return the style sheet."""
    return _read("_notebook/view.css")


def _read(path: str) -> str:
    return resources.files("camserve").joinpath(path).read_text("utf-8")


def _module(name: str, text: str) -> str:
    """Turn an ES module into a constant, $ and its name: a notebook's output cannot import modules."""
    names = _EXPORT.findall(text)
    body = _IMPORT.sub(r"const \1 = $\2;", _COMMENT.sub("", text))
    body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
    return f"const ${name} = (() => {{\n{body}return {{ {', '.join(names)} }};\n}})();\n"
