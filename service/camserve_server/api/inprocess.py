"""Channel to services in the same process, without a port, a socket or serialized messages.

It has the methods of `grpc.Channel` that a camserve client uses. Calls behave as over the network: options, errors,
progress, timeouts and cancellation.
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
    """Services of this process. Generated code registers their methods, as with a server."""

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add the methods of a service."""
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Do nothing: generated code also registers the same methods with `add_registered_method_handlers`."""

    def handler(self, method: str) -> Any:
        """Return the handler of a method.

        Raises:
            CallError: there is no such method.
        """
        if method not in self._handlers:
            raise CallError(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {method} in this process")
        return self._handlers[method]


def services_of(pipeline: Pipeline, stream_in_flight: int) -> Services:
    """Return the services of a pipeline.

    Args:
        pipeline: pipeline that explains images.
        stream_in_flight: the largest number of requests of one stream in flight.
    """
    return services_with(ServerState(stream_in_flight, pipeline=pipeline))


def services_with(state: ServerState) -> Services:
    """Return the services of a server with this state."""
    services = cast("Any", Services())
    explain_pb2_grpc.add_ExplainServiceServicer_to_server(ExplainServicer(state), services)
    evaluate_pb2_grpc.add_EvaluateServiceServicer_to_server(EvaluateServicer(state), services)
    models_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(state), services)
    return cast("Services", services)


class CallError(grpc.RpcError):
    """Error of a call, with a status code, details and trailers like errors of grpc.

    Args:
        code: the status code.
        details: description of the error.
        trailers: trailing metadata, such as the fields at fault.
    """

    def __init__(self, code: grpc.StatusCode, details: str, trailers: Metadata = ()) -> None:
        super().__init__(details)
        self._code, self._details, self._trailers = code, details, trailers

    def code(self) -> grpc.StatusCode:
        """Return the status code."""
        return self._code

    def details(self) -> str:
        """Return the description of the error."""
        return self._details

    def trailing_metadata(self) -> Any:
        """Return the trailing metadata."""
        return self._trailers


class _Context:
    """Context of a call, with the methods of `grpc.aio.ServicerContext` that the services use.

    Args:
        metadata: metadata of the call.
        deadline: deadline on the event loop's clock.
        write: function that receives each reply of a stream.
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
        """Do nothing: on a channel that it was given, a client reads no trailers of a call that succeeds."""

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
    """Channel to services on an event loop that runs in another thread.

    Args:
        loop: the event loop.
        services: the services.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, services: Services) -> None:
        self._loop, self._services = loop, services
        self._running: set[Future[Any]] = set()
        self._closed = False

    def unary_unary(self, method: str, *_codecs: Any, **_options: Any) -> Callable[..., Any]:
        """Return a function that calls a method with one message and returns the reply."""

        def call(request: Any, timeout: float | None = None, metadata: Metadata = ()) -> Any:
            handler = self._services.handler(method)
            serialized = isinstance(request, bytes)
            message = handler.request_deserializer(request) if serialized else request
            reply = self._result(self._call(handler.unary_unary, message, timeout, metadata))
            return handler.response_serializer(reply) if serialized else reply

        return call

    def stream_stream(self, method: str, *_codecs: Any, **_options: Any) -> Callable[..., "Stream"]:
        """Return a function that opens a stream."""

        def call(requests: Iterable[Any], timeout: float | None = None, metadata: Metadata = ()) -> Stream:
            handler, stream = self._services.handler(method), Stream()
            work = self._call_stream(handler.stream_stream, requests, stream, timeout, metadata)
            stream.future = self._start(work)
            stream.future.add_done_callback(stream.end)
            return stream

        return call

    def close(self) -> None:
        """Cancel the calls in flight, and refuse new ones."""
        self._closed = True
        for future in list(self._running):
            future.cancel()

    def _start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        if self._closed:
            work.close()
            raise ValueError("Cannot invoke RPC on closed channel!")  # the message of grpc, which clients expect
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
        except BaseException:  # such as KeyboardInterrupt, which is raised in this thread
            future.cancel()
            raise

    async def _call(self, method: Callable[..., Any], message: Any, timeout: float | None, metadata: Metadata) -> Any:
        async with _context(metadata, timeout, lambda _message: None) as context:
            return await method(message, context)

    async def _call_stream(
        self,
        method: Callable[..., Any],
        requests: Iterable[Any],
        stream: "Stream",
        timeout: float | None,
        metadata: Metadata,
    ) -> None:
        async with _context(metadata, timeout, stream.put) as context:
            await method(_receive(requests, self._loop), context)


@asynccontextmanager
async def _context(
    metadata: Metadata, timeout: float | None, write: Callable[[Any], object]
) -> AsyncIterator[_Context]:
    """Yield the context of a call, and cancel the block when the timeout is over."""
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


async def _receive(requests: Iterable[Any], loop: asyncio.AbstractEventLoop) -> AsyncIterator[Received[Any]]:
    """Yield the messages of a stream. A thread iterates over them, because the caller's iterator may block."""
    messages: asyncio.Queue[Received[Any] | None] = asyncio.Queue()

    def read() -> None:
        with suppress(RuntimeError):  # the event loop was closed, which ended the stream
            for message in requests:
                loop.call_soon_threadsafe(messages.put_nowait, Received(message))
            loop.call_soon_threadsafe(messages.put_nowait, None)

    threading.Thread(target=read, name="camserve-requests", daemon=True).start()
    while (message := await messages.get()) is not None:
        yield message


class Stream:
    """Iterator over the replies of a stream.

    Iteration ends when the stream ends, or raises the `CallError` of a stream that fails.
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
        """Cancel the stream."""
        if self.future:
            self.future.cancel()
