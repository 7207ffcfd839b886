"""Calls with one answer: both clients, against a server that says what it is told."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

import camserve
from camserve.v1 import explain_pb2


@pytest.fixture
def refuse(server: Any, refusal: Any) -> Any:
    """Make the server refuse, so often, with a code."""

    def add(code: str, times: int = 1, **rest: Any) -> None:
        server.refusals += [refusal(grpc.StatusCode[code], **rest)] * times

    return add


async def test_an_image_goes_out_and_a_result_comes_back(client: Any, server: Any) -> None:
    result = await client.explain(b"\x07", model="tiny", methods="gradcam")

    assert result.model == "tiny"
    assert result.size == (6, 4)
    assert result.predictions == (camserve.Prediction("class 7", 0.75, 7, 2.5),)
    assert result.explanations[0].method == "gradcam"
    assert result.explanations[0].verdict is camserve.Verdict.OK
    assert result.timing == camserve.Timing(1, 2, 3, 4, 5)
    assert result.request_id == server.calls[0].metadata["x-request-id"]


async def test_every_call_has_an_id_of_its_own(client: Any, server: Any) -> None:
    await client.explain(b"1")
    await client.models()

    ids = [call.metadata["x-request-id"] for call in server.calls]
    assert len(set(ids)) == 2
    assert all(len(each) == 32 for each in ids)


async def test_metadata_goes_with_every_call(connect: Any, server: Any) -> None:
    await connect(server.address, metadata={"authorization": "Bearer x"}).models()

    assert server.calls[0].metadata["authorization"] == "Bearer x"


async def test_calls_have_a_deadline_unless_told_otherwise(connect: Any, server: Any) -> None:
    client = connect(server.address)
    await client.explain(b"1")
    await client.explain(b"1", timeout=5)
    await client.explain(b"1", timeout=math.inf)

    left = [call.time_remaining for call in server.calls]
    # gRPC rounds up what it puts on the wire.
    assert 25 < left[0] < 30.5
    assert 4 < left[1] < 5.5
    assert left[2] is None or left[2] > 1e6


async def test_models_layers_and_methods_are_described(client: Any) -> None:
    models = await client.models()
    assert [each.name for each in models] == ["tiny", "large"]
    assert models[0].labels == ()
    assert models[0].parameters == 4_650_000
    assert models[0].task == "classify"

    one = await client.model("large")
    assert one.labels == ("cat", "dog")
    assert one.source == "timm:large"

    features, head = await client.layers("tiny")
    assert features.grid == (7, 7)
    assert features.kinds == ("CAM", "PERTURBATION")
    assert features.output_shape == (1, 8, 7, 7)
    assert head.grid is None
    assert head.reason == "no grid"

    gradcam, smoothgrad = await client.methods()
    assert gradcam.kind == "CAM"
    assert [each.default for each in smoothgrad.parameters] == [16.0, "max", None]
    assert smoothgrad.parameters[1].choices == ("max", "mean")


async def test_health_is_asked_per_service(client: Any) -> None:
    assert await client.health() is camserve.Health.SERVING
    assert await client.health("asleep") is camserve.Health.NOT_SERVING
    with pytest.raises(camserve.NotFound):
        await client.health("nobody")


async def test_health_is_asked_once(connect: Any) -> None:
    client = connect("127.0.0.1:1", retries=camserve.Retry(first=60))

    with pytest.raises(camserve.Unavailable):
        await client.health()


@pytest.mark.parametrize("code", [each for each in grpc.StatusCode if each.value[0]])
async def test_every_status_becomes_an_error_of_ours(
    connect: Any, server: Any, refuse: Any, code: grpc.StatusCode
) -> None:
    refuse(code.name, message="because")
    named = code.name.title().replace("_", "")
    expected = getattr(camserve, named, camserve.CamserveError)

    with pytest.raises(camserve.CamserveError) as caught:
        await connect(server.address, retries=0).explain(b"1")

    assert type(caught.value) is expected
    assert caught.value.code is code
    assert caught.value.message == "because"
    assert isinstance(caught.value.__cause__, grpc.RpcError)


async def test_details_of_an_error_are_read(client: Any, refuse: Any) -> None:
    refuse("INVALID_ARGUMENT", fields={"alpha": "too large"}, request_id="r-1")

    with pytest.raises(camserve.InvalidArgument) as caught:
        await client.explain(b"1")

    assert caught.value.fields == {"alpha": "too large"}
    assert caught.value.request_id == "r-1"
    assert str(caught.value) == "no (alpha: too large) [request r-1]"


async def test_the_request_id_comes_from_the_trailer_or_else_from_the_call(
    client: Any, server: Any, refuse: Any
) -> None:
    refuse("INTERNAL", trailers=(("x-request-id", "from trailer"),))
    refuse("INTERNAL")

    with pytest.raises(camserve.Internal) as first:
        await client.explain(b"1")
    with pytest.raises(camserve.Internal) as second:
        await client.explain(b"1")

    assert first.value.request_id == "from trailer"
    assert second.value.request_id == server.calls[1].metadata["x-request-id"]


@pytest.mark.parametrize("code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED"])
async def test_what_may_pass_is_tried_again_under_the_same_id(client: Any, server: Any, refuse: Any, code: str) -> None:
    refuse(code, 4)

    await client.explain(b"1")

    assert len(server.calls) == 5
    assert len({call.metadata["x-request-id"] for call in server.calls}) == 1


async def test_in_the_end_the_error_is_raised(client: Any, server: Any, refuse: Any) -> None:
    refuse("UNAVAILABLE", 9)

    with pytest.raises(camserve.Unavailable):
        await client.explain(b"1")

    assert len(server.calls) == 5


async def test_what_will_not_pass_is_tried_once(client: Any, server: Any, refuse: Any) -> None:
    refuse("INVALID_ARGUMENT", 2)

    with pytest.raises(camserve.InvalidArgument):
        await client.explain(b"1")

    assert len(server.calls) == 1


@pytest.mark.parametrize("pushback", ["-1", "soon"])
async def test_a_pushback_may_forbid_another_try(client: Any, server: Any, refuse: Any, pushback: str) -> None:
    refuse("RESOURCE_EXHAUSTED", trailers=(("grpc-retry-pushback-ms", pushback),))

    with pytest.raises(camserve.ResourceExhausted) as caught:
        await client.explain(b"1")

    assert caught.value.retry_after == -1
    assert len(server.calls) == 1


@pytest.fixture
def pauses(monkeypatch: Any) -> list[float]:
    """Record the pauses between tries, and advance the client's clock by each at once."""
    found: list[float] = []

    async def pause(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr("camserve._transport_sync.sleep", found.append)
    monkeypatch.setattr("camserve._transport_async.sleep", pause)
    monkeypatch.setattr("camserve._retry.time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(found)))
    return found


async def test_a_pushback_is_waited_for(connect: Any, server: Any, refuse: Any, pauses: list[float]) -> None:
    refuse("RESOURCE_EXHAUSTED", trailers=(("grpc-retry-pushback-ms", "120"),))

    await connect(server.address, retries=camserve.Retry(first=60)).explain(b"1")

    assert pauses == [0.12]


async def test_client_does_not_pause_beyond_its_deadline(client: Any, refuse: Any, pauses: list[float]) -> None:
    refuse("UNAVAILABLE", trailers=(("grpc-retry-pushback-ms", "60000"),))

    with pytest.raises(camserve.Unavailable) as caught:
        await client.explain(b"1")

    assert caught.value.retry_after == 60
    assert pauses == []


async def test_the_deadline_covers_all_tries(connect: Any, server: Any, refuse: Any, pauses: list[float]) -> None:
    refuse("UNAVAILABLE", 3, trailers=(("grpc-retry-pushback-ms", "100000"),))

    await connect(server.address, timeout=1000).explain(b"1")

    assert pauses == [100] * 3
    assert [round(call.time_remaining / 100) for call in server.calls] == [10, 9, 8, 7]


async def test_a_server_that_is_silent_ends_in_deadline_exceeded(client: Any, server: Any) -> None:
    server.hold.clear()

    with pytest.raises(camserve.DeadlineExceeded, match="did not answer in time"):
        await client.explain(b"1", timeout=0.1)


async def test_nothing_at_the_address_reads_well(connect: Any) -> None:
    with pytest.raises(camserve.Unavailable, match=r"no server answers at 127\.0\.0\.1:1: "):
        await connect("127.0.0.1:1", retries=0).models()


async def test_a_call_under_way_is_cancelled_by_closing(connect: Any, server: Any) -> None:
    server.hold.clear()
    client = connect(server.address)
    call = asyncio.create_task(client.explain(b"1"))
    await asyncio.to_thread(server.called.wait, 5)

    await client.close()

    with pytest.raises(camserve.Cancelled):
        await call


async def test_a_closed_client_says_so(client: Any) -> None:
    await client.models()
    await client.close()

    with pytest.raises(camserve.FailedPrecondition, match="the client is closed"):
        await client.models()


@pytest.mark.parametrize(
    "wrong",
    [
        {"address": ""},
        {"address": "http://localhost:50051"},
        {"address": "a:1", "timeout": 0},
        {"address": "a:1", "retries": -1},
    ],
)
async def test_what_a_client_is_given_is_checked(connect: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(camserve.InvalidArgument):
        connect(**wrong)


async def test_what_is_seen_to_be_wrong_is_not_sent(client: Any, server: Any) -> None:
    with pytest.raises(camserve.InvalidArgument):
        await client.explain(b"1", alpha=2)
    with pytest.raises(camserve.InvalidArgument):
        await client.explain(b"")

    assert server.calls == []


async def test_an_answer_of_32_mib_arrives(client: Any, server: Any) -> None:
    large = bytes(32 * 2**20)
    usual = server.answer

    def answer(request: Any, request_id: str) -> Any:
        response = usual(request, request_id)
        response.explanations[0].overlay.data = large
        return response

    server.answer = answer

    result = await client.explain(b"1")

    assert len(result.explanations[0].overlay) == len(large)


async def test_a_secure_client_does_not_talk_in_the_clear(connect: Any, server: Any) -> None:
    client = connect(server.address, credentials=grpc.ssl_channel_credentials(), retries=0)

    with pytest.raises(camserve.Unavailable):
        await client.models()

    assert server.calls == []


def test_one_client_serves_many_threads(server: Any) -> None:
    with camserve.Client(server.address) as client, ThreadPoolExecutor(8) as pool:
        starting = threading.Barrier(8)

        def work(number: int) -> list[int]:
            starting.wait()
            alone = client.explain(bytes([number])).predictions[0].class_index
            images = [bytes([at, number]) for at in range(10)]
            return [alone, *(r.predictions[0].class_index for r in client.explain_many(images))]

        found = list(pool.map(work, range(8)))

    assert found == [[number] * 11 for number in range(8)]


async def test_a_cancelled_task_stays_cancelled(server: Any) -> None:
    server.hold.clear()
    async with camserve.AsyncClient(server.address) as client:
        call = asyncio.create_task(client.explain(b"1"))
        await asyncio.to_thread(server.called.wait, 5)
        call.cancel()

        with pytest.raises(asyncio.CancelledError):
            await call


async def test_an_array_is_sent_without_loss(client: Any, server: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)

    await client.explain(pixels)

    assert server.calls[0].request.image.startswith(b"\x89PNG")


def counting(server: Any, *steps: tuple[int, int]) -> Any:
    """Answer a stream's requests after saying how far they have come."""

    def serve(requests: Any, _: Any) -> Any:
        for each in requests:
            for done, total in steps:
                said = explain_pb2.Progress(rows_done=done, rows_total=total)
                yield explain_pb2.ExplainStreamResponse(request_id=each.request_id, progress=said)
            yield server.reply(each)

    return serve


async def test_a_caller_is_told_how_far_a_long_method_has_come(client: Any, server: Any) -> None:
    told: list[tuple[int, int]] = []
    server.streams = [counting(server, (64, 192), (128, 192), (192, 192))]

    result = await client.explain(b"\x07", on_progress=lambda done, total: told.append((done, total)))

    assert result.predictions[0].class_index == 7
    assert told == [(64, 192), (128, 192), (192, 192)]
    assert [call.rpc for call in server.calls] == ["ExplainStream"]


async def test_only_who_listens_is_told(client: Any, server: Any) -> None:
    asked: list[bool] = []

    def keep(requests: Any, _: Any) -> Any:
        for each in requests:
            asked.append(each.request.progress)
            yield server.reply(each)

    server.streams = [keep, keep, keep]

    await client.explain(b"1", on_progress=print)
    for progress in (True, False):
        async for _ in client.explain_many([b"1"], progress=progress):
            pass
    await client.explain(b"1")

    assert asked == [True, True, False]
    assert server.calls[-1].request.progress is False


async def test_what_goes_wrong_under_way_is_raised_as_ever(client: Any, server: Any) -> None:
    def fails(requests: Any, _: Any) -> Any:
        for each in requests:
            yield server.error(each, grpc.StatusCode.INVALID_ARGUMENT)

    server.streams = [fails]

    with pytest.raises(camserve.InvalidArgument, match="it is"):
        await client.explain(b"1", on_progress=print)
    with pytest.raises(camserve.InvalidArgument, match="cannot read"):
        await client.explain("no/such.jpg", on_progress=print)


async def test_an_error_of_the_listener_passes_through_and_ends_the_stream(client: Any, server: Any) -> None:
    def fails(_done: int, _total: int) -> None:
        raise KeyError("mine")

    server.streams = [counting(server, (1, 2))]

    with pytest.raises(KeyError, match="mine"):
        await client.explain(b"1", on_progress=fails)

    assert server.stream_ended.wait(5)
