"""What can go wrong, and the one border where gRPC's errors become ours.

CamserveError
├── InvalidArgument      a field is out of range, or the image cannot be read
├── NotFound             no such model, layer, label or method
├── FailedPrecondition   the method cannot explain that layer; a part that was not asked for
├── ResourceExhausted    the server's queue is full, or a message is too large
├── DeadlineExceeded     the answer did not come in time
├── Cancelled            the call was cancelled, as by closing the client
├── Unavailable          nothing answers, or the server is starting or draining
├── Unauthenticated      no valid credentials
├── PermissionDenied     the credentials do not allow it
└── Internal             a fault of the server
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import (  # pyright: ignore[reportMissingTypeStubs]  # they lie beside it
    error_details_pb2,
    status_pb2,
)

from camserve.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

DETAILS_TRAILER = "grpc-status-details-bin"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"
REQUEST_ID = "x-request-id"

NEVER = -1.0

# What grpc.aio says in place of the server's status: https://github.com/grpc/grpc/issues/36066
_LOST = "Internal error from Core"
# When a gRPC server stops, it cancels the calls that it has received but not yet passed to a handler; no work was done
# for them. A call that the client cancels has other details, such as "Channel closed!".
_NOT_TAKEN = grpc.StatusCode.CANCELLED, "CANCELLED"


class CamserveError(Exception):
    """Anything that a call to camserve ends with, other than its result.

    Attributes:
        message: What was wrong, in the server's words.
        code: The gRPC status code.
        request_id: What to look for in the server's log; empty if nothing was sent.
        fields: What is wrong with each field of the request at fault.
        retry_after: Seconds after which the server wants to see the request again; negative if
            never, None if it did not say.
    """

    code = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        fields: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.fields: Mapping[str, str] = dict(fields or {})
        self.retry_after = retry_after

    def __str__(self) -> str:
        unsaid = [f"{k}: {v}" for k, v in self.fields.items() if v not in self.message]
        fields = f" ({'; '.join(unsaid)})" if unsaid else ""
        request = f" [request {self.request_id}]" if self.request_id else ""
        return printable(f"{self.message}{fields}{request}")  # a traceback shows it on a terminal


class InvalidArgument(CamserveError):
    """A field is out of range, or the image cannot be read."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(CamserveError):
    """There is no such model, layer, label or method."""

    code = grpc.StatusCode.NOT_FOUND


class FailedPrecondition(CamserveError):
    """The method cannot explain that layer, or the part of a result was not asked for."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhausted(CamserveError):
    """The server's queue is full, or a message is too large."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlineExceeded(CamserveError):
    """The answer did not come in time."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(CamserveError):
    """The call was cancelled, as by closing the client."""

    code = grpc.StatusCode.CANCELLED


class Unavailable(CamserveError):
    """Nothing answers at the address, or the server is starting or draining."""

    code = grpc.StatusCode.UNAVAILABLE


class StatusLost(Unavailable):
    """A stream broke while it was written to, and gRPC lost what the server said."""


class Unauthenticated(CamserveError):
    """The call carries no valid credentials."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(CamserveError):
    """The credentials do not allow the call."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Internal(CamserveError):
    """The server made a mistake; its log has the request id."""

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
class Details:
    """What a server says about an error besides its code and message."""

    request_id: str = ""
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    retry_after: float | None = None


def make(code: grpc.StatusCode, message: str, details: Details) -> CamserveError:
    """Make the error of a status code; those without a class of their own keep their code."""
    error = STATUS.get(code, CamserveError)(
        message or code.name.lower().replace("_", " "),
        request_id=details.request_id,
        fields=details.fields,
        retry_after=details.retry_after,
    )
    error.code = code
    return error


def code_of(number: int) -> grpc.StatusCode:
    """Return the status code with a number; UNKNOWN if there is none."""
    return _CODES.get(number, grpc.StatusCode.UNKNOWN)


def merged(violations: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Gather what is wrong with each field; a field may be named more than once."""
    fields: dict[str, str] = {}
    for name, description in violations:
        fields[name] = f"{fields[name]}; {description}" if name in fields else description
    return fields


@contextmanager
def border(address: str, request_id: str) -> Generator[None, None, None]:
    """Turn gRPC's errors into ours, so that no other kind leaves the package.

    Args:
        address: The server's, for the words of the error.
        request_id: The id that was sent, for errors that do not carry one.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise _translated(error, address, request_id) from error
    except (ValueError, grpc.aio.UsageError) as error:  # how gRPC says that a channel is closed
        raise FailedPrecondition(f"the client is closed ({error})") from error


def _translated(error: grpc.RpcError, address: str, request_id: str) -> CamserveError:
    trailers = dict(cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ()))
    said = _from_status(trailers.get(DETAILS_TRAILER))
    own = _text(trailers.get(REQUEST_ID)) or request_id
    if error.details() == _LOST:
        return StatusLost("the stream broke", request_id=own)
    if (error.code(), error.details()) == _NOT_TAKEN:
        return Unavailable(f"the server at {address} stopped before it took the request", request_id=own)
    details = Details(said.request_id or own, said.fields, _seconds(trailers.get(PUSHBACK_TRAILER)))
    return make(error.code(), _readable(error.details() or "", address), details)


def _from_status(packed: str | bytes | None) -> Details:
    """Read BadRequest and RequestInfo from a google.rpc.Status; a garbled one says nothing."""
    status = status_pb2.Status()
    violations = error_details_pb2.BadRequest()
    info = error_details_pb2.RequestInfo()
    try:
        status.ParseFromString(packed if isinstance(packed, bytes) else b"")
        for detail in status.details:
            # Unpack does nothing where the type is another.
            detail.Unpack(violations)
            detail.Unpack(info)
    except DecodeError:
        return Details()
    pairs = ((each.field, each.description) for each in violations.field_violations)
    return Details(info.request_id, merged(pairs))


def _seconds(pushback: str | bytes | None) -> float | None:
    """Read a pushback in milliseconds; by gRPC's rule one that is no number means never."""
    if pushback is None:
        return None
    try:
        milliseconds = int(pushback)
    except ValueError:
        return NEVER
    return milliseconds / 1000 if milliseconds >= 0 else NEVER


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def _readable(details: str, address: str) -> str:
    """Say in plain words what gRPC's core says in its own."""
    if details.startswith("failed to connect to all addresses"):
        return _unreached(details, address)
    if details == "Deadline Exceeded":
        return f"{address} did not answer in time"
    return details


def _unreached(details: str, address: str) -> str:
    _, distrusted, why = details.partition("CERTIFICATE_VERIFY_FAILED: ")
    if distrusted:
        return f"{address} shows a certificate that is not trusted here: {why.removesuffix(': OK')}"
    if "Hostname Verification" in details:
        return f"{address} shows a certificate for another name: if that is as it should be, say tls_name"
    reason = details.rpartition(": ")[2]
    hint = " (it hung up: it may want TLS, or a certificate of yours)" if reason == "Socket closed" else ""
    return f"no server answers at {address}: {reason}{hint}"
