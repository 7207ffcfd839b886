"""A channel whose calls go to services of this process: no port, no socket, and no message is serialized.

It has the methods of `grpc.Channel` that a camserve client uses, so that everything that is true of a call over the
network is true of one in the process: options, errors, progress, timeouts and cancellation.
"""

import asyncio
import math
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn, TypeAlias, cast

import grpc

from camserve.v1 import evaluate_pb2_grpc, explain_pb2_grpc, models_pb2_grpc
from camserve_server.api.rpc import ServerState
from camserve_server.api.servicers import EvaluateServicer, ExplainServicer, ModelServicer
from camserve_server.api.streams import Received
from camserve_server.serving.explain import Pipeline

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]


class Services:
    """The services of this process by the names of their methods; generated code registers them, as with a server."""

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add the methods of a service."""
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Add nothing: generated code registers the same methods in both ways."""

    def handler(self, method: str) -> Any:
        """Return the handler of a method.

        Raises:
            CallError: there is no such method.
        """
        if method not in self._handlers:
            raise CallError(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {method} in this process")
        return self._handlers[method]


def services_of(pipeline: Pipeline, stream_in_flight: int) -> Services:
    """Return the services over a pipeline.

    Args:
        pipeline: that they answer from.
        stream_in_flight: requests of one stream under way at most.
    """
    services, state = cast("Any", Services()), ServerState(stream_in_flight, pipeline=pipeline)
    explain_pb2_grpc.add_ExplainServiceServicer_to_server(ExplainServicer(state), services)
    evaluate_pb2_grpc.add_EvaluateServiceServicer_to_server(EvaluateServicer(state), services)
    models_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(state), services)
    return cast("Services", services)


class CallError(grpc.RpcError):
    """The error of a call, as grpc's own: with a status code, details and trailers.

    Args:
        code: The status code.
        details: What was wrong.
        trailers: Metadata that follow the error, such as the fields at fault.
    """

    def __init__(self, code: grpc.StatusCode, details: str, trailers: Metadata = ()) -> None:
        super().__init__(details)
        self._code, self._details, self._trailers = code, details, trailers

    def code(self) -> grpc.StatusCode:
        """Return the status code."""
        return self._code

    def details(self) -> str:
        """Return what was wrong."""
        return self._details

    def trailing_metadata(self) -> Any:
        """Return the metadata that follow the error."""
        return self._trailers


class _Context:
    """Context of a call: the methods of `grpc.aio.ServicerContext` that our services use.

    Args:
        metadata: of the call.
        deadline: on the event loop's clock.
        write: takes each message of a stream.
    """

    def __init__(self, metadata: Metadata, deadline: float, write: Callable[[Any], object]) -> None:
        self._metadata, self._deadline, self._write = metadata, deadline, write
        self._callbacks: list[Callable[[Any], object]] = []

    def time_remaining(self) -> float | None:
        left = self._deadline - asyncio.get_running_loop().time()
        return None if math.isinf(left) else max(0.0, left)

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def peer(self) -> str:
        return "in-process"

    def set_trailing_metadata(self, _trailers: Metadata) -> None:
        """Drop the trailers of a call that succeeds: a client does not read them."""

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._callbacks.append(callback)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        raise CallError(code, details, trailing_metadata)

    async def write(self, message: Any) -> None:
        self._write(message)

    def done(self) -> None:
        for callback in self._callbacks:
            callback(self)


