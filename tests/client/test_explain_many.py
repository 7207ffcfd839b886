"""Many images over one stream: both clients, against streams that fail in many ways."""

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
from support import wait_in_loop_until


def images(count: int) -> list[bytes]:
    return [bytes([number]) for number in range(count)]


def classes(outcomes: list[Any]) -> list[Any]:
    """Return the class index of each result, and the class name of each error."""
    return [
        type(outcome).__name__ if isinstance(outcome, camserve.CamserveError) else outcome.predictions[0].class_index
        for outcome in outcomes
    ]


async def collect(results: Any) -> list[Any]:
    return [result async for result in results]


async def collect_with_error(results: Any, outcomes: list[Any] | None = None) -> list[Any]:
    """Return the results before the error, which are added to a list, and the error."""
    outcomes = [] if outcomes is None else outcomes
    try:
        async for result in results:
            outcomes.append(result)
    except camserve.CamserveError as error:
        return [*outcomes, error]
    pytest.fail("no error was raised")


def count_streams(server: Any) -> int:
    return sum(call.rpc == "ExplainStream" for call in server.calls)


async def test_results_are_in_the_order_of_the_images(client: Any, server: Any, replies: Any) -> None:
    def backwards(requests: Any, _: Any) -> Any:
        for batch in iter(lambda: list(itertools.islice(requests, 4)), []):
            yield from map(replies.reply, reversed(batch))

    server.streams = [backwards]

    outcomes = await collect(client.explain_many(images(16), in_flight=4))

    assert classes(outcomes) == list(range(16))


async def test_image_may_have_options_of_its_own(client: Any, server: Any, replies: Any) -> None:
    seen: list[Any] = []

    def serve(requests: Any, _: Any) -> Any:
        for item in requests:
            seen.append(item.request)
            yield replies.reply(item)

    server.streams = [serve]
    items = [b"\x01", {"image": b"\x02", "targets": ["cat"], "methods": "saliency"}, {"image": b"\x03"}]

    assert classes(await collect(client.explain_many(items, model="large", methods=["layercam"]))) == [1, 2, 3]
    assert [request.image for request in seen] == [b"\x01", b"\x02", b"\x03"]
    assert {request.model for request in seen} == {"large"}
    assert [request.methods[0].name for request in seen] == ["layercam", "saliency", "layercam"]
    assert [[target.label for target in request.targets] for request in seen] == [[], ["cat"], []]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"targets": ["cat"]}, 'a dict with "image"'),
        ({"image": b"\x01", "alpha": "x"}, "wrong type"),
        ({"image": 7}, "image"),
    ],
)
async def test_item_with_wrong_options_is_its_own_error(client: Any, item: Any, message: str) -> None:
    (error,) = await collect(client.explain_many([item], on_error="return"))

    assert isinstance(error, camserve.InvalidArgument)
    assert message in str(error)


async def test_one_dict_is_not_an_iterable_of_images(client: Any) -> None:
    with pytest.raises(camserve.InvalidArgument, match="takes several images"):
        await collect(client.explain_many({"image": b"\x01"}))


async def test_no_stream_is_opened_without_images(client: Any, server: Any) -> None:
    assert await collect(client.explain_many([])) == []
    assert server.calls == []


async def test_options_are_sent_with_every_image(client: Any) -> None:
    outcomes = await collect(client.explain_many(images(2), methods=["a", "b"], overlay=None))

    assert [[e.method for e in result.explanations] for result in outcomes] == [["a", "b"]] * 2
    assert outcomes[0].explanations[0].overlay_picture is None
    assert outcomes[0].request_id != outcomes[1].request_id


async def test_images_are_read_ahead_up_to_the_limit(client: Any, server: Any) -> None:
    read = []

    def endless() -> Any:
        for number in itertools.count():
            read.append(number)
            yield bytes([number])

    server.hold.clear()
    results = client.explain_many(endless(), in_flight=3)
    async with aclosing(results):
        first = asyncio.create_task(anext(results))
        await wait_in_loop_until(lambda: len(read) == 3)
        server.hold.set()

        assert classes([await first]) == [0]
        for number in range(1, 20):
            assert classes([await anext(results)]) == [number]
            assert len(read) <= number + 1 + 3


