"""Translation of gRPC's errors into those of the client."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote

import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import (  # pyright: ignore[reportMissingTypeStubs]  # it ships .pyi files without a py.typed marker
    error_details_pb2,
    status_pb2,
)

from camserve._core.errors import (
    NEVER_RETRY,
    CamserveError,
    ErrorDetails,
    FailedPrecondition,
    StatusLost,
    Unavailable,
    join_faults,
    make_error,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

DETAILS_TRAILER = "grpc-status-details-bin"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"
REQUEST_ID = "x-request-id"

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
    return make_error(error.code(), to_readable(error.details() or "", address), details)


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
