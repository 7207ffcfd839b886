"""Errors of the client, and the translation of gRPC's errors into them.

CamserveError
├── InvalidArgument      a field is out of range, or the image cannot be read
├── NotFound             the model, layer, label or method does not exist
├── FailedPrecondition   the method cannot explain the layer, or the result lacks a part that was not requested
├── ResourceExhausted    the server's queue is full, or a message is too large
├── DeadlineExceeded     the response did not arrive in time
├── Cancelled            the call was cancelled, for example by closing the client
├── Unavailable          no server answers, or the server is starting or draining
├── Unauthenticated      the credentials are missing or invalid
├── PermissionDenied     the credentials do not allow the call
└── Internal             a fault of the server
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import (  # pyright: ignore[reportMissingTypeStubs]  # it ships .pyi files without a py.typed marker
    error_details_pb2,
    status_pb2,
)

from camserve.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

DETAILS_TRAILER = "grpc-status-details-bin"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"
REQUEST_ID = "x-request-id"

STARTING = "STARTING"
"""``reason`` of an error of a server whose models are not warm yet."""

NEVER_RETRY = -1.0
"""``retry_after`` of an error whose request must not be sent again."""

CLIENT_CLOSED_DURING_CALL = "the client was closed"
UNPARSABLE_RESPONSE = "the server sent a response that cannot be parsed"

# Details that grpc.aio reports in place of the server's status: https://github.com/grpc/grpc/issues/36066
_STATUS_LOST = "Internal error from Core"
# When a gRPC server stops, it cancels the calls that it has received but not yet passed to a handler; no work was done
# for them. A call that the client cancels has other details, such as "Channel closed!".
_NOT_HANDLED = grpc.StatusCode.CANCELLED, "CANCELLED"
# gRPC's details of a response that a proxy cut off, usually because its server died: HAProxy resets the stream with
# CANCEL, or ends it without a status.
_CUT_OFF = ("Stream removed", "Received RST_STREAM")
# gRPC tries every address of a name, and its details have the failure of the last one only.
_LAST_ADDRESS = re.compile(r"last error: \w+: ipv[46]:(\S+): ")
_CLOSED = "Socket closed (it closed the connection: it may want TLS, or a certificate of yours)"
_REFUSED = "Connection refused"
# Details of gRPC itself, and what they mean here. The asynchronous client detects both cases without them.
_GRPC_DETAILS = {
    "Channel closed!": CLIENT_CLOSED_DURING_CALL,
    "Exception deserializing response!": UNPARSABLE_RESPONSE,
}


class CamserveError(Exception):
    """Base class of all errors of a call to camserve.

    Attributes:
        message: The error message, usually from the server.
        code: The gRPC status code.
        request_id: The id of the request in the server's log; empty if nothing was sent.
        fields: The faults of the request by field name.
        retry_after: Seconds after which the server accepts the request again; negative for never,
            None if the server did not specify it.
        reason: The state of the server that caused the error, such as STARTING or QUEUE_FULL; empty
            if the server did not specify it.

    Example:
        >>> try:
        ...     client.explain("cat.jpg", layers=["bn3"])
        ... except camserve.CamserveError as error:
        ...     print(f"{error.code.name}: {error.message}")
        ...     print(list(error.fields))
        NOT_FOUND: unknown layer "bn3": ... (did you mean "blocks.1.0.bn3", ...?)
        ['layers[0]']
    """

    code = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        fields: Mapping[str, str] | None = None,
        retry_after: float | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.fields: Mapping[str, str] = dict(fields or {})
        self.retry_after = retry_after
        self.reason = reason

    def __str__(self) -> str:
        other_faults = [f"{name}: {fault}" for name, fault in self.fields.items() if fault not in self.message]
        fields = f" ({'; '.join(other_faults)})" if other_faults else ""
        # The message of an internal error names the request id itself.
        request = f" [request {self.request_id}]" if self.request_id not in self.message else ""
        return printable(f"{self.message}{fields}{request}")  # a traceback shows it on a terminal


class InvalidArgument(CamserveError):
    """A field is out of range, or the image cannot be read.

    Example:
        >>> try:
        ...     client.explain("cat.jpg", top_k=17)
        ... except camserve.InvalidArgument as error:
        ...     print(error.message)
        top_k: 17 is not between 1 and 16
    """

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(CamserveError):
    """The model, layer, label or method does not exist.

    Example:
        >>> try:
        ...     client.explain("cat.jpg", targets=["tabby cat"])
        ... except camserve.NotFound as error:
        ...     print(error.message)
        efficientnet_lite0 has no label "tabby cat" (did you mean "tabby"?)
    """

    code = grpc.StatusCode.NOT_FOUND


class FailedPrecondition(CamserveError):
    """The method cannot explain the layer, or the result lacks a part that was not requested.

    Example:
        >>> explanation = client.explain("cat.jpg", overlay=None).explanations[0]
        >>> try:
        ...     explanation.save("why.jpg")
        ... except camserve.FailedPrecondition as error:
        ...     print(error.message)
        the result has no overlay; request it with client.explain(..., overlay="jpeg")
    """

    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhausted(CamserveError):
    """The server's queue is full, or a message is too large.

    Example:
        >>> try:
        ...     client.explain(bytes(2**21))  # this server takes messages of up to 1 MiB
        ... except camserve.ResourceExhausted as error:
        ...     print(error.message)
        SERVER: Received message larger than max (2097... vs. 1048576)
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlineExceeded(CamserveError):
    """The response did not arrive in time.

    Example:
        >>> try:
        ...     client.explain("cat.jpg", timeout=0.001)
        ... except camserve.DeadlineExceeded as error:
        ...     print(error.code)
        StatusCode.DEADLINE_EXCEEDED
    """

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(CamserveError):
    """The call was cancelled, for example by closing the client.

    Example:
        >>> try:
        ...     result = client.explain("cat.jpg")
        ... except camserve.Cancelled:
        ...     result = None  # another thread has closed the client
    """

    code = grpc.StatusCode.CANCELLED


