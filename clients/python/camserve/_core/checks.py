"""Check options before they are sent."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import SupportsIndex, TypeVar, cast

from camserve._core.errors import InvalidArgument

K = TypeVar("K")
V = TypeVar("V")

MAX_CHANNEL = 2**32 - 1  # uint32


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


def indices(channels: object, name: str) -> tuple[int, ...]:
    """Return an option that lists channels as integers.

    Raises:
        InvalidArgument: It is not a list of indices; the message names the option.
    """
    if isinstance(channels, Iterable):
        listed = list(cast("Iterable[object]", channels))
        whole = [each for each in listed if isinstance(each, SupportsIndex) and not isinstance(each, bool)]
        found = tuple(map(operator.index, whole))
        if len(found) == len(listed) and all(0 <= index <= MAX_CHANNEL for index in found):
            return found
    raise invalid(name, f"they must be a list of indices from 0, such as [12, 40], not {channels!r}")
