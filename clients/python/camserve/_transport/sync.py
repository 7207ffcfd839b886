"""I/O of the synchronous client: channels, calls, blocking functions and streams.

It defines the same names as ``_transport.aio``, which has their common description.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Self, TypeAlias, TypeVar, cast

import grpc

from camserve._core.errors import CamserveError
from camserve._transport.errors import translate_errors
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
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from camserve._transport.connections import Connection, ConnectionPool, ReplyMetadata

P = ParamSpec("P")
Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

_Report: TypeAlias = "Callable[[ReplyMetadata], None] | None"
"""Function that takes the metadata of a reply, or None if the client does not need it."""

_RequestQueue: TypeAlias = "queue.SimpleQueue[explain_pb2.ExplainStreamRequest | None]"
_EventQueue: TypeAlias = "queue.SimpleQueue[tuple[_Stream, explain_pb2.ExplainStreamResponse | Exception]]"

OPENS_CHANNEL_AT_ONCE: Final[bool] = True
"""Threads share a client. A channel that the constructor opens needs no lock."""

_SIGNAL_INTERVAL: Final = 0.2
"""Seconds after which a wait for a response looks for Ctrl-C, which does not end a wait that begins just after it."""

sleep = time.sleep


class Stubs:
    """Stubs of the server's services on one channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.explain = explain_pb2_grpc.ExplainServiceStub(channel)
        self.evaluate = evaluate_pb2_grpc.EvaluateServiceStub(channel)
        self.models = models_pb2_grpc.ModelServiceStub(channel)
        self.check_health: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH_CHECK)


def run_blocking(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function in the calling thread, which may block."""
    return function(*args, **kwargs)


def open_channel(settings: Settings) -> grpc.Channel:
    """Open a channel to the server."""
    address, credentials, options = settings.address, settings.credentials, settings.channel_options
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)


def send(
    rpc: grpc.UnaryUnaryMultiCallable[Q, R],
    request: Q,
    timeout: float | None,
    metadata: tuple[tuple[str, str], ...],
    report: _Report,
) -> R:
    """Send a request once and return the response."""
    if report is None:  # for example on the caller's own channel, which need not have `with_call`
        return rpc(request, timeout=timeout, metadata=metadata)
    try:
        response, call = rpc.with_call(request, timeout=timeout, metadata=metadata)
    except grpc.RpcError as error:
        report(cast("ReplyMetadata", error.trailing_metadata()))
        raise
    report(cast("ReplyMetadata", call.trailing_metadata()))
    return response


def release(pool: ConnectionPool[Stubs], connection: Connection[Stubs], calls: int = 1) -> None:
    """Count calls on a connection as ended; close the connection if it was retired and these were the last ones."""
    stubs = pool.release(connection, calls)
    if stubs:
        stubs.channel.close()


def iterate(items: Iterable[T]) -> Iterator[T]:
    """Iterate over an iterable."""
    return iter(items)


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
    """

    connection: Connection[Stubs]
    call: grpc.Call
    requests: _RequestQueue
    unanswered: set[str] = field(default_factory=set[str])
    awaited: set[str] = field(default_factory=set[str])
    room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MAX_PROGRESS_WAITING))