class Unavailable(CamserveError):
    """No server answers at the address, or the server is starting or draining.

    Example:
        >>> with camserve.Client("localhost:1", retries=0) as client:
        ...     try:
        ...         client.models()
        ...     except camserve.Unavailable as error:
        ...         print(error.message)
        no server answers at localhost:1: ...
    """

    code = grpc.StatusCode.UNAVAILABLE


class StatusLost(Unavailable):
    """The call broke, and gRPC or a proxy lost the server's status."""


class Unauthenticated(CamserveError):
    """The credentials are missing or invalid.

    Example:
        >>> with camserve.Client("localhost:50052") as client:  # this server has a file of tokens
        ...     try:
        ...         client.models()
        ...     except camserve.Unauthenticated as error:
        ...         print(error.message)
        this server requires a token: ...
    """

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(CamserveError):
    """The credentials do not allow the call.

    Example:
        >>> with camserve.Client("localhost:50052", token=token) as client:
        ...     try:
        ...         client.load_model("segmenter")
        ...     except camserve.PermissionDenied as error:
        ...         print(error.message)
        this RPC requires a token with the role admin; your token has explain, observe
    """

    code = grpc.StatusCode.PERMISSION_DENIED


class Internal(CamserveError):
    """Fault of the server; its log has the request id.

    Example:
        >>> try:
        ...     camserve.Picture("jpeg", b"no JPEG", width=4, height=4).open()
        ... except camserve.Internal as error:
        ...     print(error.message)
        the server sent a picture that cannot be decoded: ...
    """

    code = grpc.StatusCode.INTERNAL


STATUS: Mapping[grpc.StatusCode, type[CamserveError]] = {
    error.code: error
    for error in (
        InvalidArgument,
        NotFound,
        FailedPrecondition,
        ResourceExhausted,
        DeadlineExceeded,
        Cancelled,
        Unavailable,
        Unauthenticated,
        PermissionDenied,
        Internal,
    )
}
_CODES: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """Parts of an error besides its code and message."""

    request_id: str = ""
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    retry_after: float | None = None
    reason: str = ""


def make(code: grpc.StatusCode, message: str, details: ErrorDetails) -> CamserveError:
    """Build the error for a status code; ``CamserveError`` with that code if the code has no class of its own."""
    error = STATUS.get(code, CamserveError)(
        message or code.name.lower().replace("_", " "),
        request_id=details.request_id,
        fields=details.fields,
        retry_after=details.retry_after,
        reason=details.reason,
    )
    error.code = code
    return error


def status_code(number: int) -> grpc.StatusCode:
    """Return the status code with a number; UNKNOWN for a number without a code."""
    return _CODES.get(number, grpc.StatusCode.UNKNOWN)


