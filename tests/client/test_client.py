"""Calls with one response: both clients, against a server whose responses each test sets."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

import camserve
from camserve.v1 import explain_pb2


@pytest.fixture
def refuse(server: Any, refusal: Any) -> Any:
    """Make the server refuse a number of calls with a status code."""

    def add(code: str, times: int = 1, **rest: Any) -> None:
        server.refusals += [refusal(grpc.StatusCode[code], **rest)] * times

    return add


async def test_explain_returns_the_result_of_the_server(client: Any, server: Any) -> None:
    result = await client.explain(b"\x07", model="tiny", methods="gradcam")

    assert result.model == "tiny"
    assert result.size == (6, 4)
    assert result.predictions == (camserve.Prediction("class 7", 0.75, 7, 2.5),)
    assert result.explanations[0].method == "gradcam"
    assert result.explanations[0].verdict is camserve.Verdict.OK
    assert result.timing == camserve.Timing(1, 2, 3, 4, 5)
    assert result.request_id == server.calls[0].metadata["x-request-id"]


async def test_cost_is_estimated_with_the_options_of_explain(client: Any, server: Any) -> None:
    options: dict[str, Any] = {"methods": ["a", "b"], "top_k": 3, "model": "large", "regions": True}
    cost = await client.estimate_cost(**options, timeout=600)
    await client.explain(b"1", **options)

    assert cost == camserve.Cost(rows=6000, explanations=6, max_rows=4096)
    estimated, explained = (call.request for call in server.calls)
    explained.ClearField("image")
    assert estimated.explain == explained
    assert 60 < server.calls[0].time_remaining < 610


async def test_cost_of_invalid_options_is_not_requested(client: Any, server: Any) -> None:
    with pytest.raises(camserve.InvalidArgument):
        await client.estimate_cost(top_k=0)

    assert server.calls == []


async def test_every_call_has_its_own_request_id(client: Any, server: Any) -> None:
    await client.explain(b"1")
    await client.models()

    ids = [call.metadata["x-request-id"] for call in server.calls]
    assert len(set(ids)) == 2
    assert all(len(request_id) == 32 for request_id in ids)


async def test_metadata_is_sent_with_every_call(connect: Any, server: Any) -> None:
    await connect(server.address, metadata={"authorization": "Bearer x"}).models()

    assert server.calls[0].metadata["authorization"] == "Bearer x"


async def test_calls_have_the_clients_timeout_unless_given_another(connect: Any, server: Any) -> None:
    client = connect(server.address, timeout=600)
    await connect(server.address).explain(b"1")
    await client.explain(b"1")
    await client.explain(b"1", timeout=6000)
    await client.explain(b"1", timeout=math.inf)

    remaining = [call.time_remaining for call in server.calls]
    # gRPC rounds timeouts up before it sends them.
    assert 0 < remaining[0] < 30.5
    assert 60 < remaining[1] < 610
    assert 610 < remaining[2] < 6100
    assert remaining[3] is None or remaining[3] > 1e6


@pytest.mark.parametrize("kind", [camserve.Client, camserve.AsyncClient])
def test_default_timeout_is_half_a_minute(kind: type) -> None:
    assert inspect.signature(kind).parameters["timeout"].default == 30


async def test_descriptions_of_models_layers_and_methods(client: Any) -> None:
    models = await client.models()
    assert [model.name for model in models] == ["tiny", "large"]
    assert models[0].labels == ()
    assert models[0].parameters == 4_650_000
    assert models[0].task == "classify"

    large = await client.model("large")
    assert large.labels == ("cat", "dog")
    assert large.source == "timm:large"

    features, head = await client.layers("tiny")
    assert features.grid == (7, 7)
    assert features.kinds == ("CAM", "PERTURBATION")
    assert features.output_shape == (1, 8, 7, 7)
    assert head.grid is None
    assert head.reason == "no grid"

    gradcam, smoothgrad = await client.methods()
    assert gradcam.kind == "CAM"
    assert [parameter.default for parameter in smoothgrad.parameters] == [16.0, "max", None]
    assert smoothgrad.parameters[1].choices == ("max", "mean")


async def test_health_is_reported_for_each_service(client: Any) -> None:
    assert await client.health() is camserve.Health.SERVING
    assert await client.health("asleep") is camserve.Health.NOT_SERVING
    with pytest.raises(camserve.NotFound):
        await client.health("nobody")


async def test_health_is_not_retried(connect: Any) -> None:
    client = connect("127.0.0.1:1", retries=camserve.Retry(first=60))

    with pytest.raises(camserve.Unavailable):
        await client.health()


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
async def test_every_status_becomes_an_error_of_its_class(
    connect: Any, server: Any, refuse: Any, code: grpc.StatusCode
) -> None:
    refuse(code.name, message="because")
    class_name = code.name.title().replace("_", "")
    expected = getattr(camserve, class_name, camserve.CamserveError)

    with pytest.raises(camserve.CamserveError) as caught:
        await connect(server.address, retries=0).explain(b"1")

    assert type(caught.value) is expected
    assert caught.value.code is code
    assert caught.value.message == "because"
    assert isinstance(caught.value.__context__, grpc.RpcError)


async def test_traceback_of_an_error_cannot_control_the_terminal(client: Any, refuse: Any) -> None:
    refuse("NOT_FOUND", message="\x1b]0;title\x07nothing\u202e")

    with pytest.raises(camserve.NotFound) as caught:
        await client.explain(b"1")

    shown = "".join(traceback.format_exception(caught.value))
    assert r"\x1b]0;title\x07nothing\u202e" in shown
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)


async def test_details_of_an_error_are_decoded(client: Any, refuse: Any) -> None:
    refuse("INVALID_ARGUMENT", fields={"alpha": "too large"}, request_id="r-1")

    with pytest.raises(camserve.InvalidArgument) as caught:
        await client.explain(b"1")

    assert caught.value.fields == {"alpha": "too large"}
    assert caught.value.request_id == "r-1"
    assert str(caught.value) == "no (alpha: too large) [request r-1]"


async def test_request_id_is_from_the_trailer_or_else_from_the_call(client: Any, server: Any, refuse: Any) -> None:
    refuse("INTERNAL", trailers=(("x-request-id", "from trailer"),))
    refuse("INTERNAL")

    with pytest.raises(camserve.Internal) as first:
        await client.explain(b"1")
    with pytest.raises(camserve.Internal) as second:
        await client.explain(b"1")

    assert first.value.request_id == "from trailer"
    assert second.value.request_id == server.calls[1].metadata["x-request-id"]


@pytest.mark.parametrize("code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED"])
async def test_transient_error_is_retried_with_the_same_request_id(
    client: Any, server: Any, refuse: Any, code: str
) -> None:
    refuse(code, 4)

    await client.explain(b"1")

    assert len(server.calls) == 5
    assert len({call.metadata["x-request-id"] for call in server.calls}) == 1


async def test_error_is_raised_after_the_last_retry(client: Any, server: Any, refuse: Any) -> None:
    refuse("UNAVAILABLE", 9)

    with pytest.raises(camserve.Unavailable):
        await client.explain(b"1")

    assert len(server.calls) == 5


async def test_permanent_error_is_not_retried(client: Any, server: Any, refuse: Any) -> None:
    refuse("INVALID_ARGUMENT", 2)

    with pytest.raises(camserve.InvalidArgument):
        await client.explain(b"1")

    assert len(server.calls) == 1


@pytest.mark.parametrize("pushback", ["-1", "soon"])
async def test_pushback_can_forbid_a_retry(client: Any, server: Any, refuse: Any, pushback: str) -> None:
    refuse("RESOURCE_EXHAUSTED", trailers=(("grpc-retry-pushback-ms", pushback),))

    with pytest.raises(camserve.ResourceExhausted) as caught:
        await client.explain(b"1")

    assert caught.value.retry_after == -1
    assert len(server.calls) == 1


async def test_pushback_sets_the_pause(connect: Any, server: Any, refuse: Any, pauses: list[float]) -> None:
    refuse("RESOURCE_EXHAUSTED", trailers=(("grpc-retry-pushback-ms", "120"),))

    await connect(server.address, retries=camserve.Retry(first=60)).explain(b"1")

    assert pauses == [0.12]


async def test_client_does_not_pause_beyond_its_deadline(client: Any, refuse: Any, pauses: list[float]) -> None:
    refuse("UNAVAILABLE", trailers=(("grpc-retry-pushback-ms", "60000"),))

    with pytest.raises(camserve.Unavailable) as caught:
        await client.explain(b"1")

    assert caught.value.retry_after == 60
    assert pauses == []


async def test_deadline_covers_all_tries(connect: Any, server: Any, refuse: Any, pauses: list[float]) -> None:
    refuse("UNAVAILABLE", 3, trailers=(("grpc-retry-pushback-ms", "100000"),))

    await connect(server.address, timeout=1000).explain(b"1")

    assert pauses == [100] * 3
    assert [round(call.time_remaining / 100) for call in server.calls] == [10, 9, 8, 7]


async def test_reason_of_an_error_is_decoded(client: Any, refuse: Any) -> None:
    refuse("RESOURCE_EXHAUSTED", 5, reason="QUEUE_FULL")

    with pytest.raises(camserve.ResourceExhausted) as caught:
        await client.explain(b"1")

    assert caught.value.reason == "QUEUE_FULL"


STARTING = {"message": "the server is starting", "reason": "STARTING", "trailers": (("grpc-retry-pushback-ms", "20"),)}


async def test_client_waits_for_a_server_that_starts(
    client: Any, server: Any, refuse: Any, caplog: pytest.LogCaptureFixture
) -> None:
    refuse("UNAVAILABLE", 12, **STARTING)

    await client.explain(b"1")
    refuse("UNAVAILABLE", 12, **STARTING)
    _ = [result async for result in client.explain_many([b"1"])]

    assert len(server.calls) == 26
    assert [record.getMessage() for record in caplog.records if record.name == "camserve"] == [
        f"waiting for the server at {server.address}: it is starting"
    ]


async def test_wait_for_a_server_that_starts_ends_at_the_timeout(
    connect: Any, server: Any, refuse: Any, pauses: list[float]
) -> None:
    refuse("UNAVAILABLE", 99, **{**STARTING, "trailers": (("grpc-retry-pushback-ms", "100000"),)})

    with pytest.raises(camserve.Unavailable, match="the server is starting"):
        await connect(server.address, timeout=1000).explain(b"1")

    assert pauses == [100] * 9
    assert len(server.calls) == 10


async def test_health_of_a_server_that_starts_is_not_retried(client: Any, server: Any, refuse: Any) -> None:
    refuse("UNAVAILABLE", 2, **{**STARTING, "trailers": (("grpc-retry-pushback-ms", "100000"),)})
    with pytest.raises(camserve.Unavailable):
        await client.explain(b"1", timeout=60)  # less than the pause

    assert await client.health("asleep") is camserve.Health.NOT_SERVING
    assert len(server.calls) == 1


async def test_silent_server_raises_deadline_exceeded(client: Any, server: Any) -> None:
    server.hold.clear()

    with pytest.raises(camserve.DeadlineExceeded, match="did not answer in time"):
        await client.explain(b"1", timeout=0.1)  # real timeout: the server holds its answer


async def test_address_without_a_server_has_a_readable_error(connect: Any) -> None:
    with pytest.raises(camserve.Unavailable, match=r"no server answers at 127\.0\.0\.1:1: "):
        await connect("127.0.0.1:1", retries=0).models()


async def test_closing_cancels_a_call_in_progress(connect: Any, server: Any) -> None:
    server.hold.clear()
    client = connect(server.address)
    call = asyncio.create_task(client.explain(b"1"))
    await asyncio.to_thread(server.called.wait)

    await client.close()

    with pytest.raises(camserve.Cancelled):
        await call


async def test_closed_client_raises_failed_precondition(client: Any) -> None:
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
async def test_arguments_of_a_client_are_checked(connect: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(camserve.InvalidArgument):
        connect(**wrong)


async def test_invalid_request_is_not_sent(client: Any, server: Any) -> None:
    with pytest.raises(camserve.InvalidArgument):
        await client.explain(b"1", alpha=2)
    with pytest.raises(camserve.InvalidArgument):
        await client.explain(b"")

    assert server.calls == []


async def test_response_of_32_mib_is_received(client: Any, server: Any) -> None:
    large = b"\xff\xd8\xff" + bytes(32 * 2**20)
    default_answer = server.answer

    def answer(request: Any, request_id: str) -> Any:
        response = default_answer(request, request_id)
        response.explanations[0].overlay.data = large
        return response

    server.answer = answer

    result = await client.explain(b"1")

    assert len(result.explanations[0].overlay) == len(large)


async def test_client_with_credentials_does_not_send_unencrypted(connect: Any, server: Any) -> None:
    client = connect(server.address, credentials=grpc.ssl_channel_credentials(), retries=0)

    with pytest.raises(camserve.Unavailable):
        await client.models()

    assert server.calls == []


def test_threads_share_one_client(server: Any) -> None:
    with camserve.Client(server.address) as client, ThreadPoolExecutor(8) as pool:
        barrier = threading.Barrier(8)

        def work(number: int) -> list[int]:
            barrier.wait()
            single = client.explain(bytes([number])).predictions[0].class_index
            images = [bytes([at, number]) for at in range(10)]
            return [single, *(result.predictions[0].class_index for result in client.explain_many(images))]

        classes = list(pool.map(work, range(8)))

    assert classes == [[number] * 11 for number in range(8)]


async def test_cancelled_task_raises_cancelled_error(server: Any) -> None:
    server.hold.clear()
    async with camserve.AsyncClient(server.address) as client:
        call = asyncio.create_task(client.explain(b"1"))
        await asyncio.to_thread(server.called.wait)
        call.cancel()

        with pytest.raises(asyncio.CancelledError):
            await call


async def test_array_is_sent_as_png(client: Any, server: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)

    await client.explain(pixels)

    assert server.calls[0].request.image.startswith(b"\x89PNG")


def report_progress(server: Any, *steps: tuple[int, int]) -> Any:
    """Return a stream that reports progress before it answers each request."""

    def serve(requests: Any, _: Any) -> Any:
        for request in requests:
            for done, total in steps:
                progress = explain_pb2.Progress(rows_done=done, rows_total=total)
                yield explain_pb2.ExplainStreamResponse(request_id=request.request_id, progress=progress)
            yield server.reply(request)

    return serve


async def test_on_progress_receives_the_rows_of_a_long_method(client: Any, server: Any) -> None:
    reports: list[tuple[int, int]] = []
    server.streams = [report_progress(server, (64, 192), (128, 192), (192, 192))]

    result = await client.explain(b"\x07", on_progress=lambda done, total: reports.append((done, total)))

    assert result.predictions[0].class_index == 7
    assert reports == [(64, 192), (128, 192), (192, 192)]
    assert [call.rpc for call in server.calls] == ["ExplainStream"]


async def test_progress_is_requested_only_if_it_is_used(client: Any, server: Any) -> None:
    requested: list[bool] = []

    def keep(requests: Any, _: Any) -> Any:
        for request in requests:
            requested.append(request.request.progress)
            yield server.reply(request)

    server.streams = [keep, keep, keep]

    await client.explain(b"1", on_progress=print)
    for progress in (True, False):
        async for _ in client.explain_many([b"1"], progress=progress):
            pass
    await client.explain(b"1")

    assert requested == [True, True, False]
    assert server.calls[-1].request.progress is False


async def test_error_of_a_call_with_progress_is_raised(client: Any, server: Any) -> None:
    def fails(requests: Any, _: Any) -> Any:
        for request in requests:
            yield server.error(request, grpc.StatusCode.INVALID_ARGUMENT)

    server.streams = [fails]

    with pytest.raises(camserve.InvalidArgument, match="it is"):
        await client.explain(b"1", on_progress=print)
    with pytest.raises(camserve.InvalidArgument, match="cannot read"):
        await client.explain("no/such.jpg", on_progress=print)


async def test_error_of_the_callback_is_raised_and_ends_the_stream(client: Any, server: Any) -> None:
    def fails(_done: int, _total: int) -> None:
        raise KeyError("callback")

    server.streams = [report_progress(server, (1, 2))]

    with pytest.raises(KeyError, match="callback"):
        await client.explain(b"1", on_progress=fails)

    assert server.stream_ended.wait()
