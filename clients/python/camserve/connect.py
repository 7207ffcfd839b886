"""The services over HTTP: JSON messages, errors, statuses and streams of the Connect protocol.

A server and a proxy share this module. Messages follow protobuf's JSON mapping, and errors the Connect protocol,
https://connectrpc.com/docs/protocol.
"""

from __future__ import annotations

import base64
import difflib
import functools
import json
import math
import struct
from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar, cast

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.message import DecodeError, Message
from google.rpc import (  # pyright: ignore[reportMissingTypeStubs]  # it ships .pyi files without a py.typed marker
    error_details_pb2,
    status_pb2,
)

from camserve.v1 import evaluate_pb2, explain_pb2, models_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor

M = TypeVar("M", bound=Message)
Trailers: TypeAlias = "Iterable[tuple[str, str | bytes]]"
Json: TypeAlias = dict[str, Any]

RPCS: Mapping[str, MethodDescriptor] = {
    f"/{service.full_name}/{rpc.name}": rpc
    for file in (explain_pb2, evaluate_pb2, models_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for rpc in service.methods
}
"""The RPCs by the path of their URL, such as "/camserve.v1.ExplainService/Explain"."""

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

COMPACT: Mapping[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}
"""Options of JSON without spaces."""
LONG_TEXT = 2**14
"""A message with a text of more characters, such as a picture, is encoded as JSON value by value."""

JSON = "application/json"
PROTO = "application/proto"
NDJSON = "application/x-ndjson"
CONNECT_JSON = "application/connect+json"
CONNECT_PROTO = "application/connect+proto"

IMAGE_FORMATS: Mapping[str, explain_pb2.ImageFormat.ValueType] = {
    "image/jpeg": explain_pb2.IMAGE_FORMAT_JPEG,
    "image/png": explain_pb2.IMAGE_FORMAT_PNG,
    "image/webp": explain_pb2.IMAGE_FORMAT_WEBP,
}
"""Formats of pictures by their media types."""

SECURITY_HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of every response. A page runs only scripts of its own origin, and no other page may embed it."""

MAX_REASON = 300  # characters of a message of the JSON library; it may quote the request
MAX_EMPTY_LINES = 500
"""Empty lines between two messages of a stream in lines; more are refused, because each takes time."""

COMPRESSED, END_OF_STREAM = 0b01, 0b10  # flags of an envelope
_HEAD = struct.Struct(">BI")  # flags and length of an envelope


class InvalidJson(ValueError):
    """The JSON is malformed, or does not fit the message.

    Args:
        message: The fault.
        field: Path of the field at fault, such as ``targets[0].label``; empty if no field is.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(_valid(message))
        self.field = _valid(field)


def _valid(text: str) -> str:
    """Replace unpaired surrogates, which JSON may have, and UTF-8 and protobuf may not."""
    return text.encode(errors="replace").decode()


class InvalidFrame(ValueError):
    """A stream cannot be split into messages, or ended within one."""


class FrameTooLong(InvalidFrame):
    """A message of a stream is longer than allowed."""


def code_name(code: grpc.StatusCode) -> str:
    """Return the Connect protocol's name of a code.

    Example:
        >>> code_name(grpc.StatusCode.NOT_FOUND), code_name(grpc.StatusCode.CANCELLED)
        ('not_found', 'canceled')
    """
    return "canceled" if code is grpc.StatusCode.CANCELLED else code.name.lower()


def to_json(message: Message) -> bytes:
    """Return a message as JSON on one line. Names are in lowerCamelCase, and bytes in base64."""
    return _dump(json_format.MessageToDict(message))


def from_json(data: bytes, message: M) -> M:
    """Fill a message from JSON, and return it. Names may be in lowerCamelCase or in snake_case.

    Raises:
        InvalidJson: The JSON is malformed, or has a field that the message does not have.
    """
    tree = _load(data)
    _check(tree, cast("Descriptor", message.DESCRIPTOR), "")
    return from_tree(tree, message)


def from_tree(tree: object, message: M) -> M:
    """Fill a message from a value that was JSON, and return it.

    Raises:
        InvalidJson: A value does not fit its field, or the message has no such field.

    Example:
        >>> from camserve.v1 import explain_pb2
        >>> from_tree({"classIndex": 3}, explain_pb2.Target()).class_index
        3
    """
    try:
        return json_format.ParseDict(cast("Json", tree), message)
    except json_format.ParseError as error:
        raise InvalidJson(str(error)[:MAX_REASON].rstrip(".")) from None
    except (ValueError, TypeError, OverflowError, SystemError):
        # protobuf raises these for a number of 400 digits, and for 1e400 or an unpaired surrogate as an enum.
        raise InvalidJson("a value does not fit its field") from None


def _dump(tree: Json) -> bytes:
    if not _has_long_text(tree):
        return json.dumps(tree, **COMPACT).encode()
    # Value by value, so that other threads run in between: at once, 64 pictures of 0.5 MB hold the interpreter's lock
    # for 0.25 s instead of 0.01.
    return b"".join([part.encode() for part in json.JSONEncoder(**COMPACT).iterencode(tree)])


def _has_long_text(tree: object) -> bool:
    """Return whether a tree has a long text. The size of the message is not used: `ByteSize` serializes all of it."""
    if isinstance(tree, str):
        return len(tree) > LONG_TEXT
    if isinstance(tree, dict):
        return any(map(_has_long_text, cast("Json", tree).values()))
    return isinstance(tree, list) and any(map(_has_long_text, cast("list[object]", tree)))


def _load(data: bytes) -> object:
    if not data.strip():
        raise InvalidJson("the message is empty: send {} for a message without fields")
    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise InvalidJson("the message is not JSON in UTF-8") from None
    except RecursionError:
        raise InvalidJson("the JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidJson(f"the message is not valid JSON: {error.msg} at {where}") from None
    except InvalidJson:
        raise
    except ValueError:  # a number with thousands of digits
        raise InvalidJson("the JSON has a number that is too long") from None


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    result = dict(pairs)
    if len(result) < len(pairs):
        repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise InvalidJson(f'"{repeated[:100]}" is given twice in one object')
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidJson(f'{name} is not JSON: write it in quotes, as "{name}"')


def _check(tree: object, message: Descriptor, path: str) -> None:
    """Check that objects and lists are where the message has them, and that it has every field."""
    if not isinstance(tree, dict):
        raise InvalidJson(f"{path or 'the message'} must be an object", path)
    fields, seen = _fields(message), set[str]()
    for name, value in cast("Json", tree).items():
        where = f"{path}.{name}" if path else name
        field = fields.get(name)
        if field is None:
            hint = _did_you_mean(name, [field.json_name for field in message.fields])
            raise InvalidJson(f'unknown field "{where[:100]}" of {message.full_name}{hint}', where[:100])
        if field.name in seen:
            raise InvalidJson(f"{where} is given twice", where)
        seen.add(field.name)
        if value is not None:
            _check_field(value, field, f"{path}.{field.name}" if path else field.name)


def _check_field(value: object, field: FieldDescriptor, path: str) -> None:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        if not isinstance(value, dict):
            raise InvalidJson(f"{path} must be an object", path)
        inner = message.fields_by_name["value"]
        for key, item in cast("Json", value).items():
            _check_value(item, inner, f"{path}[{key[:100]}]")
    elif not field.is_repeated:
        _check_value(value, field, path)
    elif not isinstance(value, list):
        raise InvalidJson(f"{path} must be a list", path)
    else:
        for index, item in enumerate(cast("list[object]", value)):
            _check_value(item, field, f"{path}[{index}]")


def _check_value(value: object, field: FieldDescriptor, path: str) -> None:
    if field.message_type is not None:
        _check(value, field.message_type, path)
    elif field.type == field.TYPE_BYTES:
        if not isinstance(value, str):
            raise InvalidJson(f"{path} must be a text in base64", path)
        if value.startswith("data:"):
            raise InvalidJson(f'{path} must be base64 alone, without "data:…;base64,"', path)


@functools.cache
def _fields(message: Descriptor) -> Mapping[str, FieldDescriptor]:
    """Return the fields of a message by the names that JSON may use."""
    return {name: field for field in message.fields for name in (field.json_name, field.name)}


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    similar = difflib.get_close_matches(name[:100], known, n=1)
    return f' (did you mean "{similar[0]}"?)' if similar else ""


def error_json(code: grpc.StatusCode, message: str, trailers: Trailers = ()) -> Json:
    """Return an error of a call in the Connect protocol's form.

    Args:
        code: The status code.
        message: The error message.
        trailers: The trailing metadata, whose ``grpc-status-details-bin`` has the details.
    """
    packed = next((value for key, value in trailers if key == "grpc-status-details-bin"), b"")
    result: Json = {"code": code_name(code), "message": message}
    if details := list(_details(packed)):
        result["details"] = details
    return result


def _details(packed: str | bytes) -> Iterator[Json]:
    try:
        status = status_pb2.Status.FromString(packed if isinstance(packed, bytes) else packed.encode())
    except DecodeError:
        return
    for detail in status.details:
        name = detail.TypeName()
        value = base64.b64encode(detail.value).rstrip(b"=").decode("ascii")
        yield {"type": name, "value": value} | _debug(name, detail.value)


def _debug(name: str, value: bytes) -> Json:
    """Return a detail in readable form; empty if its type is unknown or it cannot be parsed."""
    known = {kind.DESCRIPTOR.full_name: kind for kind in _DETAILS}
    if name not in known:
        return {}
    try:
        return {"debug": json_format.MessageToDict(known[name].FromString(value))}
    except DecodeError:
        return {}


_DETAILS: tuple[type[Message], ...] = (
    error_details_pb2.BadRequest,
    error_details_pb2.ErrorInfo,
    error_details_pb2.RequestInfo,
)


def error_bytes(error: Json) -> bytes:
    """Return the body of a response with an error."""
    return _dump(error)


def retry_after(trailers: Trailers) -> str:
    """Return the value of the header Retry-After, in seconds; empty if a retry makes no sense."""
    for key, value in trailers:
        if key == "grpc-retry-pushback-ms" and int(value) >= 0:
            return str(math.ceil(int(value) / 1000))
    return ""


def message_class(descriptor: Descriptor) -> type[Message]:
    """Return the class of messages, such as of an RPC's ``input_type``."""
    return message_factory.GetMessageClass(descriptor)


def envelope(data: bytes, flags: int = 0) -> bytes:
    """Return a message of a Connect stream: flags, length and data."""
    return _HEAD.pack(flags, len(data)) + data


def end_of_stream(error: Json | None) -> bytes:
    """Return the last message of a Connect stream, with the error that ended it."""
    return envelope(_dump({"error": error} if error else {}), END_OF_STREAM)


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
