"""I/O of the asynchronous client: channels, calls, blocking functions and streams.

``_transport.sync`` defines the same names for threads. Only these two modules are written by hand for each client:
``tools/generate_sync.py`` generates the rest of the synchronous client from the asynchronous one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, TypeVar, cast

import grpc.aio

from camserve._core.errors import CamserveError, Cancelled, Internal, StatusLost
from camserve._transport.errors import CLIENT_CLOSED_DURING_CALL, UNPARSABLE_RESPONSE, translate_errors
from camserve._transport.settings import HEALTH_CHECK, Settings, new_request_id
from camserve._transport.stream import (
    MAX_PROGRESS_WAITING,
    STREAM_END_TIMEOUT,
    Event,
    StreamBreak,
    is_final,
    stream_ended,
)
from camserve.v1 import evaluate_pb2_grpc, explain_pb2, explain_pb2_grpc, models_pb2_grpc

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from camserve._transport.connections import Connection, ConnectionPool, ReplyMetadata

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

_Report: TypeAlias = "Callable[[ReplyMetadata], None] | None"
"""Function that takes the metadata of a reply, or None if the client does not need it."""

_RequestQueue: TypeAlias = "asyncio.Queue[explain_pb2.ExplainStreamRequest | None]"
_EventQueue: TypeAlias = "asyncio.Queue[tuple[_Stream, explain_pb2.ExplainStreamResponse | Exception]]"

OPENS_CHANNEL_AT_ONCE: Final[bool] = False
"""A grpc.aio channel belongs to the event loop in which it is made, so the first call makes it."""

REOPEN_DELAY: Final = 0.2
"""Seconds before the first request on a stream that follows one which broke during a write.

gRPC loses the status that a server sends during a write. If the server refuses the stream, its status arrives within
this pause.
"""

sleep = asyncio.sleep
run_blocking = asyncio.to_thread
"""Run a function that reads files or encodes images without blocking the event loop."""


class Stubs:
    """Stubs of the server's services on one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.explain = explain_pb2_grpc.ExplainServiceStub(channel)
        self.evaluate = evaluate_pb2_grpc.EvaluateServiceStub(channel)
        self.models = models_pb2_grpc.ModelServiceStub(channel)
        self.check_health: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH_CHECK)


def open_channel(settings: Settings) -> grpc.aio.Channel:
    """Open a channel to the server."""
    address, credentials, options = settings.address, settings.credentials, settings.channel_options
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, credentials, options)


async def send(
    rpc: grpc.aio.UnaryUnaryMultiCallable[Q, R],
    request: Q,
    timeout: float | None,
    metadata: tuple[tuple[str, str], ...],
    report: _Report,
) -> R:
    """Send a request once and return the response.

    Raises:
        Cancelled: The client was closed, which cancels the call but not the task that awaits it.
        Internal: The response cannot be parsed.
    """
    call = rpc(request, timeout=timeout, metadata=metadata)
    try:
        response = cast("R | None", await call)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Cancelled(CLIENT_CLOSED_DURING_CALL) from error
    except grpc.RpcError as error:
        if report:
            report(cast("ReplyMetadata", error.trailing_metadata()))
        raise
    if report:
        report(cast("ReplyMetadata", await call.trailing_metadata()))
    return _parsed(response)


async def release(pool: ConnectionPool[Stubs], connection: Connection[Stubs], calls: int = 1) -> None:
    """Count calls on a connection as ended; close the connection if it was retired and these were the last ones."""
    stubs = pool.release(connection, calls)
    if stubs:
        await stubs.channel.close()


def _parsed(response: R | None) -> R:
    if response is None:  # grpc.aio returns None for bytes that cannot be parsed
        raise Internal(UNPARSABLE_RESPONSE)
    return response


