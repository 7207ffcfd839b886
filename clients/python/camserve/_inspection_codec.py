"""Looks inside a model: arguments to protobuf, and protobuf to values; pure, so that both clients share it."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, TypedDict, TypeVar

import numpy as np

from camserve import _codec, _targets
from camserve._errors import Internal, InvalidArgument
from camserve._inspection import Channel, Features, Inspection, LayerReading, Statistics
from camserve._picture import Picture
from camserve.v1 import explain_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from camserve._result import Result

T = TypeVar("T")

_FORMATS: Mapping[str | None, explain_pb2.ImageFormat.ValueType] = {
    None: explain_pb2.IMAGE_FORMAT_UNSPECIFIED,
    "jpeg": explain_pb2.IMAGE_FORMAT_JPEG,
    "png": explain_pb2.IMAGE_FORMAT_PNG,
    "webp": explain_pb2.IMAGE_FORMAT_WEBP,
}
_NAMES = {number: name for name, number in _FORMATS.items() if name}
_RANKS: Mapping[str, explain_pb2.ChannelRank.ValueType] = {
    "activation": explain_pb2.CHANNEL_RANK_ACTIVATION,
    "gradient": explain_pb2.CHANNEL_RANK_GRADIENT,
}
_MOST = 256


class InspectOptions(TypedDict, total=False):
    """What to measure; everything may be left out.

    Attributes:
        model: Name of a loaded model. Default: the server's first.
        target: A label, a class index, or ``contrast(a, b)``, whose score is differentiated.
            Default: the class that the model predicts.
        layers: One layer or several, by name. Default: every module that runs.
    """

    model: str | None
    target: _targets.TargetLike | None
    layers: str | Sequence[str] | None


class FeaturesOptions(TypedDict, total=False):
    """Which channels to return, and how; everything may be left out.

    Attributes:
        layer: Its name. Default: the model's default layer.
        model: Name of a loaded model. Default: the server's first.
        target: What the gradient weights are for: see ``InspectOptions``.
        rank: "activation", the channels' mean, greatest first; or "gradient", by the size of the
            weight that Grad-CAM gives them. Default: "activation".
        top: How many channels, 1 to 256. Default: 16.
        maps: Whether to return the raw maps. Default: True.
        picture: "png", "jpeg", "webp", or None for no tiles. Default: "png".
        colormap: Name of the tiles' colour map. Default: "viridis".
    """

    layer: str | None
    model: str | None
    target: _targets.TargetLike | None
    rank: str
    top: int
    maps: bool
    picture: str | None
    colormap: str


def inspection_request(image: object, options: InspectOptions) -> explain_pb2.InspectLayersRequest:
    """Return the request.

    Raises:
        InvalidArgument: An option is of a wrong kind, or the image cannot be read.
    """
    layers = options.get("layers") or ()
    try:
        return explain_pb2.InspectLayersRequest(
            model=options.get("model") or "",
            image=_codec.image_bytes(image),
            target=_target(options.get("target")),
            layers=[layers] if isinstance(layers, str) else layers,
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"an option is of a wrong kind: {error}") from error


def features_request(image: object, options: FeaturesOptions) -> explain_pb2.ExtractFeaturesRequest:
    """Return the request.

    Raises:
        InvalidArgument: An option is out of range or of a wrong kind, or the image cannot be read.
    """
    top = options.get("top", 16)
    try:
        if not 1 <= top <= _MOST:
            raise _bad("top", f"{top} is not between 1 and {_MOST}")
        return explain_pb2.ExtractFeaturesRequest(
            model=options.get("model") or "",
            image=_codec.image_bytes(image),
            layer=options.get("layer") or "",
            target=_target(options.get("target")),
            rank=_RANKS[_known("rank", options.get("rank", "activation"), _RANKS)],
            top=top,
            raw=options.get("maps", True),
            picture=_FORMATS[_known("picture", options.get("picture", "png"), _FORMATS)],
            colormap=options.get("colormap", ""),
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"an option is of a wrong kind: {error}") from error


def _target(given: _targets.TargetLike | None) -> explain_pb2.Target | None:
    return None if given is None else _targets.message(given, "target", _codec.image_bytes)


def _known(field: str, name: T, known: Mapping[T, object]) -> T:
    if name not in known:
        raise _bad(field, f"there is no {name!r}; there are {', '.join(map(repr, known))}")
    return name


def _bad(field: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {reason}", fields={field: reason})


def inspection(said: explain_pb2.InspectLayersResponse) -> Inspection:
    """Read a response."""
    common = _common(said)
    return Inspection(
        layers=tuple(map(_reading, said.layers)),
        model=said.model,
        target=common.predictions[0],
        contrast=common.predictions[1] if said.HasField("contrast") else None,
        score=said.score,
        request_id=said.request_id,
        timing=common.timing,
    )


def _common(said: explain_pb2.InspectLayersResponse | explain_pb2.ExtractFeaturesResponse) -> Result:
    """Read what it has in common with an explanation, as one."""
    photo = said.photo if isinstance(said, explain_pb2.ExtractFeaturesResponse) else None
    both = [said.target, said.contrast]
    return _codec.result(explain_pb2.ExplainResponse(predictions=both, photo=photo, timing=said.timing))


def _reading(said: explain_pb2.LayerReading) -> LayerReading:
    return LayerReading(
        name=said.name,
        type=said.type,
        output_shape=tuple(said.output_shape),
        elements=said.elements,
        activation=_statistics(said.activation),
        gradient=_statistics(said.gradient),
        container=said.container,
    )


def _statistics(said: explain_pb2.Statistics) -> Statistics:
    return Statistics(**{each.name: getattr(said, each.name) for each in fields(Statistics)})


def features(said: explain_pb2.ExtractFeaturesResponse) -> Features:
    """Read a response.

    Raises:
        Internal: The raw maps have not as many values as they should.
    """
    common, tiles = _common(said), said.picture
    picture = Picture(_NAMES.get(tiles.format, ""), tiles.data, tiles.width, tiles.height)
    return Features(
        channels=tuple(Channel(each.index, each.mean_activation, each.gradient_weight) for each in said.channels),
        maps=_maps(said),
        picture=picture if said.HasField("picture") else None,
        layer=said.layer,
        channel_count=said.channel_count,
        grid=(said.grid_height, said.grid_width),
        model=said.model,
        target=common.predictions[0],
        contrast=common.predictions[1] if said.HasField("contrast") else None,
        score=said.score,
        photo=common.photo,
        request_id=said.request_id,
        timing=common.timing,
    )


def _maps(said: explain_pb2.ExtractFeaturesResponse) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None:
    if not said.maps:
        return None
    shape = (len(said.channels), said.grid_height, said.grid_width)
    if len(said.maps) != 4 * shape[0] * shape[1] * shape[2]:
        raise Internal(f"the server sent no {shape[0]} maps of {shape[1]} by {shape[2]}")
    return np.frombuffer(said.maps, "<f4").astype(np.float32, copy=False).reshape(shape)
