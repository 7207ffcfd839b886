"""Connections of a client, and the retry loop of its calls."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Final, TypeVar

from camserve._codec.images import image_bytes
from camserve._core.errors import CamserveError, FailedPrecondition
from camserve._transport import aio as transport
from camserve._transport.connections import ConnectionPool
from camserve._transport.errors import translate_errors
from camserve._transport.retry import CallAttempts, Retry, is_starting
from camserve._transport.settings import Settings, new_request_id

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc.aio

    from camserve._values.options import ImageLike


Q = TypeVar("Q")
R = TypeVar("R")


log = logging.getLogger("camserve")

START_NOTICE_INTERVAL: Final = 60.0
"""Seconds between two lines in the log which say that a client waits for a server that starts."""


class Calls:
    """Base class of the client's groups of calls: its settings, its connections and its retries.

    Args:
        settings: Settings of the channels and of every call.
        channel: The caller's own channel; None to open channels.
    """

    def __init__(self, settings: Settings, channel: grpc.aio.Channel | None) -> None:
        self._settings = settings
        self._own_channel = channel
        self._open_pool: ConnectionPool[transport.Stubs] | None = None
        self._closed = False
        self._start_noticed_at = -math.inf
        if transport.OPENS_CHANNEL_AT_ONCE:
            self._open()

    async def close(self) -> None:
        """Close the connections; calls in progress end with Cancelled.

        Example:
            >>> client = camserve.AsyncClient("localhost:50051")
            >>> await client.health()
            <Health.SERVING: 'SERVING'>
            >>> await client.close()
            >>> try:
            ...     await client.health()
            ... except camserve.FailedPrecondition as error:
            ...     print(error.message)
            the client is closed
        """
        self._closed = True
        if self._open_pool is not None:
            for stubs in self._open_pool.close():
                await stubs.channel.close()
        elif self._own_channel is not None:
            await self._own_channel.close()

    def _open(self) -> ConnectionPool[transport.Stubs]:
        settings = self._settings
        self._open_pool = ConnectionPool(self._new_stubs, settings.connections, one_server=settings.one_server)
        return self._open_pool

    def _new_stubs(self) -> transport.Stubs:
        channel = transport.open_channel(self._settings) if self._own_channel is None else self._own_channel
        return transport.Stubs(channel)

    @property
    def _pool(self) -> ConnectionPool[transport.Stubs]:
        # A call on a closed channel can hang in gRPC, for example if the channel has interceptors.
        if self._closed:
            raise FailedPrecondition("the client is closed")
        return self._open_pool or self._open()

    async def _call(
        self,
        rpc: Callable[[transport.Stubs], grpc.aio.UnaryUnaryMultiCallable[Q, R]],
        request: Q,
        timeout: float | None = None,
        retry: Retry | None = None,
    ) -> R:
        """Send a request until it succeeds or no retry is left; return the response.

        Args:
            rpc: Function that returns the RPC of the stubs on one connection.
            request: The request.
            timeout: Seconds, instead of the client's.
            retry: The rule for retries, instead of the client's.
        """
        request_id = new_request_id()
        metadata = self._settings.metadata_with(request_id)
        attempts = CallAttempts(retry or self._settings.retry, self._settings.timeout_for(timeout))
        while True:
            pool = self._pool
            connection = pool.acquire()
            try:
                with translate_errors(self._settings.address, request_id):
                    report = pool.reporter(connection)
                    return await transport.send(rpc(connection.stubs), request, attempts.start(), metadata, report)
            except CamserveError as error:
                pause = attempts.pause(error, elsewhere=pool.report_failure(connection, error))
                if pause is None:
                    raise attempts.error or error  # noqa: B904 -- each has its own cause
                self._notice_start(waiting=is_starting(error) and pause > 0)
            finally:
                await transport.release(pool, connection)
            await transport.sleep(pause)

    def _notice_start(self, *, waiting: bool) -> None:
        """Log that the client waits for a server that starts; without a configured log, the line is on stderr."""
        now = time.monotonic()
        if waiting and now - self._start_noticed_at >= START_NOTICE_INTERVAL:
            self._start_noticed_at = now
            log.warning("waiting for the server at %s: it is starting", self._settings.address)

    def _file_of(self, image: ImageLike) -> bytes:
        """Return the encoded image file that the client sends.

        Raises:
            InvalidArgument: The image cannot be read, or is not an image.

        Example:
            >>> from pathlib import Path
            >>> client._file_of("cat.jpg") == Path("cat.jpg").read_bytes()
            True
        """
        return image_bytes(image)

    def _named(self, options: Q) -> Q:
        """Return the options of a call, with layers by their names.

        Example:
            >>> client._named({"layers": ["bn2"]})
            {'layers': ['bn2']}
        """
        return options
