"""Many images over one stream: both clients, against streams that go wrong in every way."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

import camserve


def images(count: int) -> list[bytes]:
    return [bytes([number]) for number in range(count)]


def classes(results: list[Any]) -> list[Any]:
    """Name what came back: the class of a result, the class of an error."""
    return [
        type(each).__name__ if isinstance(each, camserve.CamserveError) else each.predictions[0].class_index
        for each in results
    ]


async def collected(results: Any) -> list[Any]:
    return [each async for each in results]


async def collected_with_error(results: Any) -> list[Any]:
    """Return what came before the error that was raised, and the error."""
    found = []
    try:
        async for each in results:
            found.append(each)  # noqa: PERF401 -- a comprehension would be lost with the error
    except camserve.CamserveError as error:
        return [*found, error]
    pytest.fail("nothing was raised")


def streams(server: Any) -> int:
    return sum(call.rpc == "ExplainStream" for call in server.calls)


async def eventually(fact: Any) -> None:
    while not fact():  # noqa: ASYNC110 -- what is waited for has no event
        await asyncio.sleep(0.005)


async def test_results_come_in_the_order_of_the_images(client: Any, server: Any, replies: Any) -> None:
    def backwards(requests: Any, _: Any) -> Any:
        for batch in iter(lambda: list(itertools.islice(requests, 4)), []):
            yield from map(replies.reply, reversed(batch))

    server.streams = [backwards]

    found = await collected(client.explain_many(images(16), in_flight=4))

    assert classes(found) == list(range(16))


async def test_no_images_need_no_stream(client: Any, server: Any) -> None:
    assert await collected(client.explain_many([])) == []
    assert server.calls == []


async def test_options_go_with_every_image(client: Any) -> None:
    found = await collected(client.explain_many(images(2), methods=["a", "b"], overlay=None))

    assert [[e.method for e in each.explanations] for each in found] == [["a", "b"]] * 2
    assert found[0].explanations[0].overlay_picture is None
    assert found[0].request_id != found[1].request_id


async def test_images_are_read_only_so_far_ahead(client: Any, server: Any) -> None:
    taken = []

    def endless() -> Any:
        for number in itertools.count():
            taken.append(number)
            yield bytes([number])

    server.hold.clear()
    results = client.explain_many(endless(), in_flight=3)
    async with aclosing(results):
        first = asyncio.create_task(anext(results))
        await eventually(lambda: len(taken) == 3)
        server.hold.set()

        assert classes([await first]) == [0]
        for number in range(1, 20):
            assert classes([await anext(results)]) == [number]
            assert len(taken) <= number + 1 + 3


async def test_a_held_result_keeps_the_window_shut(client: Any, server: Any, replies: Any) -> None:
    seen: list[int] = []

    def first_last(requests: Any, _: Any) -> Any:
        first = next(requests)
        for each in itertools.islice(requests, 3):
            seen.append(each.request.image[0])
            yield replies.reply(each)
        yield replies.reply(first)
        yield from replies.in_order(requests, None)

    server.streams = [first_last]

    found = await collected(client.explain_many(images(9), in_flight=4))

    assert classes(found) == list(range(9))
    assert seen == [1, 2, 3]


async def test_leaving_early_ends_the_stream(client: Any, server: Any) -> None:
    async with aclosing(client.explain_many(itertools.repeat(b"1"), in_flight=4)) as results:
        async for _ in results:
            break

    assert server.stream_ended.wait(60)
    assert classes([await client.explain(b"\x05")]) == [5]


async def test_leaving_early_does_not_wait_for_a_busy_server(client: Any, server: Any, replies: Any) -> None:
    def once(requests: Any, context: Any) -> Any:
        yield from itertools.islice(map(replies.reply, requests), 1)
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait()

    server.streams = [once]
    async with aclosing(client.explain_many(images(8))) as results:
        await anext(results)

    assert server.stream_ended.wait(60)


async def test_all_done_the_stream_is_ended_in_good_order(client: Any, server: Any, replies: Any) -> None:
    drained = threading.Event()

    def whole(requests: Any, context: Any) -> Any:
        yield from replies.in_order(requests, context)
        drained.set()

    server.streams = [whole]
    await collected(client.explain_many(images(3)))

    assert drained.wait(5)


async def test_an_error_is_raised_in_its_place(client: Any, server: Any, replies: Any) -> None:
    def third_is_bad(requests: Any, _: Any) -> Any:
        for each in requests:
            bad = each.request.image == b"\x02"
            yield replies.error(each, grpc.StatusCode.NOT_FOUND) if bad else replies.reply(each)

    server.streams = [third_is_bad]

    found = await collected_with_error(client.explain_many(images(5)))

    assert classes(found) == [0, 1, "NotFound"]
    assert found[2].request_id.endswith("-2")
    assert server.stream_ended.wait(60)


async def test_errors_may_be_returned_instead(client: Any, server: Any, replies: Any, tmp_path: Any) -> None:
    def odd_are_bad(requests: Any, _: Any) -> Any:
        from camserve.v1 import explain_pb2  # noqa: PLC0415 -- used here only

        wrong = [explain_pb2.FieldViolation(field="image", description="no image")]
        for each in requests:
            if each.request.image[0] % 2:
                yield replies.error(each, grpc.StatusCode.INVALID_ARGUMENT, fields=wrong)
            else:
                yield replies.reply(each)

    server.streams = [odd_are_bad]
    given = [b"\x00", b"\x01", tmp_path / "missing.jpg", b"\x02"]

    found = await collected(client.explain_many(given, on_error="return"))

    assert classes(found) == [0, "InvalidArgument", "InvalidArgument", 2]
    assert found[1].fields == {"image": "no image"}
    assert "cannot read" in str(found[2])


async def test_a_garbled_answer_is_the_error_of_its_image(client: Any, server: Any, replies: Any) -> None:
    def garbled(requests: Any, _: Any) -> Any:
        for each in requests:
            answer = replies.reply(each)
            if each.request.image == b"\x00":
                answer.response.explanations[0].heatmap.height = 9
            yield answer

    server.streams = [garbled]

    found = await collected(client.explain_many(images(2), on_error="return"))

    assert classes(found) == ["Internal", 1]


@pytest.mark.parametrize("code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED"])
async def test_an_image_that_was_refused_for_now_is_sent_again(
    client: Any, server: Any, replies: Any, code: str
) -> None:
    def refuse_first(requests: Any, _: Any) -> Any:
        refused = set()
        for each in requests:
            if each.request_id in refused:
                yield replies.reply(each)
            else:
                refused.add(each.request_id)
                yield replies.error(each, grpc.StatusCode[code], retry_after_ms=20)

    server.streams = [refuse_first]

    found = await collected(client.explain_many(images(6), in_flight=2))

    assert classes(found) == list(range(6))
    assert streams(server) == 1


async def test_an_image_is_not_sent_again_for_ever(client: Any, server: Any, replies: Any) -> None:
    sent: list[str] = []

    def full(requests: Any, _: Any) -> Any:
        for each in requests:
            sent.append(each.request_id)
            yield replies.error(each, grpc.StatusCode.RESOURCE_EXHAUSTED)

    server.streams = [full]

    found = await collected(client.explain_many(images(1), on_error="return"))

    assert classes(found) == ["ResourceExhausted"]
    assert len(sent) == 5


async def test_a_pause_longer_than_the_patience_is_not_waited_for(client: Any, server: Any, replies: Any) -> None:
    def later(requests: Any, _: Any) -> Any:
        for each in requests:
            yield replies.error(each, grpc.StatusCode.UNAVAILABLE, retry_after_ms=60_000)

    server.streams = [later]

    found = await collected(client.explain_many(images(2), on_error="return", timeout=5))

    assert classes(found) == ["Unavailable", "Unavailable"]


def breaking(after: int, code: grpc.StatusCode, replies: Any) -> Any:
    """Make a stream that answers so many and then breaks, with others under way."""

    def serve(requests: Any, context: Any) -> Any:
        yield from map(replies.reply, itertools.islice(requests, after))
        next(requests)
        context.abort(code, "broken")

    return serve


async def test_a_stream_that_breaks_is_opened_again(client: Any, server: Any, replies: Any) -> None:
    server.streams = [breaking(after, grpc.StatusCode.UNAVAILABLE, replies) for after in (3, 0, 2, 0, 0, 0)]

    found = await collected(client.explain_many(images(20), in_flight=4))

    assert classes(found) == list(range(20))
    assert streams(server) == 7


async def test_a_stream_that_ends_too_early_is_opened_again(client: Any, server: Any, replies: Any) -> None:
    server.streams = [lambda requests, _: map(replies.reply, itertools.islice(requests, 2))]

    found = await collected(client.explain_many(images(8), in_flight=4))

    assert classes(found) == list(range(8))
    assert streams(server) == 2


@pytest.mark.parametrize("on_error", ["raise", "return"])
async def test_a_server_that_is_lost_is_raised(client: Any, server: Any, replies: Any, on_error: str) -> None:
    server.streams = [breaking(0, grpc.StatusCode.UNAVAILABLE, replies)] * 9

    with pytest.raises(camserve.Unavailable):
        await collected(client.explain_many(images(3), on_error=on_error))

    assert streams(server) == 5


async def test_nothing_at_the_address_is_raised(connect: Any) -> None:
    with pytest.raises(camserve.Unavailable, match="no server answers"):
        await collected(connect("127.0.0.1:1").explain_many(images(3)))


@pytest.mark.parametrize("code", ["UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"])
async def test_a_stream_that_is_not_allowed_is_tried_once(client: Any, server: Any, replies: Any, code: str) -> None:
    server.streams = [breaking(0, grpc.StatusCode[code], replies)] * 9

    with pytest.raises(camserve.CamserveError) as caught:
        await collected(client.explain_many(images(1), on_error="return"))

    assert caught.value.code.name == code
    assert streams(server) == 1


async def test_a_refusal_in_the_middle_of_writing_is_not_lost(client: Any, server: Any, replies: Any) -> None:
    server.streams = [breaking(0, grpc.StatusCode.PERMISSION_DENIED, replies)] * 9

    with pytest.raises(camserve.PermissionDenied):
        await collected(client.explain_many(images(8)))

    # grpc.aio may lose the status of a stream that is being written to, but not of the next.
    assert streams(server) <= 2


@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "INTERNAL", "UNKNOWN"])
async def test_an_image_that_breaks_the_stream_fails_alone(client: Any, server: Any, code: str, replies: Any) -> None:
    def fragile(requests: Any, context: Any) -> Any:
        for each in requests:
            if each.request.image == b"\x03":
                # What the server read with it is lost too.
                context.abort(grpc.StatusCode[code], "message larger than max")
            yield replies.reply(each)

    server.streams = [fragile] * 20

    found = await collected(client.explain_many(images(8), in_flight=8, on_error="return"))

    assert [each for each in classes(found) if isinstance(each, int)] == [0, 1, 2, 4, 5, 6, 7]
    assert found[3].code.name == code


async def test_silence_has_an_end(client: Any, server: Any, replies: Any) -> None:
    def two_then_silent(requests: Any, context: Any) -> Any:
        yield from map(replies.reply, itertools.islice(requests, 2))
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait()

    server.streams = [two_then_silent]

    found = await collected_with_error(client.explain_many(images(5), timeout=1))

    assert classes(found) == [0, 1, "DeadlineExceeded"]
    assert str(found[2]).startswith("the server sent nothing for ")
    assert server.stream_ended.wait(60)


async def test_slow_consumer_does_not_count_as_a_silent_server(client: Any, monkeypatch: Any) -> None:
    found: list[Any] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + (100 if len(found) >= 2 else 0))
    monkeypatch.setattr("camserve._stream.time", clock)
    async for each in client.explain_many(images(6), in_flight=2, timeout=60):
        found.append(each)  # noqa: PERF401 -- the clock looks at it

    assert classes(found) == list(range(6))


async def test_an_answer_to_nothing_is_ignored(client: Any, server: Any, replies: Any) -> None:
    def twice(requests: Any, _: Any) -> Any:
        for each in requests:
            yield replies.reply(each)
            yield replies.reply(each)

    server.streams = [twice]

    assert classes(await collected(client.explain_many(images(5)))) == list(range(5))


async def test_an_error_of_the_iterable_passes_through(client: Any, server: Any) -> None:
    def broken() -> Any:
        yield b"1"
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await collected(client.explain_many(broken(), in_flight=1))

    assert server.stream_ended.wait(60)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ("folder", {}),
        (b"bytes", {}),
        ([b"1"], {"in_flight": 0}),
        ([b"1"], {"on_error": "ignore"}),
        ([b"1"], {"top_k": 99}),
    ],
)
def test_what_is_wrong_is_said_before_the_first_result(given: Any, options: Any) -> None:
    with camserve.Client("a:1") as client, pytest.raises(camserve.InvalidArgument):
        client.explain_many(given, **options)
    with pytest.raises(camserve.InvalidArgument):
        camserve.AsyncClient("a:1").explain_many(given, **options)


async def test_a_bar_shows_how_far_it_is(
    client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    await collected(client.explain_many(images(3), progress=True))

    shown = capsys.readouterr()
    assert "3/3" in shown.err
    assert shown.out == ""


async def test_closing_the_client_ends_a_stream(connect: Any, server: Any) -> None:
    client = connect(server.address)
    server.hold.clear()
    results = client.explain_many(images(3))
    first = asyncio.create_task(anext(results))
    await asyncio.to_thread(server.called.wait, 5)

    await client.close()

    with pytest.raises(camserve.Cancelled):
        await first
    await results.aclose()


async def test_a_closed_client_opens_no_stream(connect: Any, server: Any) -> None:
    client = connect(server.address)
    await client.models()
    await client.close()

    with pytest.raises(camserve.FailedPrecondition):
        await collected(client.explain_many(images(3)))


async def test_images_may_come_asynchronously(server: Any) -> None:
    async def arriving() -> Any:
        for each in images(5):
            await asyncio.sleep(0)
            yield each

    async with camserve.AsyncClient(server.address) as client:
        found = await collected(client.explain_many(arriving(), in_flight=2))

    assert classes(found) == list(range(5))
