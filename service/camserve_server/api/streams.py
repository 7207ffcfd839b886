"""Streams: the server of many requests on one call, and the timer that ends a stream that nobody uses."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import grpc

from camserve_server.api.rpc import Context, ServerState
from camserve_server.core.errors import ServiceError, Unavailable

Q = TypeVar("Q")


@dataclass(frozen=True, slots=True)
class Received(Generic[Q]):
    """A message of a stream.

    Attributes:
        message: the message.
        release: releases the memory that is reserved for it.
    """

    message: Q
    release: Callable[[], None] = lambda: None


async def serve_stream(
    state: ServerState,
    context: Context,
    requests: AsyncIterator[Received[Q]],
    answer: Callable[[Q, Callable[[Any], Awaitable[None]]], Awaitable[None]],
) -> None:
    """Answer the requests of a stream, some at a time, until there are no more or the server stops.

    Args:
        state: says how many at a time, and when it stops.
        context: of the call.
        requests: as they come.
        answer: answers one of them, by what writes to the stream.

    Raises:
        ServiceError: the stream was idle for long, or what came is no request; those before it are answered first.
    """
    state.open()
    free, writing, timer = asyncio.Semaphore(state.stream_in_flight), asyncio.Lock(), IdleTimer(state.idle)
    handler = cast("asyncio.Task[None]", asyncio.current_task())

    async def write(reply: Any) -> None:
        async with writing:
            try:
                await context.write(reply)
            except grpc.aio.InternalError:  # the caller has gone: a write may know it before gRPC cancels us
                handler.cancel()

    async def answered(item: Received[Q]) -> None:
        await answer(item.message, write)
        item.release()
        timer.ended()
        free.release()

    ended: ServiceError | None = None
    async with asyncio.TaskGroup() as group:
        await free.acquire()
        try:
            while (item := await _next(state, requests, timer)) is not None:
                timer.began()
                group.create_task(answered(item))
                del item  # or it would stay until the next one comes
                await free.acquire()
        except ServiceError as error:
            ended = error  # those that came before it are answered first
    if ended:
        raise ended
    if state.draining.is_set():
        raise Unavailable("the server is draining: send the rest to another", retry_after=1.0, shed="draining")


async def _next(state: ServerState, requests: AsyncIterator[Received[Q]], timer: "IdleTimer") -> Received[Q] | None:
    """Return the next request, or None when there are no more or the server stops.

    Raises:
        Unavailable: nothing is under way, and nothing came for long.
        InvalidArgument: what came is no request.
    """
    reading = asyncio.ensure_future(anext(requests, None))
    draining = asyncio.ensure_future(state.draining.wait())
    try:
        while not (reading.done() or draining.done()):
            waiting = (reading, draining)
            await asyncio.wait(waiting, timeout=timer.left(), return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else None
    finally:
        draining.cancel()
        reading.cancel()


class IdleTimer:
    """Ends a stream that is idle; one that waits for its answers is not.

    Args:
        idle: seconds that it may be open with nothing of it under way.
    """

    def __init__(self, idle: float) -> None:
        self._idle, self._under_way, self._since = idle, 0, asyncio.get_running_loop().time()

    def began(self) -> None:
        """Note that a request came."""
        self._under_way += 1

    def ended(self) -> None:
        """Note that one was answered."""
        self._under_way -= 1
        self._since = asyncio.get_running_loop().time()

    def left(self) -> float:
        """Return how many seconds from now to look again.

        Raises:
            Unavailable: it was idle for too long; a client may open another when it has more to ask.
        """
        left = self._idle if self._under_way else self._since + self._idle - asyncio.get_running_loop().time()
        if left <= 0:
            raise Unavailable(f"the stream was idle for {self._idle:g} s")
        return left
