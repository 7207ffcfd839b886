"""Messages from a worker process to its server, in a format that cannot run code.

Pickle can run code: a worker process that a model or a photo took over, through native code, would take over the server
as well. A message here is JSON, followed by the bytes of its arrays. Reading it creates only values of `CLASSES` and
our own errors.
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
from camserve_server.imaging.values import Box, Preprocess
from camserve_server.models.values import LayerInfo, Layout, ModelInfo
from camserve_server.targets.values import (
    ClassTarget,
    ContrastTarget,
    DetectionTarget,
    FinerTarget,
    ProbabilityTarget,
    SegmentTarget,
    SimilarityTarget,
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
    SegmentTarget,
    DetectionTarget,
    Box,
    Statistics,
    Reading,
    RowResult,
    Preprocess,
    Layout,
    LayerInfo,
    ModelInfo,
)
"""Classes of the values in a message, besides numbers, texts, bytes, arrays, tuples and tables."""

_NAMED = MappingProxyType({kind.__name__: kind for kind in CLASSES})
_ERRORS: Mapping[str, type[Exception]] = MappingProxyType(
    {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    | {"RuntimeError": RuntimeError}
)
_DTYPES = MappingProxyType({np.dtype(code).str: np.dtype(code) for code in "?bBhHiIlLqQefd"})  # none holds objects
_HEAD = struct.Struct("<II")


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


# Only for the results of batches: the description of a model comes in part from a user's own code.
_FIELDS = MappingProxyType(
    {kind: tuple(map(_allowed, get_type_hints(kind).values())) for kind in (Heartbeat, Memory, Response, RowResult)}
)


def _values_of(kind: type[Any]) -> Any:
    names = [one.name for one in fields(kind)]
    return attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)


_VALUES = MappingProxyType({kind: _values_of(kind) for kind in CLASSES})


def packed(message: Response | Heartbeat) -> bytes:
    """Return a message as bytes; an array that occurs in it several times is sent once.

    Raises:
        TypeError: it contains a value that a message may not have: see `CLASSES`.
    """
    places: dict[int, int] = {}
    arrays: list[np.ndarray[Any, Any]] = []

    def plain(value: Any) -> object:
        if isinstance(value, np.ndarray):
            place = places.setdefault(id(value), len(arrays))
            if place == len(arrays):
                arrays.append(value)
            return {"array": place}
        if (values := _VALUES.get(type(value))) is not None:
            return {type(value).__name__: [_items(one) for one in values(value)]}
        return _plain(value)

    body = json.dumps(message, default=plain).encode()
    table = json.dumps([(array.dtype.str, array.shape) for array in arrays]).encode()
    return b"".join(
        (_HEAD.pack(len(body), len(table)), body, table, *(np.ascontiguousarray(array).data for array in arrays))
    )


def _items(value: object) -> object:
    return {"table": list(value.items())} if isinstance(value, Mapping) else value


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Exception):
        known = next((kind.__name__ for kind in type(value).__mro__ if kind in _ERRORS.values()), "RuntimeError")
        details = [value.field, value.retry_after, value.shed] if isinstance(value, ServiceError) else []
        return {"error": [known, str(value), *details]}
    raise TypeError(f"a worker process cannot send a {type(value).__name__}")


def unpacked(data: bytes) -> Response | Heartbeat:
    """Read a message.

    Raises:
        BadMessageError: the bytes are not a message.
    """
    try:
        body, table = _HEAD.unpack_from(data)
        begin = _HEAD.size + body
        arrays = _arrays(data, json.loads(data[begin : begin + table]), begin + table)
        message = json.loads(data[_HEAD.size : begin], object_hook=lambda entry: _made(entry, arrays))
    except Exception as error:  # any error of a parser or a constructor
        raise BadMessageError(f"sent bytes that are not a message ({type(error).__name__})") from error
    if not isinstance(message, Response | Heartbeat):
        raise BadMessageError("sent a message that is neither a reply nor a sign of life")
    return message


def _arrays(data: bytes, table: list[tuple[str, list[int]]], at: int) -> list[np.ndarray[Any, Any]]:
    arrays = []
    for name, shape in table:
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError("an array has no proper shape")
        dtype, count = _DTYPES[name], math.prod(shape)
        # A copy, which is writable and does not keep the message in memory.
        arrays.append(np.frombuffer(data, dtype, count, at).reshape(shape).copy() if count else np.empty(shape, dtype))
        at += count * dtype.itemsize
    return arrays


def _made(entry: dict[str, Any], arrays: list[np.ndarray[Any, Any]]) -> object:
    """Return the value that a JSON object stands for."""
    ((name, value),) = entry.items()
    if (kind := _NAMED.get(name)) is not None:
        values = [_tuples(one) for one in value]
        for one, allowed in zip(values, _FIELDS.get(kind, ()), strict=False):
            if not isinstance(one, allowed):
                raise TypeError(f"a {name} with a {type(one).__name__}")
        return kind(*values)
    if name == "array":
        return arrays[value]
    if name == "table":
        return {key: _tuples(one) for key, one in value}
    if name == "bytes":
        return bytes.fromhex(value)
    if name == "error":
        return _error(*value)
    raise ValueError("no such class")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if type(value) is list else value


def _error(name: str, words: str, *details: Any) -> Exception:
    kind = _ERRORS[name]
    if not issubclass(kind, ServiceError):
        return kind(words)
    field, retry_after, shed = details
    return kind(words, field=field, retry_after=retry_after, shed=shed)
