"""HTML elements from hostile texts, and numbers for people."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from camserve.diff.values import Interval


class Html(str):
    """Text that is HTML already. ``element`` escapes every other text."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: str) -> Html:
    """Return an element. Underscores in names of attributes stand for hyphens, and one at the end for nothing."""
    names = {key.rstrip("_").replace("_", "-"): escape(value) for key, value in attributes.items()}
    start = "".join(f' {key}="{value}"' for key, value in names.items())
    return Html(f"<{name}{start}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Return parts of HTML as one; texts are escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def number(value: float) -> str:
    """Return a number with two decimals."""
    return f"{value:.2f}".replace("-", "−") if math.isfinite(value) else "–"


def percent(share: float) -> str:
    """Return a share as a percentage."""
    return f"{100 * share:.3g}\N{NO-BREAK SPACE}%" if math.isfinite(share) else "–"


def numbers(interval: Interval) -> str:
    """Return a number with its interval."""
    return f"{number(interval.value)} ({percent(0.95)} interval {number(interval.low)} to {number(interval.high)})"


def percents(interval: Interval) -> str:
    """Return a share with its interval, as percentages."""
    return f"{percent(interval.value)} ({percent(0.95)} interval {percent(interval.low)} to {percent(interval.high)})"


def count(value: int, noun: str) -> str:
    """Return a count with its noun: ``count(1, "photo")`` is "1 photo"."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def scrolling(table: Html, label: str) -> Html:
    """Return a wide table in an element that scrolls sideways."""
    # Only an element that can have the focus can be scrolled with the keyboard.
    return element("div", table, class_="scrolls", tabindex="0", role="group", aria_label=label)
