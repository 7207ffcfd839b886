"""Clients with the caller's own channel: an intercepted gRPC channel, and objects that are not from gRPC."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

import camserve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

PAGE = (Path(__file__).parents[2] / "docs" / "channels.md").read_text("utf-8")
FAR = "why.example:50051"


class FakeRpcError(grpc.RpcError):
    """Error of a channel that is not from gRPC."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: Any) -> None:
        self.code = lambda: code
        self.details = lambda: details
        self.trailing_metadata = lambda: trailers


class Context:
    """Part of a servicer's context that the fake server uses."""

    def __init__(self, metadata: Any, timeout: float | None) -> None:
        self.invocation_metadata = lambda: metadata
        self.time_remaining = lambda: timeout
        self.trailers: Any = None

    def set_trailing_metadata(self, trailers: Any) -> None:
        self.trailers = trailers

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise FakeRpcError(code, details, self.trailers)

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Do nothing. Other tests use this method."""


def check_health(packed: bytes, _context: Context) -> bytes:
    service = health_pb2.HealthCheckRequest.FromString(packed).service
    return health_pb2.HealthCheckResponse(status=2 if service == "asleep" else 1).SerializeToString()


class InProcessChannel:
    """Channel for `Client` that calls the methods of a servicer in the same process."""

    def __init__(self, servicer: Any) -> None:
        self.servicer = servicer
        self.closed = 0
        self.streams: list[Any] = []

    def handler(self, path: str) -> Callable[[Any, Context], Any]:
        return (
            check_health if path == "/grpc.health.v1.Health/Check" else getattr(self.servicer, path.rpartition("/")[2])
        )

    def answer(self, path: str, request: Any, timeout: float | None, metadata: Any) -> Any:
        if self.closed:
            raise ValueError("closed")
        return self.handler(path)(request, Context(metadata, timeout))

    def unary_unary(self, path: str, **_coding: Any) -> Callable[..., Any]:
        return lambda request, *, timeout, metadata: self.answer(path, request, timeout, metadata)

    def stream_stream(self, path: str, **_coding: Any) -> Callable[..., Any]:
        return lambda requests, *, metadata: self.record(Stream(self.answer(path, requests, None, metadata)))

    def record(self, stream: Any) -> Any:
        self.streams.append(stream)
        return stream

    def close(self) -> None:
        self.closed += 1


class Stream:
    """Call object of a stream."""

    def __init__(self, answers: Iterator[Any]) -> None:
        self.answers = answers
        self.cancelled = False

    def __iter__(self) -> Iterator[Any]:
        return self.answers

    def cancel(self) -> None:
        self.cancelled = True


class AsyncInProcessChannel(InProcessChannel):
    """Channel for `AsyncClient` that calls the methods of a servicer in the same process."""

    def unary_unary(self, path: str, **_coding: Any) -> Callable[..., Any]:
        async def call(request: Any, *, timeout: float | None, metadata: Any) -> Any:
            return self.answer(path, request, timeout, metadata)

        return call

    def stream_stream(self, path: str, **_coding: Any) -> Callable[..., Any]:
        def call(requests: AsyncIterator[Any], *, metadata: Any) -> Any:
            async def answers() -> AsyncIterator[Any]:
                async for request in requests:
                    for answer in self.answer(path, iter([request]), None, metadata):
                        yield answer

            return self.record(AsyncStream(answers()))

        return call

    async def close(self) -> None:  # type: ignore[override]
        self.closed += 1


class AsyncStream(Stream):
    def __aiter__(self) -> Any:
        return self.answers


@pytest.fixture
def channel(connect: Any, server: Any) -> Any:
    """Return a channel for the kind of client that `connect` opens."""
    client = connect(server.address)
    return (AsyncInProcessChannel if isinstance(client, camserve.AsyncClient) else InProcessChannel)(server)


@pytest.fixture
def client(connect: Any, channel: Any) -> Any:
    return connect(FAR, channel=channel)


def to_plain(value: Any) -> Any:
    if is_dataclass(value):
        # The ID and the reference to the photo differ for every call.
        different = {"request_id", "source"} if isinstance(value, camserve.Result) else {"request_id"}
        names = {field.name for field in fields(value)} - different
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [to_plain(item) for item in value] if isinstance(value, tuple | list) else value


async def call_all(client: Any) -> list[Any]:
    """Call every method of a client; return the results."""
    explained = await client.explain(b"\x07", heatmap=True)
    return [
        explained,
        await client.replay(explained.explanations[0].receipt, b"\x07"),
        await client.estimate_cost(top_k=3),
        await client.inspect(b"\x07"),
        await client.features(b"\x07", maps=True),
        await client.evaluate(b"\x07", metrics=["deletion", "increase"]),
        await client.models(),
        await client.model("large"),
        await client.layers(),
        await client.methods(),
        await client.metrics(),
        await client.health(),
        await client.health("asleep"),
        [result async for result in client.explain_many([b"\x01", b"\x02", b"\x03"])],
    ]


async def test_in_process_channel_gives_the_results_of_a_server(client: Any, connect: Any, server: Any) -> None:
    assert to_plain(await call_all(client)) == to_plain(await call_all(connect(server.address)))


async def test_client_calls_only_the_documented_methods_of_a_channel(connect: Any, channel: Any) -> None:
    calls: list[tuple[str, str, dict[str, Any]]] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            if name == "close":
                return channel.close
            return lambda path, **coding: calls.append((name, path, coding)) or getattr(channel, name)(path, **coding)

    await call_all(connect(FAR, channel=Recorder()))

    documented = set(re.findall(r"^\| `channel\.(\w+)\(", PAGE, re.MULTILINE))
    assert {name for name, *_ in calls} == documented - {"close"} == {"unary_unary", "stream_stream"}
    assert [path for name, path, _ in calls if name == "stream_stream"] == ["/camserve.v1.ExplainService/ExplainStream"]
    codings = {path: coding for _, path, coding in calls}
    assert codings.pop("/grpc.health.v1.Health/Check") == {}
    keywords = {"request_serializer", "response_deserializer", "_registered_method"}
    assert all(set(coding) == keywords for coding in codings.values())


async def test_metadata_and_timeout_reach_the_channel(connect: Any, channel: Any, server: Any) -> None:
    client = connect(FAR, channel=channel, token="abc", metadata={"x-who": "me"})
    await client.models()
    _ = [result async for result in client.explain_many([b"1"])]
    unary, stream = server.calls

    for call in (unary, stream):
        assert call.metadata["authorization"] == "Bearer abc"
        assert call.metadata["x-who"] == "me"
        assert call.metadata["x-request-id"]
    assert 0 < unary.time_remaining <= 30
    assert stream.time_remaining is None


async def test_errors_of_a_channel_become_errors_of_the_client(client: Any, server: Any, refusal: Any) -> None:
    server.refusals = [refusal(grpc.StatusCode.INVALID_ARGUMENT, "bad", {"alpha": "too large"}, "r1")]
    with pytest.raises(camserve.InvalidArgument) as caught:
        await client.models()

    assert (caught.value.message, caught.value.fields, caught.value.request_id) == ("bad", {"alpha": "too large"}, "r1")


async def test_calls_through_a_channel_are_retried(client: Any, server: Any, refusal: Any) -> None:
    server.refusals = [refusal(grpc.StatusCode.UNAVAILABLE) for _ in range(3)]

    assert (await client.explain(b"\x07")).predictions[0].class_index == 7
    server.refusals = [refusal(grpc.StatusCode.UNAVAILABLE)]
    assert [result.predictions[0].class_index async for result in client.explain_many([b"\x08"])] == [8]
    assert [call.rpc for call in server.calls] == ["Explain"] * 4 + ["ExplainStream"] * 2


async def test_leaving_the_loop_early_cancels_the_call(client: Any, channel: Any) -> None:
    results = client.explain_many([b"\x01", b"\x02", b"\x03"], in_flight=1)
    async for _ in results:
        break
    await results.aclose()

    assert [stream.cancelled for stream in channel.streams] == [True]


@pytest.mark.parametrize("called", [False, True])
async def test_client_closes_the_channel_that_it_was_given(client: Any, channel: Any, called: bool) -> None:
    if called:
        await client.models()
    await client.close()

    assert channel.closed == 1
    with pytest.raises(camserve.FailedPrecondition, match="the client is closed"):
        await client.models()


async def test_other_exception_of_a_channel_reaches_the_caller(client: Any, server: Any) -> None:
    """Also in a stream, which another thread or task reads: the caller does not wait for a timeout."""

    def broken(_requests: Any, _context: Any) -> Any:
        raise KeyError("a bug")
        yield

    server.answer = lambda *_args: {}["a bug"]
    with pytest.raises(KeyError, match="a bug"):
        await client.explain(b"\x07")
    server.streams = [broken]
    with pytest.raises(KeyError, match="a bug"):
        _ = [result async for result in client.explain_many([b"\x07"], timeout=3600)]


@pytest.mark.parametrize("access", [{"tls": True}, {"credentials": grpc.ssl_channel_credentials()}], ids=["tls", "own"])
def test_encryption_options_are_refused_with_a_channel(connect: Any, channel: Any, access: Any) -> None:
    with pytest.raises(camserve.InvalidArgument, match="encrypt the channel that you pass"):
        connect(FAR, channel=channel, **access)

    assert channel.closed == 0


class Tagger(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=(*details.metadata, ("x-tag", "one"))), request)

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=(*details.metadata, ("x-tag", "many"))), requests)


class AsyncTagger(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        details.metadata.add("x-tag", "one")
        return await continuation(details, request)


class AsyncStreamTagger(grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        details.metadata.add("x-tag", "many")
        return await continuation(details, requests)


@pytest.fixture
def intercepted(channel: Any, server: Any) -> Any:
    if isinstance(channel, AsyncInProcessChannel):
        return grpc.aio.insecure_channel(server.address, interceptors=[AsyncTagger(), AsyncStreamTagger()])
    return grpc.intercept_channel(grpc.insecure_channel(server.address), Tagger())


async def test_interceptors_are_called_for_every_call(connect: Any, intercepted: Any, server: Any) -> None:
    client = connect(server.address, channel=intercepted)

    assert to_plain(await call_all(client)) == to_plain(await call_all(connect(server.address)))
    tags = [(call.rpc, call.metadata["x-tag"]) for call in server.calls if "x-tag" in call.metadata]
    assert len(tags) == len(server.calls) / 2 > 10
    assert dict(tags).pop("ExplainStream") == "many"
    assert {tag for rpc, tag in tags if rpc != "ExplainStream"} == {"one"}


async def test_intercepted_call_keeps_its_error(connect: Any, intercepted: Any, server: Any, refusal: Any) -> None:
    client = connect(server.address, channel=intercepted)
    server.refusals = [refusal(grpc.StatusCode.NOT_FOUND, "no such model", {"model": "unknown"})]

    with pytest.raises(camserve.NotFound, match="no such model") as caught:
        await client.explain(b"\x07")
    assert caught.value.fields == {"model": "unknown"}
    await client.close()
    with pytest.raises(camserve.FailedPrecondition, match="the client is closed"):
        await client.models()


def test_python_example_of_the_page_works(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code.replace("localhost:50051", server.address), {})  # noqa: S102 -- that is the promise

    assert capsys.readouterr().out == "tiny\n"
    assert server.calls[0].metadata["x-tenant"] == "zoo"
