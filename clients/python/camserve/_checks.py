"""Check options before they are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from camserve._errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

K = TypeVar("K")
V = TypeVar("V")


def look_up(choices: Mapping[K, V], name: K, field: str) -> V:
    """Return the value of a choice.

    Raises:
        InvalidArgument: There is no choice of this name.
    """
    if name not in choices:
        raise invalid(field, f"unknown value {name!r}; expected one of {', '.join(map(repr, choices))}")
    return choices[name]


def check_range(field: str, value: float | None, low: float, high: float) -> None:
    """Check that a number lies in a range. None is not checked.

    Raises:
        InvalidArgument: It is out of the range, or NaN.
    """
    if value is not None and not low <= value <= high:
        raise invalid(field, f"{value} is not between {low} and {high}")


def invalid(field: str, reason: str) -> InvalidArgument:
    """Return an error that names the field at fault."""
    return InvalidArgument(f"{field}: {reason}", fields={field: reason})
