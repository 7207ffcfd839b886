"""HTML of results for notebooks, with the pictures inline, so that nothing is fetched."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from camserve._picture import Picture


def figure(picture: Picture | None, title: str, note: str, width: str = "24em") -> str:
    """Return a picture with its title and a note as HTML."""
    image = _inline(picture, title) if picture else "<em>no overlay</em>"
    small = f"<br><small>{escape(note)}</small>" if note else ""
    caption = f"<figcaption>{escape(title)}{small}</figcaption>"
    return f'<figure style="margin:0;max-width:{width}">{image}{caption}</figure>'


def text(content: str) -> str:
    """Escape text for HTML."""
    return escape(content)


def page(title: str, rows: Iterable[tuple[str, str]], figures: Iterable[str]) -> str:
    """Return a table of predictions and figures, side by side, as HTML."""
    lines = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    table = f"<table><caption>{escape(title)}</caption>{lines}</table>"
    parts = "".join((table, *figures))
    return f'<div style="display:flex;flex-wrap:wrap;gap:1em">{parts}</div>'


def _inline(picture: Picture, title: str) -> str:
    data = b64encode(picture.data).decode()
    source = f"data:image/{escape(picture.format)};base64,{data}"
    return f'<img style="max-width:100%" alt="{escape(title)}" src="{source}">'
