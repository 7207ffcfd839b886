"""Messages between an ingress and its engines, and the scaling policy. This module needs neither torch nor Ray."""

import math
from dataclasses import dataclass
from typing import Any

RETRY_DELAY = 250  # milliseconds after which clients retry a call whose engine was lost or had a full queue

Trailers = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller of an RPC.

    Attributes:
        request_id: ID of the call.
        peer: address in gRPC's format.
    """

    request_id: str
    peer: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of a call.

    Attributes:
        reply: the response; None if the call failed.
        trailers: trailing metadata.
        code: name of the status.
        message: error message.
    """

    reply: Any
    trailers: Trailers = ()
    code: str = "OK"
    message: str = ""


class RowsInFlight:
    """Scaling policy: the number of engines is proportional to the rows that are accepted and not yet computed.

    Args:
        rows: rows in flight per engine.
    """

    def __init__(self, rows: float) -> None:
        self._rows = rows

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of engines and an empty state. Ray applies its limits and delays to the number."""
        rows_by_engine = (context.aggregated_metrics or {}).get("rows", {})
        if not rows_by_engine:  # no engine has reported its rows yet
            return context.target_num_replicas, {}
        return math.ceil(sum(rows_by_engine.values()) / self._rows), {}
