"""Messages, parsed: once it is known what memory they take, and there is room for it; off the event loop if large.

What cannot be parsed is refused in words of ours; gRPC's own would name the Python class that failed.
"""

import inspect
import math
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError

from camserve_server.api import oip
from camserve_server.api.codec.compression import is_compressed, unpacked
from camserve_server.api.codec.footprint import Shape, footprint, shape_of
from camserve_server.api.connection_limits import Messages, Receiving, only
from camserve_server.api.interceptor import Handler, Interceptor
from camserve_server.api.rpc import Context, ServerState, caller_of, rpc_scope
from camserve_server.api.streams import Received
from camserve_server.core.config import Settings
from camserve_server.core.errors import InvalidArgument, ServiceError
from camserve_server.scheduling.admission import Admission
from camserve_server.scheduling.threads import in_thread

Behaviour: TypeAlias = Callable[[Any, Context], Any]
Parse: TypeAlias = Callable[[bytes], Any]
Release: TypeAlias = Callable[[], None]

FIELDS = 32_768  # of a message, those of messages in it among them
FIELDS_AT_ONCE = 1000  # counted on the event loop: about a millisecond
BYTES_AT_ONCE = 2**20  # parsed there: likewise
RECEIVED = 4  # messages of one caller's calls that are received at a time, and as many of its streams
MESSAGES = 64 * 2**20  # bytes of memory for all messages that are not answered yet; the others wait, mostly unread
GROWTH = 4  # times the largest message that may be sent: memory of one once it is parsed


class DeserializationInterceptor(Interceptor):
    """Parses the messages of every RPC, health's and reflection's too.

    Args:
        settings: of the server.
        house: counts the calls that are refused, too.
    """

    def __init__(self, settings: Settings, house: ServerState) -> None:
        super().__init__()
        self._house, self._intake = house, Intake(settings.max_message_mib * 2**20, MESSAGES)
        self._receiving = Receiving(RECEIVED), Receiving(RECEIVED)

    def wrapped(self, method: str, handler: Any) -> Handler:
        """Return the RPC's own handler, which refuses what is no message of its."""
        return _Deserialization(self._house, *self._receiving, self._intake, method, handler).handler()


class Intake:
    """Parses messages as far as there is memory for them, which callers share.

    Args:
        largest: bytes of a message at most.
        room: bytes of memory for all messages that are not answered yet.
    """

    def __init__(self, largest: int, room: int) -> None:
        self._largest = largest
        most = GROWTH * largest
        # No caller has all of it: its long requests would keep out everybody else's.
        self._room = Admission(max(room, most + 2 * largest), largest, line=math.inf, most=most)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parse")

    async def parsed(self, data: bytes, shape: Shape, parse: Parse, caller: str) -> tuple[Any, Release]:
        """Return a message, and the function that gives back the memory that it takes; wait until there is some.

        Args:
            data: as it came; if it is compressed, it is unpacked.
            shape: of its kind.
            parse: makes the message.
            caller: that sent it.

        Raises:
            InvalidArgument: it has too many fields, or takes too much memory for one message.
            ResourceExhausted: it is too large.
            DecodeError: it is none.
        """
        size = self._size_at_once(data, shape)
        at_once = size is not None
        if size is None:
            size = await in_thread(self._thread, self._size, data, shape)
        if size > GROWTH * self._largest:
            words = f"the message takes {size:,} bytes of memory, and {GROWTH * self._largest:,} is the limit"
            raise InvalidArgument(words)
        release = await self._room.hold(size, caller=caller, wait=True)
        try:
            if at_once:
                return parse(data), release
            # Unpacked once more: unpacked and waiting for memory, it would have taken that memory already.
            return await in_thread(self._thread, lambda: parse(self._plain(data))), release
        except BaseException:
            release()
            raise

    def _size_at_once(self, data: bytes, shape: Shape) -> int | None:
        """Return what memory a message takes; None where that, or to parse it, is too much for the event loop."""
        if len(data) > BYTES_AT_ONCE or is_compressed(data):
            return None
        return footprint(data, shape, FIELDS_AT_ONCE)

    def _size(self, data: bytes, shape: Shape) -> int:
        size = footprint(self._plain(data), shape, FIELDS)
        if size is None:
            raise InvalidArgument(f"the message has more than {FIELDS:,} fields, which is the limit")
        return size

    def _plain(self, data: bytes) -> bytes:
        return unpacked(data, self._largest) if is_compressed(data) else data