async def test_missing_first_result_stops_reading_ahead(client: Any, server: Any, replies: Any) -> None:
    seen: list[int] = []

    def first_last(requests: Any, _: Any) -> Any:
        first = next(requests)
        for request in itertools.islice(requests, 3):
            seen.append(request.request.image[0])
            yield replies.reply(request)
        yield replies.reply(first)
        yield from replies.in_order(requests, None)

    server.streams = [first_last]

    outcomes = await collect(client.explain_many(images(9), in_flight=4))

    assert classes(outcomes) == list(range(9))
    assert seen == [1, 2, 3]


async def test_leaving_early_ends_the_stream(client: Any, server: Any) -> None:
    async with aclosing(client.explain_many(itertools.repeat(b"1"), in_flight=4)) as results:
        async for _ in results:
            break

    assert server.stream_ended.wait()
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

    assert server.stream_ended.wait()


async def test_finished_stream_is_not_cancelled(client: Any, server: Any, replies: Any) -> None:
    drained = threading.Event()

    def whole(requests: Any, context: Any) -> Any:
        yield from replies.in_order(requests, context)
        drained.set()

    server.streams = [whole]
    await collect(client.explain_many(images(3)))

    assert drained.wait()


async def test_error_of_an_image_is_raised_in_its_place(client: Any, server: Any, replies: Any) -> None:
    def third_is_bad(requests: Any, _: Any) -> Any:
        for request in requests:
            bad = request.request.image == b"\x02"
            yield replies.error(request, grpc.StatusCode.NOT_FOUND) if bad else replies.reply(request)

    server.streams = [third_is_bad]

    outcomes = await collect_with_error(client.explain_many(images(5)))

    assert classes(outcomes) == [0, 1, "NotFound"]
    assert outcomes[2].request_id.endswith("-2")
    assert server.stream_ended.wait()


async def test_errors_can_be_returned(client: Any, server: Any, replies: Any, tmp_path: Any) -> None:
    def odd_are_bad(requests: Any, _: Any) -> Any:
        from camserve.v1 import explain_pb2  # noqa: PLC0415 -- used here only

        wrong = [explain_pb2.FieldViolation(field="image", description="no image")]
        for request in requests:
            if request.request.image[0] % 2:
                yield replies.error(request, grpc.StatusCode.INVALID_ARGUMENT, fields=wrong)
            else:
                yield replies.reply(request)

    server.streams = [odd_are_bad]
    inputs = [b"\x00", b"\x01", tmp_path / "missing.jpg", b"\x02"]

    outcomes = await collect(client.explain_many(inputs, on_error="return"))

    assert classes(outcomes) == [0, "InvalidArgument", "InvalidArgument", 2]
    assert outcomes[1].fields == {"image": "no image"}
    assert "cannot read" in str(outcomes[2])


async def test_malformed_response_is_the_error_of_its_image(client: Any, server: Any, replies: Any) -> None:
    def malformed(requests: Any, _: Any) -> Any:
        for request in requests:
            answer = replies.reply(request)
            if request.request.image == b"\x00":
                answer.response.explanations[0].heatmap.height = 9
            yield answer

    server.streams = [malformed]

    outcomes = await collect(client.explain_many(images(2), on_error="return"))

    assert classes(outcomes) == ["Internal", 1]


@pytest.mark.parametrize("code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED"])
async def test_image_with_a_transient_error_is_sent_again(client: Any, server: Any, replies: Any, code: str) -> None:
    def refuse_first(requests: Any, _: Any) -> Any:
        refused = set()
        for request in requests:
            if request.request_id in refused:
                yield replies.reply(request)
            else:
                refused.add(request.request_id)
                yield replies.error(request, grpc.StatusCode[code], retry_after_ms=20)

    server.streams = [refuse_first]

    outcomes = await collect(client.explain_many(images(6), in_flight=2))

    assert classes(outcomes) == list(range(6))
    assert count_streams(server) == 1


