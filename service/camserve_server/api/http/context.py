"""Context of an HTTP call, with the methods of `grpc.aio.ServicerContext` that the services use.

The services call these methods on the event loop of calls. The rest of a context runs on that of HTTP.
"""

import asyncio
import re
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import Message
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from camserve.web import connect
from camserve.web.connect import Json, error_bytes, error_json, retry_after
from camserve_server.api.connection_limits import ReceiveSlot, receive_within
from camserve_server.api.http.forms import Media
from camserve_server.api.http.loops import run_on
from camserve_server.core.errors import InvalidArgument, ResourceExhausted

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]

TIMEOUT = re.compile(r"\d{1,10}", re.ASCII)
PAYLOAD_TOO_LARGE = 413
RETURNED = ("x-request-id", "camserve-process")  # metadata that is returned as headers


class CallFailed(grpc.aio.AbortError):
    """Failure of a call, as gRPC's own `abort` raises it.

    Args:
        code: the status code.
        message: the error message.
        trailers: trailing metadata, with the details.
    """

    def __init__(self, code: grpc.StatusCode, message: str, trailers: Metadata = ()) -> None:
        super().__init__(message)
        self.code, self.message, self.trailers = code, message, trailers

    def json(self) -> Json:
        """Return the error in the Connect protocol's form."""
        return error_json(self.code, self.message, self.trailers)


