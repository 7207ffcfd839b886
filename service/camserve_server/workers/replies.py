"""Messages from a worker process to its server, in a format that cannot run code.

Pickle can run code. With it, a model or a photo that took over a worker process, through native code, would take over
the server as well. A message here is JSON, followed by the bytes of its arrays. Reading it creates only values of
`CLASSES` and our own errors.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from types import MappingProxyType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from camserve_server.core import errors
from camserve_server.core.errors import ServiceError
from camserve_server.engine.values import Reading, RowResult, Statistics
from camserve_server.imaging.values import Box, KeepAspect, Preprocess
from camserve_server.models.values import LayerInfo, Layout, ModelInfo, TextHead
from camserve_server.targets.values import (
    ClassTarget,
    ContrastTarget,
    DetectionTarget,
    FinerTarget,
    MaskTarget,
    ProbabilityTarget,
    SegmentTarget,
    SimilarityTarget,
    TextTarget,
)
from camserve_server.telemetry import Memory
from camserve_server.workers.messages import Heartbeat, Response

CLASSES: tuple[type[Any], ...] = (
    Heartbeat,
    Memory,
    Response,
    ClassTarget,
    ContrastTarget,
    ProbabilityTarget,
    FinerTarget,
    SimilarityTarget,
    TextTarget,
    SegmentTarget,
    MaskTarget,
    DetectionTarget,
    Box,
    Statistics,
    Reading,
    RowResult,
    Preprocess,
    KeepAspect,
    Layout,
    LayerInfo,
    ModelInfo,
    TextHead,
)
"""Classes of the values in a message, besides numbers, strings, bytes, arrays, tuples and mappings."""

_CLASSES_BY_NAME = MappingProxyType({kind.__name__: kind for kind in CLASSES})
_ERRORS: Mapping[str, type[Exception]] = MappingProxyType(
    {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    | {"RuntimeError": RuntimeError}
)
_DTYPES = MappingProxyType({np.dtype(code).str: np.dtype(code) for code in "?bBhHiIlLqQefd"})  # no arrays of objects
_HEADER = struct.Struct("<II")  # bytes of the JSON body, and of the JSON table of arrays


class BadMessageError(Exception):
    """A message that cannot be read or that is not expected."""


def _allowed(hint: Any) -> tuple[type, ...]:
    """Return the classes that a value with this annotation may have."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return tuple(kind for part in get_args(hint) for kind in _allowed(part))
    if origin is Literal:
        return tuple(map(type, get_args(hint)))
    kind = origin or hint
    return (float, int) if kind is float else (kind,) if isinstance(kind, type) else (object,)


# Field types are checked only for the results of batches: the description of a model comes in part from a user's code.
_FIELD_TYPES = MappingProxyType(
    {kind: tuple(map(_allowed, get_type_hints(kind).values())) for kind in (Heartbeat, Memory, Response, RowResult)}
)


def _getter(kind: type[Any]) -> Any:
    """Return a function that returns the field values of an instance as a tuple."""
    names = [item.name for item in fields(kind)]
    if len(names) > 1:
        return attrgetter(*names)  # the fastest; it needs a name, and with one name it returns no tuple
    return lambda value: tuple(getattr(value, name) for name in names)


_GETTERS = MappingProxyType({kind: _getter(kind) for kind in CLASSES})


def serialize(message: Response | Heartbeat) -> bytes:
    """Serialize a message. An array that occurs several times is sent once.

    Raises:
        TypeError: a value is not of one of the `CLASSES`.
    """
    indices: dict[int, int] = {}  # index of each array, by its id
    arrays: list[np.ndarray[Any, Any]] = []

    def encode(value: Any) -> object:
        if isinstance(value, np.ndarray):
            index = indices.setdefault(id(value), len(arrays))
            if index == len(arrays):
                arrays.append(value)
            return {"array": index}
        if (getter := _GETTERS.get(type(value))) is not None:
            return {type(value).__name__: [_encode_mapping(item) for item in getter(value)]}
        return _encode(value)

    body = json.dumps(message, default=encode).encode()
    table = json.dumps([(array.dtype.str, array.shape) for array in arrays]).encode()
    return b"".join(
        (_HEADER.pack(len(body), len(table)), body, table, *(np.ascontiguousarray(array).data for array in arrays))
    )


def _encode_mapping(value: object) -> object:
    return {"table": list(value.items())} if isinstance(value, Mapping) else value


def _encode(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Exception):
        known = next((kind.__name__ for kind in type(value).__mro__ if kind in _ERRORS.values()), "RuntimeError")
        details = [value.field, value.retry_after, value.shed_reason] if isinstance(value, ServiceError) else []
        return {"error": [known, str(value), *details]}
    raise TypeError(f"a worker process cannot send a {type(value).__name__}")


def deserialize(data: bytes) -> Response | Heartbeat:
    """Deserialize a message.

    Raises:
        BadMessageError: the bytes are not a message.
    """
    try:
        body, table = _HEADER.unpack_from(data)
        begin = _HEADER.size + body
        arrays = _read_arrays(data, json.loads(data[begin : begin + table]), begin + table)
        message = json.loads(data[_HEADER.size : begin], object_hook=lambda entry: _decode(entry, arrays))
    except Exception as error:  # whatever a parser or a constructor raises for such bytes
        raise BadMessageError(f"sent bytes that are not a message ({type(error).__name__})") from error
    if not isinstance(message, Response | Heartbeat):
        raise BadMessageError("sent a message that is neither a response nor a heartbeat")
    return message


def _read_arrays(data: bytes, table: list[tuple[str, list[int]]], at: int) -> list[np.ndarray[Any, Any]]:
    arrays = []
    for name, shape in table:
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError("an array has no proper shape")
        dtype, count = _DTYPES[name], math.prod(shape)
        # A copy is writable, and does not keep the message in memory.
        arrays.append(np.frombuffer(data, dtype, count, at).reshape(shape).copy() if count else np.empty(shape, dtype))
        at += count * dtype.itemsize
    return arrays


def _decode(entry: dict[str, Any], arrays: list[np.ndarray[Any, Any]]) -> object:
    """Return the value of a JSON object."""
    ((name, value),) = entry.items()
    if (kind := _CLASSES_BY_NAME.get(name)) is not None:
        values = [_to_tuples(item) for item in value]
        for item, allowed in zip(values, _FIELD_TYPES.get(kind, ()), strict=False):
            if not isinstance(item, allowed):
                raise TypeError(f"a {name} with a {type(item).__name__}")
        return kind(*values)
    if name == "array":
        return arrays[value]
    if name == "table":
        return {key: _to_tuples(item) for key, item in value}
    if name == "bytes":
        return bytes.fromhex(value)
    if name == "error":
        return _make_error(*value)
    raise ValueError("no such class")


def _to_tuples(value: Any) -> Any:
    """Return a value with tuples for the lists of JSON, at any depth."""
    return tuple(map(_to_tuples, value)) if type(value) is list else value


def _make_error(name: str, message: str, *details: Any) -> Exception:
    kind = _ERRORS[name]
    if not issubclass(kind, ServiceError):
        return kind(message)
    field, retry_after, shed_reason = details
    return kind(message, field=field, retry_after=retry_after, shed_reason=shed_reason)
