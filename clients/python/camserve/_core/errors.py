"""Errors of the client.

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

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from camserve._core.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

STARTING = "STARTING"
"""``reason`` of an error of a server whose models are not warm yet."""

NEVER_RETRY = -1.0
"""``retry_after`` of an error whose request must not be sent again."""


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


def make_error(code: grpc.StatusCode, message: str, details: ErrorDetails) -> CamserveError:
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
