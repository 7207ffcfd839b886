"""What keeps callers who do nothing, or far too much, out of the way of others: limits that gRPC holds, and a patience.

A call that was opened, and whose message never comes, costs little; but gRPC itself would let it stay for ever.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import grpc

from camserve_server.config import Settings
from camserve_server.errors import DeadlineExceeded, InvalidArgument, ServiceError
from camserve_server.interceptor import Handler, Interceptor
from camserve_server.servicer import Context, House, answering

HANDSHAKE = 10.0  # seconds that a new connection may take for TLS and the first frames of HTTP/2
SILENCE = 60.0  # seconds without a sign of life after which a caller is asked for one
ANSWER = 20.0  # seconds that it has for it
MOMENT = 0.1  # seconds after which gRPC, which first says that no message will come, has told that a call is taken back


def options(settings: Settings) -> tuple[tuple[str, int], ...]:
    """Return the options of a gRPC server that hold these settings' limits on connections and calls."""
    return (
        ("grpc.max_concurrent_streams", settings.max_streams),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.server_handshake_timeout_ms", _ms(HANDSHAKE)),
        ("grpc.http2.settings_timeout", _ms(HANDSHAKE)),
        ("grpc.max_connection_idle_ms", _ms(settings.connection_idle_seconds)),
        ("grpc.max_connection_age_ms", _ms(settings.connection_age_seconds)),
        ("grpc.max_connection_age_grace_ms", _ms(settings.connection_grace_seconds)),
        ("grpc.keepalive_time_ms", _ms(SILENCE)),
        ("grpc.keepalive_timeout_ms", _ms(ANSWER)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    )


def _ms(seconds: float) -> int:
    return round(1e3 * seconds)


class Patience(Interceptor):
    """Ends calls of one message whose message does not come; streams have a patience of their own.

    Args:
        seconds: that a message may be waited for.
        house: counts the calls that are ended, too; those that are waited for are none yet.
    """

    def __init__(self, seconds: float, house: House) -> None:
        super().__init__()
        self._seconds, self._house = seconds, house

    def wrapped(self, method: str, handler: Any) -> Handler:
        """Return a handler that takes its one message as the first of a stream: only streams can be waited for."""
        rpc = method.rpartition("/")[2]
        ends = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary:
            return grpc.stream_unary_rpc_method_handler(self._one(rpc, handler.unary_unary), *ends)
        if handler.unary_stream:
            return grpc.stream_stream_rpc_method_handler(self._one(rpc, handler.unary_stream), *ends)
        return cast("Handler", handler)

    def _one(self, rpc: str, behaviour: Callable[[Any, Context], Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def answer(requests: AsyncIterator[Any], context: Context) -> Any:
            try:
                first = [await self._first(requests)]
            except ServiceError as error:
                async with answering(self._house, context, rpc):
                    raise error from None
            return await behaviour(first.pop(), context)  # not kept here: it is large, and parsed there

        return answer

    async def _first(self, requests: AsyncIterator[Any]) -> Any:
        try:
            async with asyncio.timeout(self._seconds):
                return await anext(requests)
        except TimeoutError:
            raise DeadlineExceeded(f"the call's message did not come within {self._seconds:g} s") from None
        except StopAsyncIteration:
            await asyncio.sleep(MOMENT)
            raise InvalidArgument("the call ended without a message") from None
