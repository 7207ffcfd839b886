"""Checks that all fields share, and errors that list the valid names."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np

from camserve_server.core.errors import InvalidArgument, NotFound, did_you_mean

MAX_ECHOED = 64  # characters of a caller's text that an error repeats
MAX_FLOAT = float(np.finfo(np.float32).max)
MAX_SIDE = 16_384  # pixels
MAX_LISTED = 12  # names that an error lists; of further names it gives the number

T = TypeVar("T")


def find_known(kind: str, name: str, known: Mapping[str, T], intro: str, field: str) -> T:
    """Return the value of a name.

    Args:
        kind: what the name stands for, such as "method".
        name: the name in the request.
        known: the valid names and their values.
        intro: text before the list of valid names in the error, such as "there are".
        field: path of the request's field.

    Raises:
        NotFound: the name is unknown; the error lists the valid names.
    """
    if name in known:
        return known[name]
    hint = did_you_mean(name, known)
    raise NotFound(f'unknown {kind} "{shorten(name)}": {intro} {join_names(known)}{hint}', field=field)


def check_range(value: float, low: float, high: float, field: str) -> None:
    """Refuse a number outside a range.

    Raises:
        InvalidArgument: the number is outside the range, or NaN.
    """
    if not low <= value <= high:  # NaN fails this too
        raise InvalidArgument.of_field(field, f"is {low:g} to {high:g}, not {value:g}")


def join_names(names: Iterable[str]) -> str:
    """Join names for an error: the first `MAX_LISTED`, and the number of the others."""
    names = list(names)
    others = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + others


def shorten(text: str) -> str:
    """Shorten a caller's text for an error."""
    return text if len(text) <= MAX_ECHOED else text[: MAX_ECHOED - 1] + "…"
