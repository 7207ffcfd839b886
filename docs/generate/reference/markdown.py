"""Parts of a page in Markdown, for GitHub and for the site."""

import re
from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Lines of a cell stay lines."""
    lines = [headings, ["---"] * len(headings), *([cell(each) for each in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str) -> str:
    """Return a text as the content of a table's cell."""
    return re.sub(r"\n+", "<br>", text.strip()).replace("|", r"\|")


def code(value: object) -> str:
    """Return a value as code."""
    return f"`{value}`"


def listed(values: Iterable[object]) -> str:
    """Return values as code, with commas between them."""
    return ", ".join(map(code, values))


def joined(parts: Iterable[str]) -> str:
    """Return these parts with an empty line between two of them."""
    return "\n\n".join(part.strip("\n") for part in parts)
