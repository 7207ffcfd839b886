"""Retries and timeouts of calls. This module does no I/O, so both clients share it."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

import grpc

from camserve._core.errors import STARTING, CamserveError, InvalidArgument
from camserve._transport.errors import more_telling

RETRYABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})

MAX_PUSHBACK = 3600.0  # seconds; if the server asks for a longer pause, the request is not sent again


@dataclass(frozen=True, slots=True)
class Retry:
    """Number of retries, and the pauses between them.

    Only UNAVAILABLE and RESOURCE_EXHAUSTED are retried. If the server asks for a pause, the client
    waits exactly that long. Otherwise the pauses double. A random jitter shortens each by up to half,
    so that clients that were refused at the same time do not all retry at the same time.

    While the server starts, the client retries until the call's timeout, and these retries do not
    count. Only ``attempts=0`` prevents that.

    Attributes:
        attempts: The maximum number of retries after the first try.
        first: Seconds before the first retry.
        longest: The longest pause in seconds.

    Raises:
        InvalidArgument: A value is negative.

    Example:
        >>> client = camserve.Client("localhost:50051", retries=camserve.Retry(attempts=2, longest=1.0))
        >>> client.close()
        >>> camserve.Retry(attempts=0)  # no retries
        Retry(attempts=0, first=0.25, longest=5.0)
    """

    attempts: int = 4
    first: float = 0.25
    longest: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 0 or self.first < 0 or self.longest < 0:
            raise InvalidArgument(f"none of {self} may be negative")

    def pause(self, tries: int, error: CamserveError) -> float | None:
        """Return the seconds to wait before the next try, or None to give up.

        Args:
            tries: The number of tries so far that count.
            error: The error of the last try.

        Example:
            >>> retry = camserve.Retry(attempts=2)
            >>> full = camserve.ResourceExhausted("the queue is full", retry_after=3.0)
            >>> [retry.pause(tries, full) for tries in (1, 2, 3)]
            [3.0, 3.0, None]
        """
        if not self.attempts or tries > self.attempts or not _is_retryable(error):
            return None
        if error.retry_after is not None:
            return error.retry_after if error.retry_after <= MAX_PUSHBACK else None
        ceiling = min(self.longest, self.first * 2.0 ** max(tries - 1, 0))
        return ceiling * random.uniform(0.5, 1.0)  # noqa: S311 -- jitter is no secret


def _is_retryable(error: CamserveError) -> bool:
    forbidden = error.retry_after is not None and error.retry_after < 0
    return error.code in RETRYABLE and not too_large(error) and not forbidden


def is_starting(error: CamserveError) -> bool:
    """Return True if the server is starting, so that a retry does not count."""
    return error.reason == STARTING


def too_large(error: CamserveError) -> bool:
    """Return True if gRPC or the server refused a message for its size."""
    return "larger than max" in error.message  # its code, RESOURCE_EXHAUSTED, is also that of a full queue


class CallAttempts:
    """Count and remaining time of one call's tries, which share the call's deadline.

    Attributes:
        error: The error of the call: that of the last try, or of an earlier one that tells more.
    """

    def __init__(self, retry: Retry, timeout: float) -> None:
        self._retry = retry
        self._deadline = time.monotonic() + timeout
        self._tries = 0
        self._may_switch = True
        self.error: CamserveError | None = None

    def start(self) -> float | None:
        """Start a try; return its timeout in seconds, or None for no limit."""
        remaining = self._deadline - time.monotonic()
        return None if math.isinf(remaining) else max(remaining, 0.0)

    def pause(self, error: CamserveError, *, elsewhere: bool = False) -> float | None:
        """Return the seconds before the next try, or None if no retry or no time is left.

        Args:
            error: The error of the try.
            elsewhere: True if the next try uses another connection, which has not failed. The first such try is made
                at once.
        """
        self.error = more_telling(self.error, error)
        self._tries += not is_starting(error)
        pause = self._retry.pause(self._tries, error)
        if pause is not None and elsewhere and self._may_switch:
            self._may_switch, pause = False, 0.0
        return pause if pause is not None and time.monotonic() + pause < self._deadline else None


class StreamAttempts:
    """Count of the streams that broke without a response in between.

    Args:
        retry: The rule for opening another stream.
        timeout: Seconds that the server may take to start.

    Attributes:
        wait_for_start: True after a stream that broke because the server is starting.
    """

    def __init__(self, retry: Retry, timeout: float) -> None:
        self._retry = retry
        self._timeout = timeout
        self._breaks = 0
        self._starting_since = 0.0
        self._error: CamserveError | None = None
        self.wait_for_start = False

    def succeeded(self) -> None:
        """Reset the count after a response."""
        self._breaks, self.wait_for_start, self._error = 0, False, None

    def pause(self, error: CamserveError) -> float:
        """Return the seconds before the next stream.

        Raises:
            CamserveError: No retry is left, or the server does not start in time.
        """
        now = time.monotonic()
        self._error = more_telling(self._error, error)
        if not is_starting(error):
            self._breaks += 1
        elif not self.wait_for_start:
            self._starting_since = now
        self.wait_for_start = is_starting(error)
        waited = now - self._starting_since if self.wait_for_start else 0.0
        pause = self._retry.pause(self._breaks, error)
        if pause is None or waited + pause > self._timeout:
            raise self._error
        return pause
