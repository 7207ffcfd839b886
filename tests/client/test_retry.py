"""Retries: which errors are retried, and after which pause."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

import camserve
from camserve._transport.errors import to_readable
from camserve._transport.retry import CallAttempts, StreamAttempts

BUSY = camserve.Unavailable("busy")


@pytest.fixture(autouse=True)
def _stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("camserve._transport.retry.time", SimpleNamespace(monotonic=lambda: 0.0))


def test_pauses_double_up_to_the_longest_and_vary_by_a_half() -> None:
    retry = camserve.Retry(attempts=6, first=1, longest=5)

    for tries, ceiling in enumerate((1, 2, 4, 5, 5, 5), start=1):
        pauses = [retry.pause(tries, BUSY) for _ in range(200)]
        assert ceiling / 2 <= min(pauses) < ceiling * 0.6
        assert ceiling * 0.9 < max(pauses) <= ceiling


def test_number_of_retries_is_limited() -> None:
    assert camserve.Retry(attempts=2).pause(2, BUSY) is not None
    assert camserve.Retry(attempts=2).pause(3, BUSY) is None
    assert camserve.Retry(attempts=0).pause(1, BUSY) is None


def test_pause_requested_by_the_server_is_used() -> None:
    assert camserve.Retry().pause(1, camserve.Unavailable("", retry_after=7)) == 7
    assert camserve.Retry().pause(1, camserve.Unavailable("", retry_after=-1)) is None


@pytest.mark.parametrize(
    "error",
    [
        camserve.InvalidArgument(""),
        camserve.Internal(""),
        camserve.DeadlineExceeded(""),
        camserve.InvalidArgument("", retry_after=1),
        camserve.ResourceExhausted("Received message larger than max (9 vs. 4)"),
    ],
)
def test_error_that_would_recur_is_not_retried(error: camserve.CamserveError) -> None:
    assert camserve.Retry().pause(1, error) is None


def test_full_queue_is_retried() -> None:
    assert camserve.Retry().pause(1, camserve.ResourceExhausted("queue full")) is not None


@pytest.mark.parametrize("wrong", [{"attempts": -1}, {"first": -1}, {"longest": -0.1}])
def test_negative_values_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(camserve.InvalidArgument):
        camserve.Retry(**wrong)


def test_no_pause_exceeds_the_deadline() -> None:
    attempts = CallAttempts(camserve.Retry(), timeout=60)
    attempts.start()

    assert attempts.pause(camserve.Unavailable("", retry_after=59)) == 59
    assert attempts.pause(camserve.Unavailable("", retry_after=60)) is None


def test_retries_of_a_starting_server_do_not_count() -> None:
    starting = camserve.Unavailable("", retry_after=1, reason="STARTING")
    attempts = CallAttempts(camserve.Retry(attempts=1), timeout=60)

    assert [attempts.pause(starting) for _ in range(20)] == [1] * 20
    assert attempts.pause(BUSY) is not None
    assert attempts.pause(starting) == 1
    assert attempts.pause(BUSY) is None


def test_call_raises_the_error_of_the_try_that_tells_more() -> None:
    failed = "failed to connect to all addresses; last error: UNAVAILABLE: {}"
    closed = camserve.Unavailable(to_readable(failed.format("ipv4:127.0.0.1:1: Socket closed"), "localhost:1"))
    refused = camserve.Unavailable(to_readable(failed.format("ipv6:%5B::1%5D:1: Connection refused"), "localhost:1"))
    attempts, stream = CallAttempts(camserve.Retry(attempts=1), 60), StreamAttempts(camserve.Retry(attempts=1), 60)

    assert (attempts.pause(closed) is None, attempts.pause(refused)) == (False, None)
    assert attempts.error is closed
    stream.pause(closed)
    with pytest.raises(camserve.Unavailable, match="may want TLS"):
        stream.pause(refused)


def test_starting_server_is_not_tried_without_retries_or_beyond_the_deadline() -> None:
    starting = camserve.Unavailable("", retry_after=61, reason="STARTING")

    assert CallAttempts(camserve.Retry(attempts=0), timeout=600).pause(starting) is None
    assert CallAttempts(camserve.Retry(), timeout=60).pause(starting) is None


def test_starting_server_without_a_requested_pause_is_retried_after_the_first_pause() -> None:
    starting = camserve.Unavailable("", reason="STARTING")

    assert 1 <= (camserve.Retry(first=2).pause(0, starting) or 0) <= 2


def test_first_retry_on_another_connection_has_no_pause() -> None:
    attempts = CallAttempts(camserve.Retry(attempts=2, first=1), timeout=60)

    assert attempts.pause(BUSY, elsewhere=True) == 0
    assert attempts.pause(BUSY, elsewhere=True) != 0
    assert attempts.pause(BUSY, elsewhere=True) is None
    assert CallAttempts(camserve.Retry(attempts=0), timeout=60).pause(BUSY, elsewhere=True) is None


def test_try_gets_the_remaining_time() -> None:
    assert CallAttempts(camserve.Retry(), 10).start() == 10
    assert CallAttempts(camserve.Retry(), -1).start() == 0
    assert CallAttempts(camserve.Retry(), math.inf).start() is None
