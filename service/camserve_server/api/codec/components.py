"""Codec of principal components: the basis of a response, which a request may return."""

from typing import cast

import numpy as np

from camserve.v1 import explain_pb2
from camserve_server.core.arrays import Map
from camserve_server.core.errors import InvalidArgument
from camserve_server.methods.components import Basis

RANGE = 2  # values of the range of a component


def read_basis(message: explain_pb2.FeatureBasis, channels: int, most: int) -> Basis:
    """Check a basis.

    Args:
        message: the basis.
        channels: the number of channels of the layer.
        most: the largest number of components.

    Raises:
        InvalidArgument: a field has the wrong number of values, or one that is not finite; the error names it.
    """
    vectors = _read(message, "vectors", 0)
    count = vectors.size // channels
    if not 1 <= count <= most or vectors.size != count * channels:
        text = f"has {vectors.size:,} values: expected {channels:,} for each of 1 to {most} components"
        raise InvalidArgument.of_field("basis.vectors", text)
    background = bool(message.background_mean or message.background_vector)
    return Basis(
        _read(message, "mean", channels),
        vectors.reshape(count, channels),
        _read(message, "shares", count),
        _read(message, "ranges", RANGE * count).reshape(count, RANGE),
        _read(message, "background_mean", channels) if background else None,
        _read(message, "background_vector", channels) if background else None,
    )


def _read(message: explain_pb2.FeatureBasis, name: str, count: int) -> Map:
    """Return the numbers of a field; `count` is how many it must have, or 0 for any number."""
    data = cast("bytes", getattr(message, name))
    if len(data) % 4 or (count and len(data) != 4 * count):
        expected = f"{4 * count:,} are expected" if count else "a multiple of 4 is expected"
        raise InvalidArgument.of_field(f"basis.{name}", f"has {len(data):,} bytes, and {expected}")
    values = np.frombuffer(data, "<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise InvalidArgument.of_field(f"basis.{name}", "has values that are not finite")
    return values


def basis_message(basis: Basis | None) -> explain_pb2.FeatureBasis | None:
    """Convert a basis to protobuf."""
    if basis is None:
        return None
    return explain_pb2.FeatureBasis(
        mean=_write(basis.mean),
        vectors=_write(basis.vectors),
        shares=_write(basis.shares),
        ranges=_write(basis.ranges),
        background_mean=_write(basis.background_mean),
        background_vector=_write(basis.background_vector),
    )


def _write(values: Map | None) -> bytes:
    return b"" if values is None else values.astype("<f4").tobytes()
