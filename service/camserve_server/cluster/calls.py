"""What goes between a door and its engines, and how many of these there shall be: nothing here needs torch or Ray."""

import math
from dataclasses import dataclass
from typing import Any

AGAIN = 250  # milliseconds after which a call that lost its engine, or found no room, is to be sent again

Trailers = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who called.

    Attributes:
        request_id: of the call.
        peer: the address, as gRPC writes it.
    """

    request_id: str
    peer: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a call.

    Attributes:
        reply: the message; None where it failed.
        trailers: metadata that follow it.
        code: the status's name.
        words: what went wrong.
    """

    reply: Any
    trailers: Trailers = ()
    code: str = "OK"
    words: str = ""


class RowsInFlight:
    """How many engines there shall be: one for so many rows that are accepted and not yet answered.

    Args:
        rows: that keep one engine at work.
    """

    def __init__(self, rows: float) -> None:
        self._rows = rows

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number, which Ray keeps within its bounds and its delays, and no state."""
        found = (context.aggregated_metrics or {}).get("rows", {})
        if not found:  # none has said yet how many it has
            return context.target_num_replicas, {}
        return math.ceil(sum(found.values()) / self._rows), {}
