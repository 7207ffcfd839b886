"""The services' RPCs, and their errors as JSON."""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, TypeAlias

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.message import DecodeError, Message
from google.rpc import (  # pyright: ignore[reportMissingTypeStubs]  # it ships .pyi files without a py.typed marker
    error_details_pb2,
    status_pb2,
)

from camserve._codec.json_messages import Json, dump_json
from camserve.v1 import evaluate_pb2, explain_pb2, models_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from google.protobuf.descriptor import Descriptor, MethodDescriptor

Trailers: TypeAlias = "Iterable[tuple[str, str | bytes]]"

RPCS: Mapping[str, MethodDescriptor] = {
    f"/{service.full_name}/{rpc.name}": rpc
    for file in (explain_pb2, evaluate_pb2, models_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for rpc in service.methods
}
"""The RPCs by the path of their URL, such as "/camserve.v1.ExplainService/Explain"."""

IMAGE_FORMATS: Mapping[str, explain_pb2.ImageFormat.ValueType] = {
    "image/jpeg": explain_pb2.IMAGE_FORMAT_JPEG,
    "image/png": explain_pb2.IMAGE_FORMAT_PNG,
    "image/webp": explain_pb2.IMAGE_FORMAT_WEBP,
}
"""Formats of pictures by their media types."""


def code_name(code: grpc.StatusCode) -> str:
    """Return the Connect protocol's name of a code.

    Example:
        >>> code_name(grpc.StatusCode.NOT_FOUND), code_name(grpc.StatusCode.CANCELLED)
        ('not_found', 'canceled')
    """
    return "canceled" if code is grpc.StatusCode.CANCELLED else code.name.lower()


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
    return dump_json(error)


def retry_after(trailers: Trailers) -> str:
    """Return the value of the header Retry-After, in seconds; empty if a retry makes no sense."""
    for key, value in trailers:
        if key == "grpc-retry-pushback-ms" and int(value) >= 0:
            return str(math.ceil(int(value) / 1000))
    return ""


def message_class(descriptor: Descriptor) -> type[Message]:
    """Return the class of messages, such as of an RPC's ``input_type``."""
    return message_factory.GetMessageClass(descriptor)
