"""Encode requests for layer statistics and channels as protobuf messages, and decode the responses.

Nothing here does network I/O, so the synchronous and the asynchronous client share it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from camserve import _codec, _interventions, _targets
from camserve._checks import invalid, look_up
from camserve._errors import Internal, InvalidArgument
from camserve._inspection import Channel, Features, Inspection, LayerReading, Statistics
from camserve._picture import Picture
from camserve._rendering import FORMATS
from camserve.v1 import explain_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from camserve._interventions import Intervention
    from camserve._result import Result


_RANKS: Mapping[str, explain_pb2.ChannelRank.ValueType] = {
    "activation": explain_pb2.CHANNEL_RANK_ACTIVATION,
    "gradient": explain_pb2.CHANNEL_RANK_GRADIENT,
}
_MAX_CHANNELS = 256


class InspectOptions(TypedDict, total=False):
    """Options of an inspection: what to measure. All are optional.

    Attributes:
        model: Name of a loaded model. Default: the server's first model.
        target: The target whose score is differentiated: a label, a class index, or
            ``contrast(a, b)``. Default: the class that the model predicts.
        layers: One layer or several, by name. Default: every module that runs.
        texts: Texts that are the classes of this request: see ``ExplainOptions``.
        value_range: Values of the photo that the model takes as 0 and 1: see ``ExplainOptions``.
        interventions: Changes to what layers return: see ``ExplainOptions``.
    """

    model: str | None
    target: _targets.TargetLike | None
    layers: str | Sequence[str] | None
    texts: Sequence[str]
    value_range: tuple[float, float] | None
    interventions: Sequence[Intervention]


class FeaturesOptions(TypedDict, total=False):
    """Options of a request for channels: which channels to return, and how. All are optional.

    Attributes:
        layer: Name of the layer. Default: the model's default layer.
        model: Name of a loaded model. Default: the server's first model.
        target: The target that the gradient weights are computed for: see ``InspectOptions``.
        rank: Order of the channels: "activation", by their mean; or "gradient", by the absolute
            value of their Grad-CAM weight. The greatest is first. Default: "activation".
        top: Number of channels, 1 to 256. A layer with fewer returns all. Default: 16.
        maps: True to return the raw maps. Default: True.
        picture: Format of a picture with a tile for each channel: "png", "jpeg", "webp", or None
            for no picture. Default: "png".
        colormap: Name of the tiles' colour map. Default: "viridis".
        texts: Texts that are the classes of this request: see ``ExplainOptions``.
        value_range: Values of the photo that the model takes as 0 and 1: see ``ExplainOptions``.
        interventions: Changes to what layers return: see ``ExplainOptions``.
    """

    layer: str | None
    model: str | None
    target: _targets.TargetLike | None
    rank: str
    top: int
    maps: bool
    picture: str | None
    colormap: str
    texts: Sequence[str]
    value_range: tuple[float, float] | None
    interventions: Sequence[Intervention]


def inspection_request(image: object, options: InspectOptions) -> explain_pb2.InspectLayersRequest:
    """Encode a request for the statistics of layers.

    Raises:
        InvalidArgument: An option has the wrong type, or the image cannot be read.
    """
    layers = options.get("layers") or ()
    try:
        return explain_pb2.InspectLayersRequest(
            model=options.get("model") or "",
            image=_codec.image_bytes(image),
            target=_encode_target(options.get("target")),
            layers=[layers] if isinstance(layers, str) else layers,
            texts=_codec.texts_of(options.get("texts", ())),
            value_range=_codec.range_of(options.get("value_range")),
            interventions=_interventions.encode(options.get("interventions", ())),
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"an option has the wrong type: {error}") from error


def features_request(image: object, options: FeaturesOptions) -> explain_pb2.ExtractFeaturesRequest:
    """Encode a request for channels.

    Raises:
        InvalidArgument: An option is out of range or has the wrong type, or the image cannot be read.
    """
    top = options.get("top", 16)
    try:
        if not 1 <= top <= _MAX_CHANNELS:
            raise invalid("top", f"{top} is not between 1 and {_MAX_CHANNELS}")
        return explain_pb2.ExtractFeaturesRequest(
            model=options.get("model") or "",
            image=_codec.image_bytes(image),
            layer=options.get("layer") or "",
            target=_encode_target(options.get("target")),
            rank=look_up(_RANKS, options.get("rank", "activation"), "rank"),
            top=top,
            raw=options.get("maps", True),
            picture=look_up(FORMATS, options.get("picture", "png"), "picture"),
            colormap=options.get("colormap", ""),
            texts=_codec.texts_of(options.get("texts", ())),
            value_range=_codec.range_of(options.get("value_range")),
            interventions=_interventions.encode(options.get("interventions", ())),
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"an option has the wrong type: {error}") from error


def _encode_target(target: _targets.TargetLike | None) -> explain_pb2.Target | None:
    return None if target is None else _targets.encode(target, "target", _codec.image_bytes)


def inspection(message: explain_pb2.InspectLayersResponse) -> Inspection:
    """Decode a response with the statistics of layers."""
    common = _decode_common_fields(message)
    return Inspection(
        layers=tuple(map(_decode_layer, message.layers)),
        model=message.model,
        target=common.predictions[0],
        contrast=common.predictions[1] if message.HasField("contrast") else None,
        score=message.score,
        request_id=message.request_id,
        timing=common.timing,
        predictions=common.predictions[2:],
        unchanged_predictions=common.unchanged_predictions,
    )


def _decode_common_fields(message: explain_pb2.InspectLayersResponse | explain_pb2.ExtractFeaturesResponse) -> Result:
    """Decode photo, timing and predictions as those of an explanation; target and contrast are the first two."""
    photo = message.photo if isinstance(message, explain_pb2.ExtractFeaturesResponse) else None
    classes, unchanged = [message.target, message.contrast, *message.predictions], message.unchanged_predictions
    return _codec.result(
        explain_pb2.ExplainResponse(
            predictions=classes, photo=photo, timing=message.timing, unchanged_predictions=unchanged
        )
    )


def _decode_layer(message: explain_pb2.LayerReading) -> LayerReading:
    return LayerReading(
        name=message.name,
        type=message.type,
        output_shape=tuple(message.output_shape),
        elements=message.elements,
        activation=_decode_statistics(message.activation),
        gradient=_decode_statistics(message.gradient),
        container=message.container,
    )


def _decode_statistics(message: explain_pb2.Statistics) -> Statistics:
    return Statistics(**{field.name: getattr(message, field.name) for field in fields(Statistics)})


def features(message: explain_pb2.ExtractFeaturesResponse) -> Features:
    """Decode a response with channels.

    Raises:
        Internal: The raw maps do not have the declared number of values.
    """
    common, tiles = _decode_common_fields(message), message.picture
    picture = Picture(_codec.FORMAT_NAMES.get(tiles.format, ""), tiles.data, tiles.width, tiles.height)
    return Features(
        channels=tuple(
            Channel(channel.index, channel.mean_activation, channel.gradient_weight) for channel in message.channels
        ),
        maps=_decode_maps(message),
        picture=picture if message.HasField("picture") else None,
        layer=message.layer,
        channel_count=message.channel_count,
        grid=(message.grid_height, message.grid_width),
        model=message.model,
        target=common.predictions[0],
        contrast=common.predictions[1] if message.HasField("contrast") else None,
        score=message.score,
        photo=common.photo,
        request_id=message.request_id,
        timing=common.timing,
        predictions=common.predictions[2:],
        unchanged_predictions=common.unchanged_predictions,
    )


def _decode_maps(
    message: explain_pb2.ExtractFeaturesResponse,
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None:
    if not message.maps:
        return None
    shape = (len(message.channels), message.grid_height, message.grid_width)
    if len(message.maps) != 4 * shape[0] * shape[1] * shape[2]:
        raise Internal(f"the server sent maps that do not have {shape[0]} × {shape[1]} × {shape[2]} values")
    return np.frombuffer(message.maps, "<f4").astype(np.float32, copy=False).reshape(shape)