class HttpContext:
    """Context of a call, which reads its request and sends its response.

    Create it in the task of the request, on the event loop of HTTP.

    Args:
        scope: scope of the request.
        receive: function that returns the next part of the request.
        send: function that sends a part of the response.
        media: media type of the messages.
        limit: the largest size of a message in bytes.

    Attributes:
        headers: headers of the request.
        deadline: deadline on the clock of event loops, or None.
        hung_up: True if the caller has closed the connection.
        http_status: HTTP status of a failure; 0 for that of its code.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, media: Media, limit: int) -> None:
        self.headers = Headers(scope=scope)
        self.deadline = _deadline(self.headers)
        self.hung_up, self.http_status = False, 0
        self._client: tuple[str, int] = scope["client"]
        self._receive, self._send, self._media, self._limit = receive, send, media, limit
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None
        self._returned: dict[str, str] = {}
        self._callbacks: list[Callable[[Any], object]] = []
        self._started = False

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None without one."""
        return None if self.deadline is None else max(0.0, self.deadline - asyncio.get_running_loop().time())

    def invocation_metadata(self) -> Metadata:
        """Return the headers of the request."""
        return list(self.headers.items())

    def peer(self) -> str:
        """Return the address of the caller, as gRPC writes it."""
        host, port = self._client[:2]
        return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Add metadata to the headers of the response, which is not sent yet."""
        self.set_trailing_metadata(metadata)

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """Add metadata to the headers of the response."""
        self._returned |= {key: str(value) for key, value in metadata if key in RETURNED}

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call a function when the response has been sent, or the caller has gone."""
        self._callbacks.append(callback)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call with an error.

        Raises:
            CallFailed: always.
        """
        self.set_trailing_metadata(trailing_metadata)
        raise CallFailed(code, details, trailing_metadata)

    @abstractmethod
    async def read(self) -> Any:
        """Return the next message, or `grpc.aio.EOF`."""

    def done(self, loop: asyncio.AbstractEventLoop) -> None:
        """Release what the call holds on an event loop."""
        self.stop_watching()
        for callback in self._callbacks:
            loop.call_soon_threadsafe(callback, self)

    def stop_watching(self) -> None:
        """Ignore from now on that the caller hangs up."""
        if self._watcher:
            self._watcher.cancel()

    async def _read_part(self) -> bytes | None:
        """Return the next part of the request, or None after the last one; cancel the call if the caller has gone."""
        if self._watcher:
            return None
        part = await self._receive()
        if part["type"] == "http.disconnect":
            self._hang_up()
            await asyncio.Event().wait()
        if not part.get("more_body", False):
            self._watcher = asyncio.create_task(self._watch())
        body: bytes = part.get("body", b"")
        return body

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._hang_up()

    def _hang_up(self) -> None:
        self.hung_up = True
        if self._task:
            self._task.cancel()

    def _refuse_size(self) -> NoReturn:
        self.http_status = PAYLOAD_TOO_LARGE
        raise ResourceExhausted(f"the message is larger than {self._limit:,} bytes, which is the limit")

    async def _encode(self, reply: Message) -> bytes:
        # Always in a thread: the size of a message, by which to decide, takes 0.2 s for 32 MiB.
        return await asyncio.to_thread(self._media.encode, reply)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._started = True
        fields = {"cache-control": "no-store", **headers, **self._returned}
        packed = [(name.encode("ascii"), value.encode("latin-1", "replace")) for name, value in fields.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": packed})

    async def _send_part(self, data: bytes) -> None:
        """Send a part of the response, and return when nearly all of it has left this process."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": True})

    async def _finish(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.stop_watching()
        await self._start(status, {**headers, "content-length": str(len(body))})
        await self._send_part(body)
        await self._finish()

    async def send_error(self, error: CallFailed) -> None:
        """Send the response of a call that failed."""
        headers = {"content-type": connect.JSON}
        if seconds := retry_after(error.trailers):
            headers["retry-after"] = seconds
        if error.code is grpc.StatusCode.UNAUTHENTICATED:
            headers["www-authenticate"] = "Bearer"
        status = self.http_status or connect.HTTP_STATUS[error.code]
        await self._respond(status, headers, error_bytes(error.json()))


class UnaryContext(HttpContext):
    """Context of a call with one message."""

    _message: bytes | None = None
    _slot: ReceiveSlot | None = None

    @asynccontextmanager
    async def received(self, slot: ReceiveSlot, seconds: float) -> AsyncIterator[None]:
        """Receive the message before the block. The slot is held until `read` has taken the message, or the block ends.

        Raises:
            ServiceError: the message is too large, or it did not arrive within this time.
        """
        async with slot as self._slot:
            self._message = await receive_within(self._receive_message(), seconds)
            slot.received = True
            yield

    async def read(self) -> Any:
        """Return the message, or `grpc.aio.EOF` if it was returned before."""
        if self._message is None or self._slot is None:
            return grpc.aio.EOF
        message, self._message = self._message, None
        self._loop.call_soon_threadsafe(self._slot.release)
        return message

    async def _receive_message(self) -> bytes:
        if int(self.headers.get("content-length", "0")) > self._limit:
            self._refuse_size()
        body = bytearray()
        while (part := await self._read_part()) is not None:
            body += part
            if len(body) > self._limit:
                self._refuse_size()
        return bytes(body)

    async def send_reply(self, reply: Message) -> None:
        """Send the response of a call that succeeded."""
        await self._respond(200, {"content-type": self._media.name}, await self._encode(reply))

    async def send_picture(self, picture: bytes, media_type: str) -> None:
        """Send a picture as the response."""
        await self._respond(200, {"content-type": media_type}, picture)


class StreamContext(HttpContext):
    """Context of a stream."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, media: Media, limit: int) -> None:
        super().__init__(scope, receive, send, media, limit)
        self._splitter = (media.framing or connect.Lines)(limit)
        self._messages: deque[bytes | None] = deque()  # None is the end

    async def read(self) -> Any:
        """Return the next message, or `grpc.aio.EOF` after the last one."""
        if not self._messages:
            await run_on(self._loop, self._receive_messages())
        message = self._messages.popleft()
        return grpc.aio.EOF if message is None else message

    async def _receive_messages(self) -> None:
        """Receive parts of the request until they make a message."""
        try:
            while not self._messages:
                if (part := await self._read_part()) is None:
                    self._messages.extend((*self._splitter.end(), None))
                else:
                    self._messages.extend(self._splitter.feed(part))
        except connect.FrameTooLong:
            self._refuse_size()
        except connect.InvalidFrame as error:
            raise InvalidArgument(str(error)) from None

    async def write(self, reply: Message) -> None:
        """Send a reply, and return when nearly all of it has left this process."""
        await run_on(self._loop, self._send_reply(reply))

    async def _send_reply(self, reply: Message) -> None:
        data = await self._encode(reply)
        await self._start_stream()
        await self._send_part(data + b"\n" if self._in_lines else connect.envelope(data))

    async def end(self, error: CallFailed | None = None) -> None:
        """Send the end of the stream, and the error that ended it."""
        if error and self._in_lines and not self._started:
            await self.send_error(error)
            return
        self.stop_watching()
        await self._start_stream()
        if not self._in_lines:
            await self._send_part(connect.end_of_stream(error.json() if error else None))
        elif error:
            await self._send_part(error_bytes({"streamError": error.json()}) + b"\n")
        await self._finish()

    @property
    def _in_lines(self) -> bool:
        return self._media.framing is connect.Lines

    async def _start_stream(self) -> None:
        if not self._started:
            await self._start(200, {"content-type": self._media.name})


def _deadline(headers: Headers) -> float | None:
    """Return the deadline on the clock of event loops; None without a valid timeout."""
    value = headers.get("connect-timeout-ms", "")
    return asyncio.get_running_loop().time() + int(value) / 1e3 if TIMEOUT.fullmatch(value) else None


def check_protocol(headers: Headers) -> None:
    """Check the headers of the Connect protocol.

    Raises:
        InvalidArgument: a header is invalid.
    """
    timeout, version = headers.get("connect-timeout-ms", "0"), headers.get("connect-protocol-version", "1")
    if not TIMEOUT.fullmatch(timeout):
        raise InvalidArgument("connect-timeout-ms has 1 to 10 digits")
    if version != "1":
        raise InvalidArgument("connect-protocol-version must be 1")
