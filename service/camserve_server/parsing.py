"""Messages that cannot be parsed: refused in words of ours; gRPC's own would name the Python class that failed."""

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError

from camserve_server import oip
from camserve_server.errors import InvalidArgument
from camserve_server.interceptor import Handler, Interceptor
from camserve_server.servicer import Context, House, answering

Behaviour: TypeAlias = Callable[[Any, Context], Any]


class Parser(Interceptor):
    """Parses the messages of every RPC, health's and reflection's too.

    Args:
        house: counts the calls that are refused, too.
    """

    def __init__(self, house: House) -> None:
        super().__init__()
        self._house = house

    def wrapped(self, method: str, handler: Any) -> Handler:
        """Return the RPC's own handler, which refuses what is no message of its."""
        return _Parsing(self._house, method, handler).handler()


class _Parsing:
    """One RPC, whose messages are parsed here."""

    def __init__(self, house: House, method: str, handler: Any) -> None:
        self._house, self._handler = house, handler
        rpc = descriptor_pool.Default().FindMethodByName(oip.own_name(method.strip("/").replace("/", ".")))
        self._rpc, self._refusal = rpc.name, f"the message is not a {oip.known_as(rpc.input_type.full_name)}"

    def handler(self) -> Handler:
        own, ends = self._handler, (self._parsed, self._handler.response_serializer)
        if own.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._of_one(own.unary_unary), *ends)
        if own.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._of_one(own.unary_stream), *ends)
        several = self._of_several if inspect.isasyncgenfunction(own.stream_stream) else self._of_several_written
        return grpc.stream_stream_rpc_method_handler(several(own.stream_stream), *ends)

    def _parsed(self, data: bytes) -> Any:
        """Return the message, or the error: gRPC would turn one that is raised here into words of its own."""
        try:
            return self._handler.request_deserializer(data)
        except DecodeError:
            return InvalidArgument(self._refusal)

    def _of_one(self, behaviour: Behaviour) -> Behaviour:
        async def answer(request: Any, context: Context) -> Any:
            if not isinstance(request, InvalidArgument):
                return await behaviour(request, context)
            async with answering(self._house, context, self._rpc):
                raise request

        return answer

    def _of_several_written(self, behaviour: Behaviour) -> Behaviour:
        """Our own streams, which answer for the error themselves."""

        async def answer(requests: AsyncIterator[Any], context: Context) -> None:
            await behaviour(_sound(requests), context)

        return answer

    def _of_several(self, behaviour: Behaviour) -> Behaviour:
        async def answer(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            try:
                async for reply in behaviour(_sound(requests), context):
                    yield reply
            except InvalidArgument as error:
                async with answering(self._house, context, self._rpc):
                    raise error from None

        return answer


async def _sound(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, InvalidArgument):
            raise request
        yield request
