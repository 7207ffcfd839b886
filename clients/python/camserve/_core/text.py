"""Untrusted text: its control characters are escaped, so that a terminal does not act on them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_PRINTED = 4000
"""Maximum number of characters of a line or cell that are printed."""

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
