"""What every field is checked with, and how an error says what there is instead."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from camserve_server.core.errors import InvalidArgument, NotFound, did_you_mean

LONGEST_SHOWN = 64  # characters of a caller's own word that an error repeats
LARGEST_SIDE = 16_384  # pixels
SHOWN = 12  # names that an error lists before it says how many more there are

T = TypeVar("T")


def find_known(kind: str, name: str, among: Mapping[str, T], there_are: str, field: str) -> T:
    """Return what has that name.

    Raises:
        NotFound: nothing has; the error lists what there is.
    """
    if name in among:
        return among[name]
    hint = did_you_mean(name, among)
    raise NotFound(f'unknown {kind} "{short(name)}": {there_are} {listed(among)}{hint}', field=field)


def check_range(value: float, low: float, high: float, field: str) -> None:
    """Refuse a number outside a range.

    Raises:
        InvalidArgument: it is outside, or no number.
    """
    if not low <= value <= high:  # NaN fails this too
        raise InvalidArgument.of_field(field, f"is {low:g} to {high:g}, not {value:g}")


def listed(names: Iterable[str]) -> str:
    """Join names for an error: the first dozen, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def short(name: str) -> str:
    """Cut a caller's own word for an error."""
    return name if len(name) <= LONGEST_SHOWN else name[: LONGEST_SHOWN - 1] + "…"
