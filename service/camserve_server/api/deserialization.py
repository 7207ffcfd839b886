"""Parsing of messages as far as memory allows, over gRPC and HTTP. Large messages are parsed outside the event loop.

A message that cannot be parsed is refused with an error of the server; gRPC's own names the Python class that failed.
"""

import inspect
import math
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, TypeAlias, TypeVar, cast

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError

from camserve_server.api import oip
from camserve_server.api.codec.compression import decompress, is_compressed
from camserve_server.api.codec.footprint import COPIES, ELEMENT, Shape, footprint, shape_of
from camserve_server.api.connection_limits import Messages, ReceiveLimiter, receive_first
from camserve_server.api.interceptor import Handler, Interceptor
from camserve_server.api.rpc import Context, ServerState, caller_of, rpc_scope
from camserve_server.api.streams import Received
from camserve_server.core.config import Settings
from camserve_server.core.errors import InvalidArgument, ServiceError
from camserve_server.scheduling.admission import Admission, FairThreads
from camserve_server.scheduling.threads import in_thread

Behaviour: TypeAlias = Callable[[Any, Context], Any]
Parse: TypeAlias = Callable[[bytes], Any]
Release: TypeAlias = Callable[[], None]
T = TypeVar("T")

MAX_FIELDS = 32_768  # fields of a message, including those of nested messages
INLINE_FIELDS = 1000  # fields of a message that is parsed on the event loop, in about a millisecond
INLINE_BYTES = 2**20  # bytes of such a message
MAX_RECEIVING = 4  # messages of one caller's calls received at the same time, and as many of its streams
MESSAGE_MEMORY = 64 * 2**20  # bytes of all unanswered messages, of all processes; others wait, mostly unread
ITEM_MEMORY = 8 * 2**10  # bytes of a request of a stream, whatever its message: its task, and a reply that is not read
MEMORY_FACTOR = 4  # memory of one parsed message, as a multiple of the largest message that may be sent


@dataclass(frozen=True, slots=True)
class Form:
    """Form in which messages of a type are sent: protobuf's own, or JSON.

    Attributes:
        shape: shape of the message's type.
        parse: function that parses a decompressed message.
        count: function that returns the memory of a message, or None if it has too many fields; see `footprint`.
        inline_fields: fields of a message that is parsed on the event loop.
        growth: length of a message in this form, as a multiple of the serialized message.
        base: memory that is counted for every message beside `count`, in bytes.
    """

    shape: Shape
    parse: Parse
    count: Callable[[bytes, Shape, int], int | None] = footprint
    inline_fields: int = INLINE_FIELDS
    growth: float = 1.0
    base: int = 0


class DeserializationInterceptor(Interceptor):
    """Interceptor that parses the messages of every RPC, including health checks and reflection.

    Args:
        state: state of the server, which counts refused calls too.
        limits: limits on messages.
    """

    def __init__(self, state: ServerState, limits: "MessageLimits") -> None:
        super().__init__()
        self._state, self._limits = state, limits

    def wrap(self, method: str, handler: Any) -> Handler:
        """Return a handler that receives bytes, and passes the parsed messages to the RPC's own handler.

        The handler of a call with one request is registered as a stream, too: gRPC receives the messages of a stream
        only when the handler reads them, and it would receive the message of any other call at once.
        """
        deserialization = Deserialization(self._state, self._limits, method, handler.request_deserializer)
        serializers = (None, handler.response_serializer)  # without a deserializer, gRPC passes bytes
        if handler.unary_unary:
            return grpc.stream_unary_rpc_method_handler(deserialization.unary(handler.unary_unary), *serializers)
        if handler.unary_stream:
            return grpc.stream_stream_rpc_method_handler(deserialization.unary(handler.unary_stream), *serializers)
        is_generator = inspect.isasyncgenfunction(handler.stream_stream)
        wrap = deserialization.generator_stream if is_generator else deserialization.writing_stream
        return grpc.stream_stream_rpc_method_handler(wrap(handler.stream_stream), *serializers)


