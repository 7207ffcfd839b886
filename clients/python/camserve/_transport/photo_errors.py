"""Errors of one photo among many: caused by the photo itself, or by the request."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import grpc

from camserve._transport.retry import too_large

if TYPE_CHECKING:
    from camserve._core.errors import CamserveError

_REQUEST_ERRORS = frozenset(
    {
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Codes of errors that every photo of the job would get."""

_PHOTO_ERROR_FIELDS = {
    # The photo cannot be decoded or is too large, or a box is outside of this photo.
    grpc.StatusCode.INVALID_ARGUMENT: re.compile(r"image|rendering\.max_side|targets\[\d+\]\..*(box|region)"),
    # The model does not find the target in this photo.
    grpc.StatusCode.FAILED_PRECONDITION: re.compile(r"targets.*|top_k"),
}
"""Fields in errors that are caused by the photo itself, by the error's code."""


def is_request_error(error: CamserveError) -> bool:
    """Return True if every photo would get this error, so that no photo may be marked as done."""
    return error.code in _REQUEST_ERRORS or (error.code in _PHOTO_ERROR_FIELDS and not is_photo_error(error))


def is_photo_error(error: CamserveError) -> bool:
    """Return True if the photo itself causes this error, with any server and at any time."""
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return too_large(error)
    fields = _PHOTO_ERROR_FIELDS.get(error.code)
    return bool(fields and error.fields) and all(fields.fullmatch(field) for field in error.fields if fields)
