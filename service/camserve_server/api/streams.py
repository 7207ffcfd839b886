"""Streams of requests: many requests on one call, and the timer that ends an idle stream."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, cast

import grpc

from camserve_server.api.rpc import Context, ServerState
from camserve_server.core.errors import ServiceError, Unavailable

Q = TypeVar("Q")

Write: TypeAlias = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Received(Generic[Q]):
    """A message of a stream.

    Attributes:
        message: the message.
        release: function that releases the memory reserved for the message.
    """

    message: Q
    release: Callable[[], None] = lambda: None


async def serve_stream(
    state: ServerState,
    context: Context,
    requests: AsyncIterator[Received[Q]],
    answer: Callable[[Q, Write], Awaitable[None]],
) -> None:
    """Answer the requests of a stream, several at a time, until it ends or the server stops.

    Args:
        state: state of the server.
        context: context of the call.
        requests: the messages.
        answer: function that answers a request, and gets a function that writes to the stream.

    Raises:
        ServiceError: the stream was idle for too long, or a message is invalid.
    """
    state.require_open()
    timer, write = IdleTimer(state.idle), _serialized_writer(context)
    slots = asyncio.Semaphore(state.stream_in_flight - 1)  # without that of the request that is being read

    async def answer_item(item: Received[Q]) -> None:
        await answer(item.message, write)
        item.release()
        timer.request_finished()
        slots.release()

    async def read_requests(group: asyncio.TaskGroup) -> None:
        while (item := await anext(requests, None)) is not None:
            timer.request_started()
            group.create_task(answer_item(item))
            del item  # otherwise the message would stay in memory until the next one arrives
            await slots.acquire()

    async with asyncio.TaskGroup() as group:  # which answers the earlier requests before an error is raised
        error = await _read_until_draining(state, asyncio.create_task(read_requests(group)), timer)
    _check_not_ended(state, error)


def _check_not_ended(state: ServerState, error: ServiceError | None) -> None:
    if error:
        raise error
    if state.draining.is_set():
        message = "the server is draining: send the remaining requests to another server"
        raise Unavailable(message, retry_after=1.0, shed_reason="draining")


def _serialized_writer(context: Context) -> Write:
    """Return a function that writes messages one at a time, and cancels the current task if the caller is gone."""
    lock, handler = asyncio.Lock(), cast("asyncio.Task[None]", asyncio.current_task())

    async def write(reply: Any) -> None:
        async with lock:
            try:
                await context.write(reply)
            except grpc.aio.InternalError:  # the caller is gone: a write may fail before gRPC cancels the handler
                handler.cancel()

    return write


async def _read_until_draining(
    state: ServerState, reading: asyncio.Task[None], timer: "IdleTimer"
) -> ServiceError | None:
    """Wait until a stream ends, or the server stops; then cancel the task that reads the stream.

    Returns the error that ended the stream: it was idle for too long, or a message was invalid.

    One task reads all messages: a task for each of them, which could be cancelled by itself, took a sixth of the event
    loop's time for a request.
    """
    draining = asyncio.ensure_future(state.draining.wait())
    try:
        while not (reading.done() or draining.done()):
            await asyncio.wait((reading, draining), timeout=timer.seconds_left(), return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            reading.result()
    except ServiceError as error:
        return error
    else:
        return None
    finally:
        draining.cancel()
        reading.cancel()
        await asyncio.gather(reading, draining, return_exceptions=True)


class IdleTimer:
    """Timeout for a stream without a request in flight. A stream that waits for its answers is not idle.

    Args:
        timeout: the time, in seconds, that a stream may be open without a request in flight.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout, self._in_flight, self._idle_since = timeout, 0, asyncio.get_running_loop().time()

    def request_started(self) -> None:
        """Count a request as in flight."""
        self._in_flight += 1

    def request_finished(self) -> None:
        """Count a request as answered, and restart the timeout."""
        self._in_flight -= 1
        self._idle_since = asyncio.get_running_loop().time()

    def seconds_left(self) -> float:
        """Return the time in seconds until the stream may be idle for too long.

        Raises:
            Unavailable: the stream was idle for too long; a client may open another one.
        """
        if self._in_flight:
            return self._timeout
        left = self._idle_since + self._timeout - asyncio.get_running_loop().time()
        if left <= 0:
            raise Unavailable(f"the stream was idle for {self._timeout:g} s")
        return left