class MessageParser:
    """Parser of messages with a limit on their memory, which callers share.

    Args:
        largest: the largest size of a message, in bytes.
        memory: the memory, in bytes, of all messages that are not answered yet.
    """

    def __init__(self, largest: int, memory: int) -> None:
        self._largest = largest
        # Room for the largest message, with what must stay free beside it.
        self._memory = Admission(max(memory, MEMORY_FACTOR * largest + 2 * largest), 0, line=math.inf, headroom=True)
        self._threads = FairThreads(ThreadPoolExecutor(1, thread_name_prefix="parse"))

    async def parse(self, data: bytes, form: Form, caller: str) -> tuple[Any, Release]:
        """Parse a message when there is memory for it; return it and the function that releases the memory.

        Args:
            data: the message, which may be compressed.
            form: form of the message.
            caller: the caller that sent the message.

        Raises:
            InvalidArgument: the message has too many fields, or takes too much memory once it is parsed.
            ResourceExhausted: the message is too large once it is decompressed.
            DecodeError: the data is not a message of this type.
        """
        size = self._inline_size(data, form)
        if size is None:
            return await self._parse_in_turn(data, form, caller)
        release = await self._hold(size, caller)
        try:
            return form.parse(data), release
        except BaseException:
            release()
            raise

    async def _parse_in_turn(self, data: bytes, form: Form, caller: str) -> tuple[Any, Release]:
        """Parse a message in the thread that callers share, in which they take turns.

        Memory is reserved before the message waits for its turn. That for its bytes and a few fields is nearly always
        enough. Otherwise it is released before what was counted is reserved: messages that each keep a part, and wait
        for the rest, would wait for each other.
        """
        reserved = min(form.base + COPIES * len(data) + ELEMENT * INLINE_FIELDS, MEMORY_FACTOR * self._largest)
        (size, message), release = await self._run(caller, reserved, self._parse_within, data, form, reserved)
        if size <= reserved:
            return message, release
        release()
        return await self._run(caller, size, self._parse, data, form)

    async def _run(self, caller: str, size: int, step: Callable[..., T], *args: Any) -> tuple[T, Release]:
        """Run a step in the thread when it is the caller's turn, with memory reserved meanwhile and afterwards."""
        release = await self._hold(size, caller)
        try:
            return await in_thread(self._threads.of(caller), step, *args), release
        except BaseException:
            release()
            raise

    async def _hold(self, size: int, caller: str) -> Release:
        if size > MEMORY_FACTOR * self._largest:
            message = f"the message takes {size:,} bytes of memory, and {MEMORY_FACTOR * self._largest:,} is the limit"
            raise InvalidArgument(message)
        return await self._memory.hold(size, caller=caller, wait=True)

    def _inline_size(self, data: bytes, form: Form) -> int | None:
        """Return the memory of a message in bytes, or None if it takes the event loop too long to count or parse it."""
        if len(data) > INLINE_BYTES or is_compressed(data):
            return None
        size = form.count(data, form.shape, form.inline_fields)
        return None if size is None else form.base + size

    def _parse_within(self, data: bytes, form: Form, memory: int) -> tuple[int, Any]:
        """Return the memory of a message in bytes, and the message, or None if it takes more than `memory`."""
        size = self._size(data, form)
        return size, self._parse(data, form) if size <= memory else None

    def _size(self, data: bytes, form: Form) -> int:
        size = form.count(self._decompress(data, form), form.shape, MAX_FIELDS)
        if size is None:
            raise InvalidArgument(f"the message has more than {MAX_FIELDS:,} fields, which is the limit")
        return form.base + size

    def _parse(self, data: bytes, form: Form) -> Any:
        # Decompressed a second time: while it waits for memory, a decompressed message would already take it.
        return form.parse(self._decompress(data, form))

    def _decompress(self, data: bytes, form: Form) -> bytes:
        return decompress(data, int(form.growth * self._largest)) if is_compressed(data) else data


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Limits on the messages that a server receives over all its protocols.

    Attributes:
        parser: parser of the messages, with the limit on their memory.
        calls: limit on messages of calls that are received at the same time.
        streams: limit on messages of streams that are received at the same time.
        http_calls: limit on messages of calls over HTTP, which are received on another event loop.
    """

    parser: MessageParser
    calls: ReceiveLimiter
    streams: ReceiveLimiter
    http_calls: ReceiveLimiter

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the limits of these settings."""
        parser = MessageParser(settings.max_message_mib * 2**20, MESSAGE_MEMORY // settings.sharing)
        return cls(parser, *(ReceiveLimiter(MAX_RECEIVING) for _ in range(3)))


class Deserialization:
    """Deserialization of the messages of one RPC.

    Args:
        state: state of the server.
        limits: limits on messages.
        method: full name of the RPC.
        parse: function that parses a message.
        form: function that returns the form of the messages, from the shape of their type and `parse`.
    """

    def __init__(
        self,
        state: ServerState,
        limits: MessageLimits,
        method: str,
        parse: Parse,
        form: Callable[[Shape, Parse], Form] = Form,
    ) -> None:
        self._state, self._limits = state, limits
        rpc = descriptor_pool.Default().FindMethodByName(oip.own_name(method.strip("/").replace("/", ".")))
        self._rpc, self._refusal = rpc.name, f"the message is not a {oip.known_as(rpc.input_type.full_name)}"
        self._form = replace(form(shape_of(rpc.input_type), parse), base=ITEM_MEMORY if rpc.client_streaming else 0)

    async def _parse(self, data: bytes, caller: str) -> tuple[Any, Release]:
        try:
            return await self._limits.parser.parse(data, self._form, caller)
        except DecodeError:
            raise InvalidArgument(self._refusal) from None

    def unary(self, behaviour: Behaviour) -> Behaviour:
        """Wrap a handler that takes one message."""

        async def answer(requests: AsyncIterator[bytes], context: Context) -> Any:
            try:
                message, release = await self._receive_unary(requests, context)
                message = [message]  # popped below, so that this frame does not keep the message in memory
                try:
                    return await behaviour(message.pop(), context)
                finally:
                    release()
            except grpc.aio.AbortError as error:
                # gRPC's call refers to this error, and the frames of its traceback refer to the call and the message.
                # This cycle would keep them in memory until the next garbage collection.
                raise error.with_traceback(None) from None

        return answer

    async def _receive_unary(self, requests: AsyncIterator[bytes], context: Context) -> tuple[Any, Release]:
        """Return the only message of a call and the function that releases its memory, or abort the call."""
        caller = caller_of(context)
        try:
            async with self._limits.calls.slot(caller, context.peer()) as slot:
                data = [await receive_first(_messages(requests, context), self._state.idle)]
                slot.received = True
                return await self._parse(data.pop(), caller)
        except ServiceError as error:
            refusal = error.with_traceback(None)  # the frames of the traceback refer to the message
        async with rpc_scope(self._state, context, self._rpc):
            raise refusal

    def writing_stream(self, behaviour: Behaviour) -> Behaviour:
        """Wrap a handler that reads `Received` messages, releases each of them, and handles errors itself."""

        async def answer(requests: AsyncIterator[bytes], context: Context) -> None:
            held: set[Release] = set()
            try:
                await behaviour(self._receive_all(_messages(requests, context), context, held), context)
            except grpc.aio.AbortError as error:
                raise error.with_traceback(None) from None  # as in `unary`
            finally:  # some messages may have been read and never answered
                for release in held:
                    release()

        return answer

    async def _receive_all(
        self, requests: AsyncIterator[bytes], context: Context, held: set[Release]
    ) -> AsyncIterator[Received[Any]]:
        while (received := [await self._receive_next(requests, context, held)])[0] is not None:
            yield cast("Received[Any]", received.pop())  # popped, so that this frame does not keep it in memory

    async def _receive_next(
        self, requests: AsyncIterator[bytes], context: Context, held: set[Release]
    ) -> Received[Any] | None:
        """Return the next message of a stream, or None at its end; add the function that releases it to `held`."""
        caller = caller_of(context)
        async with self._limits.streams.slot(caller, context.peer()) as slot:
            data = [await anext(requests, None)]
            slot.received = True
            if data[0] is None:
                return None
            message, release = await self._parse(cast("bytes", data.pop()), caller)
            held.add(release)
            return Received(message, partial(_release_once, held, release))

    def generator_stream(self, behaviour: Behaviour) -> Behaviour:
        """Wrap a handler that is an asynchronous generator over plain messages."""

        async def answer(requests: AsyncIterator[bytes], context: Context) -> None:
            try:
                async for reply in behaviour(self._one_at_a_time(_messages(requests, context), context), context):
                    await context.write(reply)
            except ServiceError as error:
                async with rpc_scope(self._state, context, self._rpc):
                    raise error from None

        return answer

    async def _one_at_a_time(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        """Yield messages. Each is released when the handler requests the next one, and has answered it by then."""
        while (received := await self._receive_next(requests, context, set())) is not None:
            try:
                yield received.message
            finally:
                received.release()
                del received


def _messages(requests: AsyncIterator[bytes], context: Context) -> Messages:
    return requests if isinstance(requests, Messages) else Messages(context)


def _release_once(held: set[Release], release: Release) -> None:
    if release in held:
        held.remove(release)
        release()
