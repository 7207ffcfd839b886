"""Print untrusted text: its control characters are escaped, so that a terminal does not act on them.

``echo`` prints lines and ``print_table`` a table; ``printable``, ``brief`` and ``printable_json`` return the
escaped text.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.text import Text

MAX_PRINTED = 4000
"""Maximum number of characters of a line or cell that are printed."""

_PIPE_WIDTH = 10_000  # characters; in a pipe, a table is as wide as its content

# C0 and C1 control characters, which include ESC; line and paragraph separators; marks, embeddings, overrides and
# isolates that change the direction of text; tags, which are invisible; and lone surrogates, as in file names that are
# not UTF-8.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    r"""Escape the characters that a terminal would act on, and line breaks.

    >>> printable("\x1b[2J cat\n")
    '\\x1b[2J cat\\n'
    """
    return _UNSAFE.sub(lambda match: repr(match[0])[1:-1], text)


def brief(text: str) -> str:
    """Escape a line or a cell, and truncate it if it is very long."""
    return printable(text if len(text) <= MAX_PRINTED else f"{text[:MAX_PRINTED]}…")


def printable_json(text: str) -> str:
    r"""Escape the same characters in JSON text as JSON does; line breaks are kept.

    >>> printable_json('["\x9b2J"]')
    '["\\u009b2J"]'
    """
    return "\n".join(_UNSAFE.sub(lambda match: json.dumps(match[0])[1:-1], line) for line in text.split("\n"))


def echo(text: str = "", *, err: bool = False) -> None:
    """Print escaped text; line breaks are kept.

    Args:
        text: What to print.
        err: True to print on standard error.
    """
    import click  # noqa: PLC0415 -- only commands print

    click.echo("\n".join(map(printable, text.split("\n"))), err=err)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """Print a table on standard output, as wide as the terminal, or in a pipe as wide as its content.

    Args:
        headings: Headings of the columns.
        rows: Cells of each row: plain text, or rich's ``Text`` for a style.
    """
    from rich.console import Console  # noqa: PLC0415 -- importing rich takes time, which only tables need
    from rich.table import Table  # noqa: PLC0415 -- the same

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(_cell(heading), overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    console = Console() if Console().is_terminal else Console(width=_PIPE_WIDTH)
    console.print(table, width=min(console.width, console.measure(table).maximum))


def _cell(content: str | Text) -> Text:
    from rich.text import Text  # noqa: PLC0415 -- as above

    # In a Text, rich does not interpret brackets as markup.
    style = content.style if isinstance(content, Text) else ""
    return Text(brief(str(content)), style=style)
