"""The services over HTTP: JSON messages, errors, statuses and streams of the Connect protocol.

A server and a proxy share this module. Messages follow protobuf's JSON mapping, and errors the Connect protocol,
https://connectrpc.com/docs/protocol.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, cast

import grpc

from camserve._codec.json_messages import COMPACT, InvalidJson, Json, dump_json, from_json, from_tree, to_json
from camserve._codec.protocol import (
    IMAGE_FORMATS,
    RPCS,
    Trailers,
    code_name,
    error_bytes,
    error_json,
    message_class,
    retry_after,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = [
    "COMPACT",
    "CONNECT_JSON",
    "CONNECT_PROTO",
    "HTTP_STATUS",
    "IMAGE_FORMATS",
    "JSON",
    "MAX_EMPTY_LINES",
    "NDJSON",
    "PROTO",
    "RPCS",
    "SECURITY_HEADERS",
    "Envelopes",
    "FrameTooLong",
    "InvalidFrame",
    "InvalidJson",
    "Json",
    "Lines",
    "Trailers",
    "code_name",
    "end_of_stream",
    "envelope",
    "error_bytes",
    "error_json",
    "from_json",
    "from_tree",
    "message_class",
    "retry_after",
    "to_json",
]

HTTP_STATUS: Mapping[grpc.StatusCode, int] = {
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNKNOWN: 500,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DATA_LOSS: 500,
    grpc.StatusCode.UNAUTHENTICATED: 401,
}
"""The HTTP status of each code, as the Connect protocol has it."""

JSON = "application/json"
PROTO = "application/proto"
NDJSON = "application/x-ndjson"
CONNECT_JSON = "application/connect+json"
CONNECT_PROTO = "application/connect+proto"

SECURITY_HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of every response. A page runs only scripts of its own origin, and no other page may embed it."""
MAX_EMPTY_LINES = 500
"""Empty lines between two messages of a stream in lines; more are refused, because each takes time."""

COMPRESSED, END_OF_STREAM = 0b01, 0b10  # flags of an envelope
_HEAD = struct.Struct(">BI")  # flags and length of an envelope


class InvalidFrame(ValueError):
    """A stream cannot be split into messages, or ended within one."""


class FrameTooLong(InvalidFrame):
    """A message of a stream is longer than allowed."""


def envelope(data: bytes, flags: int = 0) -> bytes:
    """Return a message of a Connect stream: flags, length and data."""
    return _HEAD.pack(flags, len(data)) + data


def end_of_stream(error: Json | None) -> bytes:
    """Return the last message of a Connect stream, with the error that ended it."""
    return envelope(dump_json({"error": error} if error else {}), END_OF_STREAM)


class Envelopes:
    """Splitter of a Connect stream into messages.

    Args:
        limit: The largest size of a message in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._buffer = limit, bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are complete with this data.

        Raises:
            FrameTooLong: A message is longer than the limit.
        """
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            _, length = cast("tuple[int, int]", _HEAD.unpack_from(self._buffer))
            if length > self._limit:
                raise FrameTooLong(_too_long(self._limit))
            end = _HEAD.size + length
            if len(self._buffer) < end:
                return
            message = bytes(memoryview(self._buffer)[_HEAD.size : end])
            del self._buffer[:end]
            yield message

    def end(self) -> Iterator[bytes]:
        """Yield nothing more.

        Raises:
            InvalidFrame: The stream ended within a message.
        """
        if self._buffer:
            raise InvalidFrame("the stream ended within a message")
        yield from ()


class Lines:
    """Splitter of a stream with one JSON message on each line. A few empty lines between messages are ignored.

    Args:
        limit: The largest size of a message in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._rest, self._empty = limit, bytearray(), 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are complete with this data.

        Raises:
            FrameTooLong: A message is longer than the limit.
            InvalidFrame: There are more than `MAX_EMPTY_LINES` empty lines in a row.
        """
        first, *others = data.split(b"\n")
        self._rest += first
        if others:
            yield from self._checked((bytes(self._rest), *others[:-1]))
            self._rest = bytearray(others[-1])
        if len(self._rest) > self._limit:
            raise FrameTooLong(_too_long(self._limit))

    def end(self) -> Iterator[bytes]:
        """Yield the last message, if its line does not end."""
        line, self._rest = bytes(self._rest), bytearray()
        yield from self._checked((line,) if line else ())

    def _checked(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in map(bytes.strip, lines):
            if line:
                if len(line) > self._limit:
                    raise FrameTooLong(_too_long(self._limit))
                self._empty = 0
                yield line
            elif self._empty == MAX_EMPTY_LINES:
                raise InvalidFrame(f"the stream has more than {MAX_EMPTY_LINES:,} empty lines in a row")
            else:
                self._empty += 1


def _too_long(limit: int) -> str:
    return f"the message is larger than {limit:,} bytes, which is the limit"
