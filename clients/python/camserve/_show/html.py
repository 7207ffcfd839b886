"""HTML of results for notebooks, with pictures, maps and script inline, so that nothing is fetched."""

from __future__ import annotations

import json
import secrets
from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING

from camserve._show import bundle

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from camserve._values.picture import Picture

_NOTEBOOK_MODULES = (
    *(f"page/lib/{name}.js" for name in ("maps", "colormaps", "draw", "words")),
    "_show/view.js",
)


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


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """Return a table as HTML; the first cell of each row is its heading."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    lines = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def comparison(summary: str, data: Mapping[str, object], figures: Iterable[str]) -> str:
    """Return a comparison of maps as HTML.

    Args:
        summary: HTML that is shown above it.
        data: The argument ``data`` of ``show`` in ``_show/view.js``.
        figures: HTML that is shown if no script runs.
    """
    name = f"camserve-{secrets.token_hex(8)}"
    static = f'<div style="display:flex;flex-wrap:wrap;gap:1em">{"".join(figures)}</div>'
    styles = bundle.text("_show/view.css")
    call = f'{bundle.script(*_NOTEBOOK_MODULES)}.show(document.getElementById("{name}"), {script_json(data)});'
    return (
        f'<div class="camserve-view"><style>{styles}</style>{summary}<div id="{name}">{static}</div>'
        f"<script>{call}</script></div>"
    )


def data_url(data: bytes, encoding: str) -> str:
    """Return an image as a data URL."""
    return f"data:image/{encoding};base64,{b64encode(data).decode()}"


def script_json(data: object) -> str:
    """Return data as JSON that may stand inside a script element."""
    # A text such as "</script>" or "<!--" would end the script, or hide what follows it.
    return json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")


def _inline(picture: Picture, title: str) -> str:
    source = data_url(picture.data, escape(picture.format))
    return f'<img style="max-width:100%" alt="{escape(title)}" src="{source}">'