def join_faults(violations: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the faults by field name; several faults of one field are joined."""
    fields: dict[str, str] = {}
    for name, description in violations:
        fields[name] = f"{fields[name]}; {description}" if name in fields else description
    return fields


@contextmanager
def translate_errors(address: str, request_id: str) -> Generator[None, None, None]:
    """Raise gRPC's errors as a ``CamserveError``, so that callers need not catch any other kind.

    Args:
        address: Address of the server, for the message.
        request_id: The id that was sent, for errors without one.
    """
    try:
        yield
    except CamserveError as error:
        error.request_id = error.request_id or request_id
        raise
    except grpc.RpcError as error:
        raise _translate(error, address, request_id) from None  # a traceback would show the server's text unescaped
    except (ValueError, grpc.aio.UsageError) as error:  # gRPC raises these if the channel is closed
        raise FailedPrecondition(f"the client is closed ({error})") from error


def _translate(error: grpc.RpcError, address: str, request_id: str) -> CamserveError:
    trailers = dict(cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ()))
    status = _decode_status(trailers.get(DETAILS_TRAILER))
    request_id = _to_text(trailers.get(REQUEST_ID)) or request_id
    if error.details() == _STATUS_LOST:
        return StatusLost("the stream broke", request_id=request_id)
    if (error.code(), error.details()) == _NOT_HANDLED:
        return Unavailable(f"the server at {address} stopped before it handled the request", request_id=request_id)
    if error.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN) and _is_cut_off(error):
        return StatusLost(f"the response of the server at {address} was cut off", request_id=request_id)
    retry_after = _to_seconds(trailers.get(PUSHBACK_TRAILER))
    details = ErrorDetails(status.request_id or request_id, status.fields, retry_after, status.reason)
    return make(error.code(), to_readable(error.details() or "", address), details)


def _is_cut_off(error: grpc.RpcError) -> bool:
    return (error.details() or "").startswith(_CUT_OFF)


def _decode_status(packed: str | bytes | None) -> ErrorDetails:
    """Decode BadRequest, RequestInfo and ErrorInfo of a google.rpc.Status; return no details if it is malformed."""
    status = status_pb2.Status()
    violations = error_details_pb2.BadRequest()
    request = error_details_pb2.RequestInfo()
    cause = error_details_pb2.ErrorInfo()
    try:
        status.ParseFromString(packed if isinstance(packed, bytes) else b"")
        for detail in status.details:
            # Unpack does nothing if the type differs.
            detail.Unpack(violations)
            detail.Unpack(request)
            detail.Unpack(cause)
    except DecodeError:
        return ErrorDetails()
    pairs = ((violation.field, violation.description) for violation in violations.field_violations)
    return ErrorDetails(request.request_id, join_faults(pairs), reason=cause.reason)


def _to_seconds(pushback: str | bytes | None) -> float | None:
    """Convert a pushback in milliseconds; gRPC specifies that a pushback that is not a number forbids a retry."""
    if pushback is None:
        return None
    try:
        milliseconds = int(pushback)
    except ValueError:
        return NEVER_RETRY
    return milliseconds / 1000 if milliseconds >= 0 else NEVER_RETRY


def _to_text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def to_readable(details: str, address: str) -> str:
    """Rephrase a message of gRPC itself; return other messages unchanged."""
    if details.startswith("failed to connect to all addresses"):
        return _connection_failure(details, address)
    if details == "Deadline Exceeded":
        return f"{address} did not answer in time"
    return _GRPC_DETAILS.get(details, details)


def _connection_failure(details: str, address: str) -> str:
    _, untrusted, reason = details.partition("CERTIFICATE_VERIFY_FAILED: ")
    if untrusted:
        return f"{address} has a certificate that is not trusted here: {reason.removesuffix(': OK')}"
    if "Hostname Verification" in details:
        return f"{address} has a certificate for another name: if that is expected, name it by tls_name, or --tls-name"
    reason = details.rpartition(": ")[2]
    if reason == "Socket closed":
        reason = _CLOSED
    last = _LAST_ADDRESS.search(details)
    if last and reason == _REFUSED and not address.endswith(unquote(last[1])):
        reason += f" at {unquote(last[1])}"
    return f"no server answers at {address}: {reason}"


def more_telling(earlier: CamserveError | None, error: CamserveError) -> CamserveError:
    """Return the error that tells more about why a call failed: that of an earlier try, or the last one.

    A name such as localhost can have several addresses. In one try gRPC reports the address at which a server closed
    the connection, in the next one the address at which there is no server. The first of them tells more.
    """
    closed = earlier is not None and _CLOSED in earlier.message
    return earlier if earlier is not None and closed and f": {_REFUSED} at " in error.message else error