class Streams:
    """Streams to the server, at most one on each connection of the client. Sending opens those that are needed.

    Requests and responses go through queues: gRPC takes requests in its own thread, and another
    thread reads the responses, so that waiting for a response can time out.
    """

    def __init__(self, pool: ConnectionPool[Stubs], settings: Settings) -> None:
        self._pool = pool
        self._settings = settings
        self._streams: dict[Connection[Stubs], _Stream] = {}
        self._events: _EventQueue = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in list(self._streams.values()):
            self._cancel(stream)

    def send(self, requests: Sequence[explain_pb2.ExplainStreamRequest]) -> None:
        """Send each request on the least loaded connection; open a stream if it has none."""
        for request in requests:
            connection = self._pool.acquire()
            stream = self._streams.get(connection) or self._open(connection)
            stream.unanswered.add(request.request_id)
            stream.awaited.add(request.request_id)
            stream.requests.put(request)

    def next_event(self, seconds: float) -> Event:
        """Wait for a response or for the end of a stream; return None after a timeout.

        Raises:
            Exception: The caller's own channel raised it, and it is not an error of gRPC.
        """
        received = self._wait(seconds)
        if received is None:
            return None
        stream, event = received
        if isinstance(event, CamserveError):
            return self._handle_end(stream, event)
        if isinstance(event, Exception):
            raise event
        if not is_final(event):
            stream.room.release()
        elif event.request_id in stream.unanswered:
            self._handle_answer(stream, event.request_id)
        return event

    def _wait(self, seconds: float) -> tuple[_Stream, explain_pb2.ExplainStreamResponse | Exception] | None:
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            try:
                return self._events.get(timeout=min(max(left, 0.0), _SIGNAL_INTERVAL))
            except queue.Empty:
                if left <= _SIGNAL_INTERVAL:
                    return None

    def finish(self) -> None:
        """End the streams without cancelling them, so that the server does not record cancelled calls."""
        for stream in self._streams.values():
            stream.requests.put(None)
        while self._streams and self.next_event(STREAM_END_TIMEOUT):
            pass

    def _open(self, connection: Connection[Stubs]) -> _Stream:
        """Open a stream. It takes over the call in flight that its first request counts as, and adds its own."""
        requests: _RequestQueue = queue.SimpleQueue()
        request_id = new_request_id()
        try:
            with translate_errors(self._settings.address, request_id):
                call = connection.stubs.explain.ExplainStream(
                    iter(requests.get, None), metadata=self._settings.metadata_with(request_id)
                )
        except BaseException:
            release(self._pool, connection)
            raise
        self._pool.hold(connection)
        stream = self._streams[connection] = _Stream(connection, call, requests)
        errors = translate_errors(self._settings.address, request_id)
        arguments = (stream, self._events, errors, self._pool.reporter(connection))
        threading.Thread(target=_read, args=arguments, daemon=True).start()
        return stream

    def _handle_answer(self, stream: _Stream, request_id: str) -> None:
        stream.unanswered.remove(request_id)
        self._pool.release(stream.connection)
        if stream.connection.retired and not stream.unanswered:
            stream.requests.put(None)

    def _handle_end(self, stream: _Stream, error: CamserveError) -> StreamBreak:
        if stream.unanswered:  # otherwise the server may have ended a stream that was idle
            self._pool.report_failure(stream.connection, error)
        self._cancel(stream)
        return StreamBreak(error, frozenset(stream.unanswered))

    def _cancel(self, stream: _Stream) -> None:
        del self._streams[stream.connection]
        stream.requests.put(None)  # otherwise gRPC's thread would wait for a request forever
        stream.call.cancel()
        stream.awaited.clear()  # the reader drops what it still receives
        stream.room.release()  # it may wait with one message
        release(self._pool, stream.connection, 1 + len(stream.unanswered))


def _read(stream: _Stream, events: _EventQueue, errors: AbstractContextManager[None], report: _Report) -> None:
    """Put the responses to open requests into the queue, and last the error that ended the stream.

    If progress is not taken from the queue, this reads no more, so that gRPC's flow control stops the server.
    """
    try:
        with errors:
            if report:
                report(cast("ReplyMetadata", stream.call.initial_metadata()))
            for response in cast("Iterable[Any]", stream.call):
                if response.request_id not in stream.awaited:
                    continue  # nobody asked for it
                if is_final(response):
                    stream.awaited.discard(response.request_id)
                else:
                    stream.room.acquire()
                events.put((stream, response))
        events.put((stream, stream_ended()))
    except Exception as error:  # noqa: BLE001 -- the consumer waits for whatever ends the stream
        events.put((stream, error))