async def test_number_of_retries_of_an_image_is_limited(client: Any, server: Any, replies: Any) -> None:
    sent: list[str] = []

    def full(requests: Any, _: Any) -> Any:
        for request in requests:
            sent.append(request.request_id)
            yield replies.error(request, grpc.StatusCode.RESOURCE_EXHAUSTED)

    server.streams = [full]

    outcomes = await collect(client.explain_many(images(1), on_error="return"))

    assert classes(outcomes) == ["ResourceExhausted"]
    assert len(sent) == 5


async def test_pause_longer_than_the_timeout_is_an_error(client: Any, server: Any, replies: Any) -> None:
    def later(requests: Any, _: Any) -> Any:
        for request in requests:
            yield replies.error(request, grpc.StatusCode.UNAVAILABLE, retry_after_ms=61_000)

    server.streams = [later]

    outcomes = await collect(client.explain_many(images(2), on_error="return", timeout=60))

    assert classes(outcomes) == ["Unavailable", "Unavailable"]


def breaking(after: int, code: grpc.StatusCode, replies: Any) -> Any:
    """Return a stream that answers a number of requests and then breaks while another is in flight."""

    def serve(requests: Any, context: Any) -> Any:
        yield from map(replies.reply, itertools.islice(requests, after))
        next(requests)
        context.abort(code, "broken")

    return serve


async def test_broken_stream_is_opened_again(client: Any, server: Any, replies: Any) -> None:
    server.streams = [breaking(after, grpc.StatusCode.UNAVAILABLE, replies) for after in (3, 0, 2, 0, 0, 0)]

    outcomes = await collect(client.explain_many(images(20), in_flight=4))

    assert classes(outcomes) == list(range(20))
    assert count_streams(server) == 7


async def test_stream_that_ends_too_early_is_opened_again(client: Any, server: Any, replies: Any) -> None:
    server.streams = [lambda requests, _: map(replies.reply, itertools.islice(requests, 2))]

    outcomes = await collect(client.explain_many(images(8), in_flight=4))

    assert classes(outcomes) == list(range(8))
    assert count_streams(server) == 2


@pytest.mark.parametrize("on_error", ["raise", "return"])
async def test_loss_of_the_server_is_raised(client: Any, server: Any, replies: Any, on_error: str) -> None:
    server.streams = [breaking(0, grpc.StatusCode.UNAVAILABLE, replies)] * 9

    with pytest.raises(camserve.Unavailable):
        await collect(client.explain_many(images(3), on_error=on_error))

    assert count_streams(server) == 5


async def test_address_without_a_server_is_raised(connect: Any) -> None:
    with pytest.raises(camserve.Unavailable, match="no server answers"):
        await collect(connect("127.0.0.1:1").explain_many(images(3)))


@pytest.mark.parametrize("code", ["UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"])
async def test_forbidden_stream_is_not_retried(client: Any, server: Any, replies: Any, code: str) -> None:
    server.streams = [breaking(0, grpc.StatusCode[code], replies)] * 9

    with pytest.raises(camserve.CamserveError) as caught:
        await collect(client.explain_many(images(1), on_error="return"))

    assert caught.value.code.name == code
    assert count_streams(server) == 1


async def test_status_sent_during_a_write_is_not_lost(client: Any, server: Any, replies: Any) -> None:
    server.streams = [breaking(0, grpc.StatusCode.PERMISSION_DENIED, replies)] * 9

    with pytest.raises(camserve.PermissionDenied):
        await collect(client.explain_many(images(8)))

    # grpc.aio may lose the status of a stream during a write, but not that of the next stream.
    assert count_streams(server) <= 2


@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "INTERNAL", "UNKNOWN"])
async def test_only_the_image_that_breaks_the_stream_fails(client: Any, server: Any, code: str, replies: Any) -> None:
    def fragile(requests: Any, context: Any) -> Any:
        for request in requests:
            if request.request.image == b"\x03":
                # The requests that the server read before this one are lost too.
                context.abort(grpc.StatusCode[code], "message larger than max")
            yield replies.reply(request)

    server.streams = [fragile] * 20

    outcomes = await collect(client.explain_many(images(8), in_flight=8, on_error="return"))

    assert [index for index in classes(outcomes) if isinstance(index, int)] == [0, 1, 2, 4, 5, 6, 7]
    assert outcomes[3].code.name == code


