"""Escape text from other sources, so that a terminal prints it and does not act on it."""

from __future__ import annotations

import json
import re

LONGEST = 4000
"""Characters of a line or a cell that are printed at most."""

# C0 and C1 with ESC, line and paragraph separators; marks, embeddings, overrides and isolates that change the direction
# of text; tags, which are invisible; single surrogates, as in a file name that is not UTF-8.
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
    return printable(text if len(text) <= LONGEST else f"{text[:LONGEST]}…")


def printable_json(text: str) -> str:
    r"""Escape the same characters in JSON text, in JSON's notation; keep its line breaks.

    >>> printable_json('["\x9b2J"]')
    '["\\u009b2J"]'
    """
    return "\n".join(_UNSAFE.sub(lambda match: json.dumps(match[0])[1:-1], line) for line in text.split("\n"))


def echo(text: str = "", *, err: bool = False) -> None:
    """Print escaped text; line breaks are kept."""
    import click  # noqa: PLC0415 -- only commands print

    click.echo("\n".join(map(printable, text.split("\n"))), err=err)