async def iterate(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    """Iterate over an asynchronous or an ordinary iterable."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


@dataclass(slots=True, eq=False)
class _Stream:
    """An open stream.

    Attributes:
        connection: Its connection, on which it counts as a call in flight, and so does each unanswered request.
        call: gRPC's call.
        requests: Requests to send; None ends the stream.
        unanswered: Ids of the requests without a response that was taken from the queue of events.
        awaited: Ids of the requests without a response in that queue; empty once the stream is cancelled.
        room: Messages of progress for which the queue has room.
        reader: Task that reads the responses.
    """

    connection: Connection[Stubs]
    call: grpc.aio.Call
    requests: _RequestQueue
    unanswered: set[str] = field(default_factory=set[str])
    awaited: set[str] = field(default_factory=set[str])
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_PROGRESS_WAITING))
    reader: asyncio.Task[None] | None = None


class Streams:
    """Streams to the server, at most one on each connection of the client. Sending opens those that are needed.

    Requests and responses go through queues, so that waiting for a response can time out.
    """

    def __init__(self, pool: ConnectionPool[Stubs], settings: Settings) -> None:
        self._pool = pool
        self._settings = settings
        self._streams: dict[Connection[Stubs], _Stream] = {}
        self._events: _EventQueue = asyncio.Queue()
        self._reopen_delay = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in list(self._streams.values()):
            await self._cancel(stream)

    async def send(self, requests: Sequence[explain_pb2.ExplainStreamRequest]) -> None:
        """Send each request on the least loaded connection; open a stream if it has none."""
        for request in requests:
            connection = self._pool.acquire()
            stream = self._streams.get(connection) or await self._open(connection)
            stream.unanswered.add(request.request_id)
            stream.awaited.add(request.request_id)
            stream.requests.put_nowait(request)

    async def next_event(self, seconds: float) -> Event:
        """Wait for a response or for the end of a stream; return None after a timeout.

        Raises:
            Exception: The caller's own channel raised it, and it is not an error of gRPC.
        """
        try:
            async with asyncio.timeout(seconds):
                stream, event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, CamserveError):
            return await self._handle_end(stream, event)
        if isinstance(event, Exception):
            raise event
        if not is_final(event):
            stream.room.release()
        elif event.request_id in stream.unanswered:
            self._handle_answer(stream, event.request_id)
        return event

    async def finish(self) -> None:
        """End the streams without cancelling them, so that the server does not record cancelled calls."""
        for stream in self._streams.values():
            stream.requests.put_nowait(None)
        while self._streams and await self.next_event(STREAM_END_TIMEOUT):
            pass

    async def _open(self, connection: Connection[Stubs]) -> _Stream:
        """Open a stream. It takes over the call in flight that its first request counts as, and adds its own."""
        requests: _RequestQueue = asyncio.Queue()
        request_id = new_request_id()
        try:
            with translate_errors(self._settings.address, request_id):
                call = connection.stubs.explain.ExplainStream(
                    _until_none(requests, self._reopen_delay), metadata=self._settings.metadata_with(request_id)
                )
        except BaseException:
            await release(self._pool, connection)
            raise
        self._pool.hold(connection)
        stream = self._streams[connection] = _Stream(connection, call, requests)
        errors = translate_errors(self._settings.address, request_id)
        stream.reader = asyncio.create_task(_read(stream, self._events, errors, self._pool.reporter(connection)))
        return stream

    def _handle_answer(self, stream: _Stream, request_id: str) -> None:
        stream.unanswered.remove(request_id)
        self._pool.release(stream.connection)
        if stream.connection.retired and not stream.unanswered:
            stream.requests.put_nowait(None)

    async def _handle_end(self, stream: _Stream, error: CamserveError) -> StreamBreak:
        self._reopen_delay = REOPEN_DELAY if isinstance(error, StatusLost) else 0.0
        if stream.unanswered:  # otherwise the server may have ended a stream that was idle
            self._pool.report_failure(stream.connection, error)
        await self._cancel(stream)
        return StreamBreak(error, frozenset(stream.unanswered))

    async def _cancel(self, stream: _Stream) -> None:
        del self._streams[stream.connection]
        stream.requests.put_nowait(None)
        stream.call.cancel()
        stream.awaited.clear()  # the reader drops what it still receives
        stream.room.release()  # it may wait with one message
        if stream.reader is not None:
            await asyncio.wait({stream.reader})
        await release(self._pool, stream.connection, 1 + len(stream.unanswered))


async def _until_none(requests: _RequestQueue, delay: float) -> AsyncIterator[explain_pb2.ExplainStreamRequest]:
    await asyncio.sleep(delay)
    while (request := await requests.get()) is not None:
        yield request


async def _read(stream: _Stream, events: _EventQueue, errors: AbstractContextManager[None], report: _Report) -> None:
    """Put the responses to open requests into the queue, and last the error that ended the stream.

    If progress is not taken from the queue, this reads no more, so that gRPC's flow control stops the server.
    """
    try:
        with errors:
            await _put_responses(stream, events, report)
        events.put_nowait((stream, stream_ended()))
    except Exception as error:  # noqa: BLE001 -- the consumer waits for whatever ends the stream
        events.put_nowait((stream, error))


async def _put_responses(stream: _Stream, events: _EventQueue, report: _Report) -> None:
    try:
        if report:
            report(cast("ReplyMetadata", await stream.call.initial_metadata()))
        async for response in cast("AsyncIterable[Any]", stream.call):
            message = _parsed(response)
            if message.request_id not in stream.awaited:
                continue  # nobody asked for it
            if is_final(message):
                stream.awaited.discard(message.request_id)
            else:
                await stream.room.acquire()
            events.put_nowait((stream, message))
    except asyncio.CancelledError as error:
        raise Cancelled(CLIENT_CLOSED_DURING_CALL) from error
