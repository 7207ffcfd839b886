"""Print untrusted text: its control characters are escaped, so that a terminal does not act on them.

``echo`` prints lines and ``print_table`` a table; ``printable``, ``brief``, ``aligned`` and ``printable_json`` return
the escaped text.
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

MAX_ROWS = 2000
"""Most rows of a table that are printed on a terminal: more take minutes to lay out, and nobody reads them there."""

_MAX_PADDED = 200  # characters of a cell that the other cells of its column are aligned with

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


def aligned(rows: Iterable[Sequence[str]], gap: str) -> str:
    """Return rows of equal length as lines, with a gap between the columns; cells are as of ``brief``.

    A cell of more than 200 characters is wider than its column. So a long cell does not make every line as long.
    """
    from rich.cells import cell_len  # noqa: PLC0415 -- only tables need it

    cells = [list(map(brief, row)) for row in rows]
    widths = [min(max(map(cell_len, column)), _MAX_PADDED) for column in zip(*cells, strict=True)]
    padded = (
        gap.join(cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )
    return "\n".join(line.rstrip() for line in padded)


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
    """Print a table on standard output: on a terminal as wide as it is, with a limit of rows; in a pipe in full.

    Args:
        headings: Headings of the columns.
        rows: Cells of each row: plain text, or rich's ``Text`` for a style.
    """
    from rich.console import Console  # noqa: PLC0415 -- importing rich takes time, which only tables need
    from rich.table import Table  # noqa: PLC0415 -- the same

    console, listed = Console(), list(rows)
    if not console.is_terminal:
        echo(aligned([headings, *(tuple(map(str, row)) for row in listed)], "  "))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(_cell(heading), overflow="fold")
    for row in listed[:MAX_ROWS]:
        table.add_row(*map(_cell, row))
    console.print(table, width=min(console.width, console.measure(table).maximum))
    if len(listed) > MAX_ROWS:
        echo(f"and {len(listed) - MAX_ROWS:,} more rows, which are left out; a pipe or a file gets all of them")


def _cell(content: str | Text) -> Text:
    from rich.text import Text  # noqa: PLC0415 -- as above

    # In a Text, rich does not interpret brackets as markup.
    style = content.style if isinstance(content, Text) else ""
    return Text(brief(str(content)), style=style)
