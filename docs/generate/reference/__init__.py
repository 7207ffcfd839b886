"""Generators of the reference pages in docs/reference, from the code. `make reference` runs them.

The prose of a page is written by hand. The function `parts` of a module returns what is between the marks of its page:
`<!-- generated: NAME -->` and `<!-- /generated -->`.
"""

import re
from pathlib import Path

from reference import errors, http, metrics, protos, settings

FOLDER = Path(__file__).parents[2] / "reference"
PARTS = {
    "errors": errors.parts,
    "http": http.parts,
    "metrics": metrics.parts,
    "protos": protos.parts,
    "settings": settings.parts,
}
"""The functions that return the generated parts of each page."""

_PART = re.compile(r"(<!-- generated: (?P<name>[^>]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


def generated(page: str) -> str:
    """Return the text of a page with its generated parts as they are by the code.

    Raises:
        ValueError: the page has not the marks of every part, each once.
    """
    text, parts = (FOLDER / f"{page}.md").read_text(encoding="utf-8"), PARTS[page]()
    marked = [match["name"] for match in _PART.finditer(text)]
    if sorted(marked) != sorted(parts):
        raise ValueError(f"{page}.md has marks for {marked}, and not for {list(parts)}")
    return _PART.sub(lambda match: f"{match[1]}\n{parts[match['name']]}\n\n{match[3]}", text)
