"""What the window of a stream decides, without a stream."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest

import camserve
from camserve import _stream
from camserve.v1 import explain_pb2

QUESTION = explain_pb2.ExplainRequest()


def window(limit: int = 4, **retry: Any) -> _stream.InFlightWindow:
    return _stream.InFlightWindow(limit, camserve.Retry(**retry), timeout=30, on_error="return")


def filled(made: _stream.InFlightWindow, count: int) -> list[str]:
    """Take so many images and send them; return their ids."""
    for number in range(count):
        made.add(_stream.prepare_request(QUESTION, bytes([number + 1])))
    return [each.request_id for each in made.take_due()]


def answer(request_id: str) -> explain_pb2.ExplainStreamResponse:
    return explain_pb2.ExplainStreamResponse(
        request_id=request_id, response=explain_pb2.ExplainResponse(request_id=request_id)
    )


def ids(made: _stream.InFlightWindow) -> list[str]:
    return [each.request_id for each in made.pop_finished() if isinstance(each, camserve.Result)]


def test_there_is_room_until_the_limit_and_again_after_a_result_was_handed_on() -> None:
    made = window(limit=2)
    first, second = filled(made, 2)
    assert not made.has_room

    made.handle(answer(second))
    assert ids(made) == []
    assert not made.has_room

    made.handle(answer(first))
    assert ids(made) == [first, second]
    assert made.has_room


def test_it_is_done_when_the_last_was_handed_on() -> None:
    made = window()
    (only,) = filled(made, 1)
    made.add(_stream.prepare_request(QUESTION, _stream.END))
    assert not made.has_room
    assert not made.done

    made.handle(answer(only))
    assert ids(made) == [only]
    assert made.done


def test_it_does_not_wait_while_there_is_room() -> None:
    made = window(limit=2)
    filled(made, 1)
    assert made.seconds_to_wait() == 0

    filled(made, 1)
    assert made.seconds_to_wait() > 0


def test_it_waits_as_long_as_the_server_may_take_for_all_under_way() -> None:
    made = window(limit=3)
    one, *_ = filled(made, 3)
    assert 89 < made.seconds_to_wait() <= 90

    made.handle(answer(one))
    assert 59 < made.seconds_to_wait() <= 60


def test_without_a_limit_it_still_looks_up_now_and_then() -> None:
    made = _stream.InFlightWindow(1, camserve.Retry(), timeout=math.inf, on_error="return")
    filled(made, 1)

    assert made.seconds_to_wait() == 3600


def test_it_waits_only_until_something_is_to_be_sent_again() -> None:
    made = window(limit=1)
    (only,) = filled(made, 1)
    error = explain_pb2.Error(code=14, retry_after_ms=2000)

    made.handle(explain_pb2.ExplainStreamResponse(request_id=only, error=error))

    assert made.take_due() == []
    assert 1.9 < made.seconds_to_wait() <= 2


def test_a_stream_that_breaks_with_nothing_under_way_costs_nothing() -> None:
    made = window(attempts=0)
    (only,) = filled(made, 1)
    made.handle(answer(only))

    made.handle(camserve.Unavailable("drained"))

    assert ids(made) == [only]


def test_what_was_under_way_is_sent_again_in_its_order() -> None:
    made = window(first=0)
    sent = filled(made, 3)

    made.handle(camserve.Unavailable("gone"))

    assert [each.request_id for each in made.take_due()] == sent


def test_suspects_go_one_at_a_time_and_the_culprit_fails_alone() -> None:
    made = window(first=0)
    one, two, three = filled(made, 3)
    broken = camserve.Internal("broken")

    made.handle(broken)
    assert [each.request_id for each in made.take_due()] == [one]
    assert made.take_due() == []
    made.handle(answer(one))
    assert [each.request_id for each in made.take_due()] == [two]
    made.handle(broken)
    assert [each.request_id for each in made.take_due()] == [three]
    made.handle(answer(three))

    found = list(made.pop_finished())
    assert [type(each) for each in found] == [camserve.Result, camserve.Internal, camserve.Result]
    assert len(filled(made, 4)) == 4


@pytest.mark.parametrize("code", ["CANCELLED", "UNAUTHENTICATED", "UNIMPLEMENTED"])
def test_what_would_end_so_again_is_raised(code: str) -> None:
    made = window()
    filled(made, 1)
    error = camserve.CamserveError("no")
    error.code = grpc.StatusCode[code]

    with pytest.raises(camserve.CamserveError):
        made.handle(error)


def test_an_answer_resets_the_count_of_breaks() -> None:
    made = window(limit=99, attempts=1, first=0)
    sent = filled(made, 9)
    for each in sent:
        made.handle(camserve.Unavailable("gone"))
        assert made.take_due()
        made.handle(answer(each))

    assert ids(made) == sent


def progress(request_id: str, done: int, total: int) -> explain_pb2.ExplainStreamResponse:
    said = explain_pb2.Progress(rows_done=done, rows_total=total)
    return explain_pb2.ExplainStreamResponse(request_id=request_id, progress=said)


def test_progress_is_news_and_not_an_answer() -> None:
    made = window(limit=2)
    first, second = filled(made, 2)

    made.handle(progress(first, 64, 512))
    made.handle(progress(second, 1, 2))
    assert made.take_progress() == [(64, 512), (1, 2)]
    assert made.take_progress() == []
    assert ids(made) == []

    made.handle(answer(first))
    made.handle(progress(first, 512, 512))  # too late
    made.handle(progress(second, 2, 2))
    assert made.take_progress() == [(2, 2)]
    assert ids(made) == [first]


def test_progress_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(_stream.time, "monotonic", lambda: now[0])
    made = window(limit=1)
    (only,) = filled(made, 1)
    for _ in range(5):
        now[0] += 29
        made.handle(progress(only, 1, 9))
        made.handle(None)

    now[0] += 31
    with pytest.raises(camserve.DeadlineExceeded):
        made.handle(None)


def test_a_request_that_brings_the_server_down_half_way_is_not_sent_for_ever() -> None:
    made = window(limit=1, attempts=2, first=0)
    (only,) = filled(made, 1)
    gone = camserve.Unavailable("gone")

    for _ in range(2):
        made.handle(progress(only, 1, 9))
        made.handle(gone)
        assert made.take_due()
    made.handle(progress(only, 1, 9))

    with pytest.raises(camserve.Unavailable, match="gone"):
        made.handle(gone)


def test_what_only_a_newer_client_understands_is_ignored() -> None:
    made = window(limit=1)
    (only,) = filled(made, 1)

    made.handle(explain_pb2.ExplainStreamResponse(request_id=only))
    made.handle(answer(only))

    assert ids(made) == [only]
