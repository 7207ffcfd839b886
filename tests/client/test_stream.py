"""Decisions of the in-flight window, tested without a stream."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

import camserve
from camserve._transport import retry as transport_retry
from camserve._transport import stream
from camserve._transport.stream import END, InFlightWindow, StreamBreak, prepare_request
from camserve.v1 import explain_pb2

QUESTION = explain_pb2.ExplainRequest()


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The window's clock, which stands still."""
    seconds = [1000.0]
    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(transport_retry, "time", stream.time)
    return seconds


def window(limit: int = 4, **retry: Any) -> InFlightWindow:
    return InFlightWindow(limit, camserve.Retry(**retry), timeout=60, on_error="return")


def send(sending: InFlightWindow, count: int) -> list[str]:
    """Add images and mark their requests as sent; return the request ids."""
    for number in range(count):
        sending.add(prepare_request(QUESTION, bytes([number + 1])))
    return due_ids(sending)


def due_ids(sending: InFlightWindow) -> list[str]:
    return [request.request_id for request in sending.take_due()]


def end_stream(sending: InFlightWindow, error: camserve.CamserveError) -> None:
    """End the only stream, on which every request in flight was sent."""
    sending.handle(StreamBreak(error, frozenset(sending._slots)))


def response(request_id: str) -> explain_pb2.ExplainStreamResponse:
    return explain_pb2.ExplainStreamResponse(
        request_id=request_id, response=explain_pb2.ExplainResponse(request_id=request_id)
    )


def finished_ids(sending: InFlightWindow) -> list[str]:
    return [outcome.request_id for outcome in sending.pop_finished() if isinstance(outcome, camserve.Result)]


def test_window_has_no_room_while_its_requests_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_WINDOW_BYTES", 2000)
    sending = window()
    rooms = []
    for _ in range(2):
        sending.add(prepare_request(QUESTION, bytes(1000)))
        rooms.append(sending.has_room)
    first, _ = due_ids(sending)
    sending.handle(response(first))

    assert rooms == [True, False]
    assert sending.has_room
    sending.add(prepare_request(QUESTION, bytes(5000)))  # one larger than the limit is read
    assert not sending.has_room


def test_window_has_room_below_its_limit() -> None:
    sending = window(limit=2)
    first, second = send(sending, 2)
    assert not sending.has_room

    sending.handle(response(second))
    assert finished_ids(sending) == []
    assert not sending.has_room

    sending.handle(response(first))
    assert finished_ids(sending) == [first, second]
    assert sending.has_room


def test_window_is_done_after_the_last_result_is_yielded() -> None:
    sending = window()
    (only,) = send(sending, 1)
    sending.add(prepare_request(QUESTION, END))
    assert not sending.has_room
    assert not sending.done

    sending.handle(response(only))
    assert finished_ids(sending) == [only]
    assert sending.done


def test_window_with_room_does_not_wait() -> None:
    sending = window(limit=2)
    send(sending, 1)
    assert sending.seconds_to_wait() == 0

    send(sending, 1)
    assert sending.seconds_to_wait() > 0


def test_wait_covers_the_timeouts_of_all_images_in_flight() -> None:
    sending = window(limit=3)
    first, *_ = send(sending, 3)
    assert sending.seconds_to_wait() == 180

    sending.handle(response(first))
    assert sending.seconds_to_wait() == 120


def test_wait_without_a_timeout_is_one_hour() -> None:
    sending = InFlightWindow(1, camserve.Retry(), timeout=math.inf, on_error="return")
    send(sending, 1)

    assert sending.seconds_to_wait() == 3600


def test_wait_ends_when_a_retry_is_due() -> None:
    sending = window(limit=1)
    (only,) = send(sending, 1)
    error = explain_pb2.Error(code=14, retry_after_ms=2000)

    sending.handle(explain_pb2.ExplainStreamResponse(request_id=only, error=error))

    assert sending.take_due() == []
    assert 1.9 < sending.seconds_to_wait() <= 2


def test_break_without_images_in_flight_is_ignored() -> None:
    sending = window(attempts=0)
    (only,) = send(sending, 1)
    sending.handle(response(only))

    end_stream(sending, camserve.Unavailable("drained"))

    assert finished_ids(sending) == [only]


def test_images_in_flight_are_sent_again_in_order() -> None:
    sending = window(first=0)
    sent = send(sending, 3)

    end_stream(sending, camserve.Unavailable("gone"))

    assert due_ids(sending) == sent


def test_suspects_are_sent_one_at_a_time_and_only_the_culprit_fails() -> None:
    sending = window(first=0)
    first, second, third = send(sending, 3)
    broken = camserve.Internal("broken")

    end_stream(sending, broken)
    assert due_ids(sending) == [first]
    assert sending.take_due() == []
    sending.handle(response(first))
    assert due_ids(sending) == [second]
    end_stream(sending, broken)
    assert due_ids(sending) == [third]
    sending.handle(response(third))

    assert [type(outcome) for outcome in sending.pop_finished()] == [
        camserve.Result,
        camserve.Internal,
        camserve.Result,
    ]
    assert len(send(sending, 4)) == 4


