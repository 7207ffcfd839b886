"""I/O of the asynchronous client: channels, calls, blocking functions and streams.

``_transport_sync`` defines the same names for threads. Only these two modules are written by hand for each client:
``tools/generate_sync.py`` generates the rest of the synchronous client from the asynchronous one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import grpc.aio

from camserve import _stream
from camserve._errors import (
    CLIENT_CLOSED_DURING_CALL,
    UNPARSABLE_RESPONSE,
    CamserveError,
    Cancelled,
    Internal,
    StatusLost,
    translate_errors,
)
from camserve._settings import new_request_id

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Self

    from camserve._settings import Settings
    from camserve.v1 import explain_pb2, explain_pb2_grpc

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

_RequestQueue: TypeAlias = "asyncio.Queue[explain_pb2.ExplainStreamRequest | None]"
_EventQueue: TypeAlias = "asyncio.Queue[explain_pb2.ExplainStreamResponse | Exception]"

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
) -> R:
    """Send a request once and return the response.

    Raises:
        Cancelled: The client was closed, which cancels the call but not the task that awaits it.
        Internal: The response cannot be parsed.
    """
    try:
        response = cast("R | None", await rpc(request, timeout=timeout, metadata=metadata))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Cancelled(CLIENT_CLOSED_DURING_CALL) from error
    return _parsed(response)


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


class StreamConnection:
    """Connection that has at most one open stream; sending opens another stream when none is open.

    Requests and responses go through queues, so that waiting for a response can time out.
    """

    def __init__(self, stub: explain_pb2_grpc.ExplainServiceAsyncStub, settings: Settings) -> None:
        self._stub = stub
        self._settings = settings
        self._call: grpc.aio.Call | None = None
        self._reader: asyncio.Task[None] | None = None
        self._requests: _RequestQueue = asyncio.Queue()
        self._events: _EventQueue = asyncio.Queue()
        self._reopen_delay = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._cancel()

    async def send(self, requests: Sequence[explain_pb2.ExplainStreamRequest]) -> None:
        """Send requests; open a stream if none is open."""
        if requests and self._call is None:
            self._open()
        for request in requests:
            self._requests.put_nowait(request)

    async def next_event(self, seconds: float) -> _stream.Event:
        """Wait for a response or for the error that ends the stream; return None after a timeout.

        Raises:
            Exception: The caller's own channel raised it, and it is not an error of gRPC.
        """
        try:
            async with asyncio.timeout(seconds):
                event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, CamserveError):
            self._reopen_delay = REOPEN_DELAY if isinstance(event, StatusLost) else 0.0
            await self._cancel()
        elif isinstance(event, Exception):
            raise event
        return event

    async def finish(self) -> None:
        """End the stream without cancelling it, so that the server does not record a cancelled call."""
        if self._call is not None:
            self._requests.put_nowait(None)
            await self.next_event(_stream.STREAM_END_TIMEOUT)

    def _open(self) -> None:
        self._requests, self._events = asyncio.Queue(), asyncio.Queue()
        request_id = new_request_id()
        with translate_errors(self._settings.address, request_id):
            call = self._stub.ExplainStream(
                _until_none(self._requests, self._reopen_delay), metadata=self._settings.metadata_with(request_id)
            )
        errors = translate_errors(self._settings.address, request_id)
        self._reader = asyncio.create_task(_read(call, self._events, errors))
        self._call = call

    async def _cancel(self) -> None:
        self._requests.put_nowait(None)
        if self._call is not None and self._reader is not None:
            self._call.cancel()
            await asyncio.wait({self._reader})
            self._call = None


async def _until_none(requests: _RequestQueue, delay: float) -> AsyncIterator[explain_pb2.ExplainStreamRequest]:
    await asyncio.sleep(delay)
    while (request := await requests.get()) is not None:
        yield request


async def _read(
    responses: AsyncIterable[Any],
    events: _EventQueue,
    errors: AbstractContextManager[None],
) -> None:
    """Put every response into the queue, and last the error that ended the stream."""
    try:
        with errors:
            await _put_responses(responses, events)
        events.put_nowait(_stream.stream_ended())
    except Exception as error:  # noqa: BLE001 -- the consumer waits for whatever ends the stream
        events.put_nowait(error)


async def _put_responses(responses: AsyncIterable[Any], events: _EventQueue) -> None:
    try:
        async for response in responses:
            events.put_nowait(_parsed(response))
    except asyncio.CancelledError as error:
        raise Cancelled(CLIENT_CLOSED_DURING_CALL) from error