class _Deserialization:
    """One RPC, whose messages are parsed here."""

    def __init__(
        self, house: ServerState, alone: Receiving, streamed: Receiving, intake: Intake, method: str, handler: Any
    ) -> None:
        self._house, self._alone, self._streamed, self._intake, self._handler = house, alone, streamed, intake, handler
        rpc = descriptor_pool.Default().FindMethodByName(oip.own_name(method.strip("/").replace("/", ".")))
        self._rpc, self._refusal = rpc.name, f"the message is not a {oip.known_as(rpc.input_type.full_name)}"
        self._shape = shape_of(rpc.input_type)

    def handler(self) -> Handler:
        # Without a deserializer gRPC hands over the bytes.
        own, ends = self._handler, (None, self._handler.response_serializer)
        # One message is taken as the first of a stream: only streams wait to receive theirs until they are asked to.
        if own.unary_unary:
            return grpc.stream_unary_rpc_method_handler(self._of_one(own.unary_unary), *ends)
        if own.unary_stream:
            return grpc.stream_stream_rpc_method_handler(self._of_one(own.unary_stream), *ends)
        several = self._of_several if inspect.isasyncgenfunction(own.stream_stream) else self._of_several_written
        return grpc.stream_stream_rpc_method_handler(several(own.stream_stream), *ends)

    async def _parsed(self, data: bytes, caller: str) -> tuple[Any, Release]:
        try:
            return await self._intake.parsed(data, self._shape, self._handler.request_deserializer, caller)
        except DecodeError:
            raise InvalidArgument(self._refusal) from None

    def _of_one(self, behaviour: Behaviour) -> Behaviour:
        async def answer(requests: AsyncIterator[bytes], context: Context) -> Any:
            try:
                message, release = await self._received_alone(requests, context)
                message = [message]
                try:
                    return await behaviour(message.pop(), context)
                finally:
                    release()
            except grpc.aio.AbortError as error:
                # gRPC's call holds this error, whose frames hold the call and the message: a cycle, which would stay.
                raise error.with_traceback(None) from None

        return answer

    async def _received_alone(self, requests: AsyncIterator[bytes], context: Context) -> tuple[Any, Release]:
        """Return the only message of a call and the function that releases its memory, or end the call."""
        caller = caller_of(context)
        try:
            async with self._alone.turn(caller, context.peer()) as turn:
                data = [await only(_messages(requests, context), self._house.idle)]
                turn.received = True
                return await self._parsed(data.pop(), caller)
        except ServiceError as error:
            refused = error.with_traceback(None)  # its frames hold the message
        async with rpc_scope(self._house, context, self._rpc):
            raise refused

    def _of_several_written(self, behaviour: Behaviour) -> Behaviour:
        """Our own streams, which answer for the error themselves, and say when a message is answered."""

        async def answer(requests: AsyncIterator[bytes], context: Context) -> None:
            held: set[Release] = set()
            try:
                await behaviour(self._received(_messages(requests, context), context, held), context)
            except grpc.aio.AbortError as error:
                raise error.with_traceback(None) from None  # as above
            finally:  # of those that were read and never begun, too
                for release in held:
                    release()

        return answer

    async def _received(
        self, requests: AsyncIterator[bytes], context: Context, held: set[Release]
    ) -> AsyncIterator[Received[Any]]:
        while (found := [await self._next(requests, context, held)])[0] is not None:
            yield cast("Received[Any]", found.pop())  # not kept here until the next one comes

    async def _next(self, requests: AsyncIterator[bytes], context: Context, held: set[Release]) -> Received[Any] | None:
        """Return the next message of a stream, or None at its end; add what releases its memory to `held`."""
        caller = caller_of(context)
        async with self._streamed.turn(caller, context.peer()) as turn:
            data = [await anext(requests, None)]
            turn.received = True
            if data[0] is None:
                return None
            message, release = await self._parsed(cast("bytes", data.pop()), caller)
            held.add(release)
            return Received(message, partial(_let_go, held, release))

    def _of_several(self, behaviour: Behaviour) -> Behaviour:
        async def answer(requests: AsyncIterator[bytes], context: Context) -> None:
            try:
                async for reply in behaviour(self._in_turn(_messages(requests, context), context), context):
                    await context.write(reply)
            except ServiceError as error:
                async with rpc_scope(self._house, context, self._rpc):
                    raise error from None

        return answer

    async def _in_turn(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        """Yield messages, each of which is answered when the next is asked for."""
        while (received := await self._next(requests, context, set())) is not None:
            try:
                yield received.message
            finally:
                received.release()
                del received


def _messages(requests: AsyncIterator[bytes], context: Context) -> Messages:
    return requests if isinstance(requests, Messages) else Messages(context)


def _let_go(held: set[Release], release: Release) -> None:
    if release in held:
        held.remove(release)
        release()