class Channel:
    """Calls the services of an event loop that runs in another thread.

    Args:
        loop: The event loop.
        services: What is called.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, services: Services) -> None:
        self._loop, self._services = loop, services
        self._running: set[Future[Any]] = set()
        self._closed = False

    def unary_unary(self, method: str, *_codecs: Any, **_options: Any) -> Callable[..., Any]:
        """Return a function that calls a method with one message and returns the reply."""

        def call(request: Any, timeout: float | None = None, metadata: Metadata = ()) -> Any:
            handler = self._services.handler(method)
            packed = isinstance(request, bytes)
            message = handler.request_deserializer(request) if packed else request
            reply = self._result(self._answered(handler.unary_unary, message, timeout, metadata))
            return handler.response_serializer(reply) if packed else reply

        return call

    def stream_stream(self, method: str, *_codecs: Any, **_options: Any) -> Callable[..., "Stream"]:
        """Return a function that opens a stream."""

        def call(requests: Iterable[Any], timeout: float | None = None, metadata: Metadata = ()) -> Stream:
            handler, stream = self._services.handler(method), Stream()
            work = self._streamed(handler.stream_stream, requests, stream, timeout, metadata)
            stream.future = self._start(work)
            stream.future.add_done_callback(stream.end)
            return stream

        return call

    def close(self) -> None:
        """Cancel the calls that are under way, and take no more."""
        self._closed = True
        for future in list(self._running):
            future.cancel()

    def _start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        if self._closed:
            work.close()
            raise ValueError("Cannot invoke RPC on closed channel!")  # the words of grpc, which clients expect
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def _result(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = self._start(work)
        try:
            return future.result()
        except CancelledError:
            raise CallError(grpc.StatusCode.CANCELLED, "Channel closed!") from None
        except BaseException:  # Ctrl-C, which is raised in this thread
            future.cancel()
            raise

    async def _answered(
        self, method: Callable[..., Any], message: Any, timeout: float | None, metadata: Metadata
    ) -> Any:
        async with _context(metadata, timeout, lambda _message: None) as context:
            return await method(message, context)

    async def _streamed(
        self,
        method: Callable[..., Any],
        requests: Iterable[Any],
        stream: "Stream",
        timeout: float | None,
        metadata: Metadata,
    ) -> None:
        async with _context(metadata, timeout, stream.put) as context:
            await method(_received(requests, self._loop), context)


@asynccontextmanager
async def _context(
    metadata: Metadata, timeout: float | None, write: Callable[[Any], object]
) -> AsyncIterator[_Context]:
    """Give the block what its service may ask of the call; end it when its time is up."""
    clock = asyncio.get_running_loop().time
    seconds = None if timeout is None or math.isinf(timeout) else timeout
    context = _Context(metadata, math.inf if seconds is None else clock() + seconds, write)
    try:
        async with asyncio.timeout(seconds):
            yield context
    except TimeoutError:
        raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
    finally:
        context.done()


async def _received(requests: Iterable[Any], loop: asyncio.AbstractEventLoop) -> AsyncIterator[Received[Any]]:
    """Yield the messages of a stream; a thread takes them from the caller, who may make each only then."""
    messages: asyncio.Queue[Received[Any] | None] = asyncio.Queue()

    def read() -> None:
        with suppress(RuntimeError):  # the loop is closed, and with it the stream
            for message in requests:
                loop.call_soon_threadsafe(messages.put_nowait, Received(message))
            loop.call_soon_threadsafe(messages.put_nowait, None)

    threading.Thread(target=read, name="camserve-requests", daemon=True).start()
    while (message := await messages.get()) is not None:
        yield message


class Stream:
    """The replies of a stream, as they come.

    Iteration ends with the stream, or with the `CallError` that it fails with.
    """

    def __init__(self) -> None:
        self.future: Future[Any] | None = None
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, reply: Any) -> None:
        """Add a reply."""
        self._replies.put(reply)

    def end(self, future: Future[Any]) -> None:
        """Add the end of the stream."""
        self._replies.put(future)

    def __iter__(self) -> Iterator[Any]:
        while not isinstance(reply := self._replies.get(), Future):
            yield reply
        if reply.cancelled():
            raise CallError(grpc.StatusCode.CANCELLED, "Channel closed!")
        if error := reply.exception():
            raise error

    def cancel(self) -> None:
        """Cancel what the stream still waits for."""
        if self.future:
            self.future.cancel()
