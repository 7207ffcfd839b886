"""Join ES modules of this package into one script, for HTML that fetches nothing."""

from __future__ import annotations

import functools
import re
from importlib import resources
from pathlib import PurePosixPath

_COMMENT = re.compile(r"^ *(/\*\*.*?\*/|// [^\n]*)\n", re.DOTALL | re.MULTILINE)
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "[^"]*?(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function\*?|const|class) (\w+)", re.MULTILINE)


@functools.cache
def script(*paths: str) -> str:
    """Return the script: an expression whose value has the exports of the last module.

    Args:
        paths: Files of the modules in this package, each after those that it imports. Their names differ.
    """
    sources = {PurePosixPath(path).stem: text(path) for path in paths}
    modules = "".join(_module(name, source) for name, source in sources.items())
    return f"(() => {{\n{modules}return ${list(sources)[-1]};\n}})()"


@functools.cache
def text(path: str) -> str:
    """Return the content of a file of this package."""
    return resources.files("camserve").joinpath(path).read_text("utf-8")


def _module(name: str, source: str) -> str:
    """Turn an ES module into a constant, $ and its name: a script inside HTML cannot import modules."""
    names = _EXPORT.findall(source)
    body = _IMPORT.sub(r"const \1 = $\2;", _COMMENT.sub("", source))
    body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
    return f"const ${name} = (() => {{\n{body}return {{ {', '.join(names)} }};\n}})();\n"
