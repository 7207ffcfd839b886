"""When to try again, and how long a call may take: pure, so that both clients share it."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from camserve._errors import InvalidArgument

if TYPE_CHECKING:
    from camserve._errors import CamserveError

RETRYABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})


LONGEST_PUSHBACK = 3600.0  # seconds; if the server asks for a longer pause, the request is not sent again


@dataclass(frozen=True, slots=True)
class Retry:
    """How often, and after which pauses, a request is sent again.

    Only UNAVAILABLE and RESOURCE_EXHAUSTED are retried. A pause that the server asks for is kept;
    otherwise pauses double, each shortened at random by up to a half, so that clients refused
    together do not come back together.

    >>> Retry(attempts=0)  # never again
    Retry(attempts=0, first=0.25, longest=5.0)

    Attributes:
        attempts: How often to send it again, after the first time.
        first: Seconds before the first of them.
        longest: Seconds that a pause grows to.
    """

    attempts: int = 4
    first: float = 0.25
    longest: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 0 or self.first < 0 or self.longest < 0:
            raise InvalidArgument(f"none of {self} may be negative")

    def pause(self, tries: int, error: CamserveError) -> float | None:
        """Return the seconds to wait before sending again, or None to give up.

        Args:
            tries: How often it was sent so far.
            error: What the last one ended with.
        """
        if tries > self.attempts or not _worth(error):
            return None
        if error.retry_after is not None:
            return error.retry_after if error.retry_after <= LONGEST_PUSHBACK else None
        ceiling = min(self.longest, self.first * 2.0 ** (tries - 1))
        return ceiling * random.uniform(0.5, 1.0)  # noqa: S311 -- jitter is no secret


def _worth(error: CamserveError) -> bool:
    forbidden = error.retry_after is not None and error.retry_after < 0
    return error.code in RETRYABLE and not too_large(error) and not forbidden


def too_large(error: CamserveError) -> bool:
    """Say whether a message was refused for its size, by gRPC or by us: with the code of a full queue."""
    return "larger than max" in error.message  # only its words tell


class Tries:
    """The tries of one call, all of them inside its deadline."""

    def __init__(self, retry: Retry, timeout: float) -> None:
        self._retry = retry
        self._ends = time.monotonic() + timeout
        self._tries = 0

    def start(self) -> float | None:
        """Begin a try; return the seconds that it may take, None for as long as it likes."""
        self._tries += 1
        left = self._ends - time.monotonic()
        return None if math.isinf(left) else max(left, 0.0)

    def pause(self, error: CamserveError) -> float | None:
        """Return the seconds before the next try; None if there is none, or no time for it."""
        pause = self._retry.pause(self._tries, error)
        return pause if pause is not None and time.monotonic() + pause < self._ends else None