async def test_silence_of_the_server_is_limited(client: Any, server: Any, replies: Any, monkeypatch: Any) -> None:
    outcomes: list[Any] = []
    seconds = itertools.accumulate(1000 * (len(outcomes) == 2) for _ in itertools.count())
    monkeypatch.setattr("camserve._transport.stream.time", SimpleNamespace(monotonic=lambda: next(seconds)))

    def two_then_silent(requests: Any, context: Any) -> Any:
        yield from map(replies.reply, itertools.islice(requests, 2))
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait()

    server.streams = [two_then_silent]

    found = await collect_with_error(client.explain_many(images(5), timeout=60), outcomes)

    assert classes(found) == [0, 1, "DeadlineExceeded"]
    assert str(found[2]).startswith("the server sent nothing for ")
    assert server.stream_ended.wait()


async def test_slow_consumer_does_not_count_as_a_silent_server(client: Any, monkeypatch: Any) -> None:
    outcomes: list[Any] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + (100 if len(outcomes) >= 2 else 0))
    monkeypatch.setattr("camserve._transport.stream.time", clock)
    async for result in client.explain_many(images(6), in_flight=2, timeout=60):
        outcomes.append(result)  # noqa: PERF401 -- the clock depends on it

    assert classes(outcomes) == list(range(6))


async def test_second_response_to_a_request_is_ignored(client: Any, server: Any, replies: Any) -> None:
    def twice(requests: Any, _: Any) -> Any:
        for request in requests:
            yield replies.reply(request)
            yield replies.reply(request)

    server.streams = [twice]

    assert classes(await collect(client.explain_many(images(5)))) == list(range(5))


async def test_error_of_the_iterable_is_raised(client: Any, server: Any) -> None:
    def broken() -> Any:
        yield b"1"
        raise KeyError("iterable")

    with pytest.raises(KeyError, match="iterable"):
        await collect(client.explain_many(broken(), in_flight=1))

    assert server.stream_ended.wait()


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ("folder", {}),
        (b"bytes", {}),
        ([b"1"], {"in_flight": 0}),
        ([b"1"], {"on_error": "ignore"}),
        ([b"1"], {"top_k": 99}),
    ],
)
def test_invalid_arguments_are_refused_before_the_first_result(inputs: Any, options: Any) -> None:
    with camserve.Client("a:1") as client, pytest.raises(camserve.InvalidArgument):
        client.explain_many(inputs, **options)
    with pytest.raises(camserve.InvalidArgument):
        camserve.AsyncClient("a:1").explain_many(inputs, **options)


async def test_progress_bar_counts_images(
    client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    await collect(client.explain_many(images(3), progress=True))

    shown = capsys.readouterr()
    assert "3/3" in shown.err
    assert shown.out == ""


async def test_closing_the_client_ends_a_stream(connect: Any, server: Any) -> None:
    client = connect(server.address)
    server.hold.clear()
    results = client.explain_many(images(3))
    first = asyncio.create_task(anext(results))
    await asyncio.to_thread(server.called.wait)

    await client.close()

    with pytest.raises(camserve.Cancelled):
        await first
    await results.aclose()


async def test_closed_client_opens_no_stream(connect: Any, server: Any) -> None:
    client = connect(server.address)
    await client.models()
    await client.close()

    with pytest.raises(camserve.FailedPrecondition):
        await collect(client.explain_many(images(3)))


async def test_images_may_be_an_asynchronous_iterable(server: Any) -> None:
    async def arriving() -> Any:
        for image in images(5):
            await asyncio.sleep(0)
            yield image

    async with camserve.AsyncClient(server.address) as client:
        outcomes = await collect(client.explain_many(arriving(), in_flight=2))

    assert classes(outcomes) == list(range(5))