@pytest.mark.parametrize("code", ["CANCELLED", "UNAUTHENTICATED", "UNIMPLEMENTED"])
def test_fatal_status_is_raised(code: str) -> None:
    sending = window()
    send(sending, 1)
    error = camserve.CamserveError("no")
    error.code = grpc.StatusCode[code]

    with pytest.raises(camserve.CamserveError):
        end_stream(sending, error)


def test_response_resets_the_count_of_breaks() -> None:
    sending = window(limit=99, attempts=1, first=0)
    sent = send(sending, 9)
    for request_id in sent:
        end_stream(sending, camserve.Unavailable("gone"))
        assert sending.take_due()
        sending.handle(response(request_id))

    assert finished_ids(sending) == sent


def progress(request_id: str, done: int, total: int) -> explain_pb2.ExplainStreamResponse:
    rows = explain_pb2.Progress(rows_done=done, rows_total=total)
    return explain_pb2.ExplainStreamResponse(request_id=request_id, progress=rows)


def test_progress_is_reported_once_and_is_not_a_result() -> None:
    sending = window(limit=2)
    first, second = send(sending, 2)

    sending.handle(progress(first, 64, 512))
    sending.handle(progress(second, 1, 2))
    assert sending.take_progress() == [(64, 512), (1, 2)]
    assert sending.take_progress() == []
    assert finished_ids(sending) == []

    sending.handle(response(first))
    sending.handle(progress(first, 512, 512))  # too late: it is finished
    sending.handle(progress(second, 2, 2))
    assert sending.take_progress() == [(2, 2)]
    assert finished_ids(sending) == [first]


def test_progress_counts_as_activity_of_the_server(now: list[float]) -> None:
    sending = window(limit=1)
    (only,) = send(sending, 1)
    for _ in range(5):
        now[0] += 59
        sending.handle(progress(only, 1, 9))
        sending.handle(None)

    now[0] += 61
    with pytest.raises(camserve.DeadlineExceeded):
        sending.handle(None)


def test_request_that_crashes_the_server_halfway_is_not_sent_forever() -> None:
    sending = window(limit=1, attempts=2, first=0)
    (only,) = send(sending, 1)
    gone = camserve.Unavailable("gone")

    for _ in range(2):
        sending.handle(progress(only, 1, 9))
        end_stream(sending, gone)
        assert sending.take_due()
    sending.handle(progress(only, 1, 9))

    with pytest.raises(camserve.Unavailable, match="gone"):
        end_stream(sending, gone)


def test_response_of_an_unknown_kind_is_ignored() -> None:
    sending = window(limit=1)
    (only,) = send(sending, 1)

    sending.handle(explain_pb2.ExplainStreamResponse(request_id=only))
    sending.handle(response(only))

    assert finished_ids(sending) == [only]


def starting() -> camserve.Unavailable:
    return camserve.Unavailable("starting", retry_after=10, reason="STARTING")


def test_only_requests_of_the_stream_that_ended_are_sent_again() -> None:
    sending = window(first=0)
    first, second, third = send(sending, 3)

    sending.handle(StreamBreak(camserve.Unavailable("gone"), frozenset({second})))

    assert due_ids(sending) == [second]
    for request_id in (first, second, third):
        sending.handle(response(request_id))
    assert finished_ids(sending) == [first, second, third]


def test_image_that_crashes_every_process_is_not_sent_forever() -> None:
    """Other processes answer other images meanwhile, so the server is not lost."""
    sending = window(limit=99, attempts=1, first=0)
    culprit = send(sending, 1)[0]
    breaks = 0
    while not (outcomes := list(sending.pop_finished())):
        sending.handle(response(send(sending, 1)[0]))
        sending.handle(StreamBreak(camserve.Unavailable("gone"), frozenset({culprit})))
        breaks += 1
        assert due_ids(sending) in ([culprit], [])

    assert [type(outcome) for outcome in outcomes] == [camserve.Unavailable] + [camserve.Result] * breaks
    assert breaks == 11


def test_server_that_starts_is_tried_until_the_timeout(now: list[float]) -> None:
    sending = window(attempts=1)
    send(sending, 1)
    assert not sending.server_starts
    for _ in range(6):
        end_stream(sending, starting())
        assert sending.server_starts
        assert sending.take_due() == []
        now[0] += 10
        assert sending.take_due()

    with pytest.raises(camserve.Unavailable, match="starting"):
        end_stream(sending, starting())


def test_start_of_the_server_ends_with_the_first_response(now: list[float]) -> None:
    sending = window(limit=99, attempts=1)
    for _ in range(9):
        (only,) = send(sending, 1)
        end_stream(sending, starting())
        now[0] += 20
        assert due_ids(sending) == [only]
        sending.handle(response(only))
        assert not sending.server_starts


def test_starting_server_is_not_tried_again_without_retries() -> None:
    sending = window(attempts=0)
    send(sending, 1)

    with pytest.raises(camserve.Unavailable, match="starting"):
        end_stream(sending, starting())
