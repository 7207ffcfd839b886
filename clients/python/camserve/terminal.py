"""Print untrusted text: its control characters are escaped, so that a terminal does not act on them.

``echo`` prints lines and ``print_table`` a table; ``printable``, ``brief``, ``aligned`` and ``printable_json`` return
the escaped text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from camserve._core.text import aligned, brief, printable, printable_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.text import Text

__all__ = ["aligned", "brief", "echo", "print_table", "printable", "printable_json"]

MAX_ROWS = 2000
"""Most rows of a table that are printed on a terminal: more take minutes to lay out, and nobody reads them there."""


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
