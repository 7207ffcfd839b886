"""Errors as gRPC statuses: the table of statuses, the trailers of a call, and the error of one item of a stream."""

import logging
import math
from collections.abc import Mapping

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2

from camserve.v1 import explain_pb2
from camserve_server.core import errors, logs
from camserve_server.core.errors import Internal, ServiceError

log = logging.getLogger(__name__)

ERROR_DOMAIN = "camserve"
"""Domain of the reasons in the ErrorInfo of an error."""

MAX_MESSAGE = 512
"""The most bytes of a message. A failed call has it twice in its trailers, of which most clients take 8 KiB."""

STATUS: Mapping[type[ServiceError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.WorkerLost: grpc.StatusCode.UNAVAILABLE,
    errors.Internal: grpc.StatusCode.INTERNAL,
}
"""The gRPC status of each subclass of ServiceError."""


def service_error_of(error: Exception) -> ServiceError:
    """Return a ServiceError, its message cut to MAX_MESSAGE bytes, and Internal for other errors, which are logged.

    A ServiceError loses its traceback. A traceback refers to frames that refer to the error, and this cycle would keep
    the request, perhaps many megabytes, in memory until the next garbage collection.
    """
    if isinstance(error, ServiceError):
        error.message = _cut(error.message)
        return error.with_traceback(None)
    log.error("an RPC failed", exc_info=error)
    return Internal(f"internal error; the server's log has more under request id {logs.REQUEST_ID.get()}")


def _cut(message: str) -> str:
    data, end = message.encode(), "…"
    if len(data) <= MAX_MESSAGE:
        return message
    return data[: MAX_MESSAGE - len(end.encode())].decode(errors="ignore") + end


def trailers_of(error: ServiceError, request_id: str) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata of a failed call: request id, google.rpc.Status, and the time before a retry.

    If the state of the server caused the error, an ErrorInfo in the Status names that state, such as STARTING.
    """
    status = status_pb2.Status(code=code_pb2.Code.Value(STATUS[type(error)].name), message=error.message)
    status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
    if error.shed_reason:
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.shed_reason.upper(), domain=ERROR_DOMAIN))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    trailers = (("x-request-id", request_id), ("grpc-status-details-bin", status.SerializeToString()))
    if error.retry_after is None:
        return trailers
    return *trailers, ("grpc-retry-pushback-ms", str(math.ceil(1e3 * error.retry_after)))


def error_message(error: ServiceError) -> explain_pb2.Error:
    """Return the error of one item of a stream."""
    violations = [explain_pb2.FieldViolation(field=error.field, description=error.message)] if error.field else []
    retry = None if error.retry_after is None else math.ceil(1e3 * error.retry_after)
    code = code_pb2.Code.Value(STATUS[type(error)].name)
    return explain_pb2.Error(code=code, message=error.message, fields=violations, retry_after_ms=retry)
