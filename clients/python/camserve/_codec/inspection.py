"""Encode requests for layer statistics and channels as protobuf messages, and decode the responses.

Nothing here does network I/O, so the synchronous and the asynchronous client share it.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from camserve._codec.explain import range_of, texts_of
from camserve._codec.images import image_bytes
from camserve._codec.interventions import encode_interventions
from camserve._codec.rendering import PICTURE_FORMATS
from camserve._codec.results import decode_picture, decode_prediction, decode_result
from camserve._codec.targets import encode_target
from camserve._core.checks import invalid, look_up
from camserve._core.errors import Internal, InvalidArgument
from camserve._values.inspection import Channel, FeatureBasis, Features, Inspection, LayerReading, Statistics
from camserve.v1 import explain_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from camserve._values.options import FeaturesOptions, ImageLike, InspectOptions
    from camserve._values.result import Result
    from camserve._values.targets import TargetLike

_RANKS: Mapping[str, explain_pb2.ChannelRank.ValueType] = {
    "activation": explain_pb2.CHANNEL_RANK_ACTIVATION,
    "gradient": explain_pb2.CHANNEL_RANK_GRADIENT,
    "pca": explain_pb2.CHANNEL_RANK_PCA,
    "factors": explain_pb2.CHANNEL_RANK_FACTORS,
    "heads": explain_pb2.CHANNEL_RANK_HEADS,
}
_DEFAULT_TOP: Mapping[str, int] = {"activation": 16, "gradient": 16}  # the server knows those of the other ranks
_MAX_CHANNELS = 256
_MAX_LAYERS = 100_000  # of a model
_BASIS = ("mean", "vectors", "shares", "ranges", "background_mean", "background_vector")


def inspection_request(image: object, options: InspectOptions) -> explain_pb2.InspectLayersRequest:
    """Encode a request for the statistics of layers.

    Raises:
        InvalidArgument: An option has the wrong type, or the image cannot be read.
    """
    layers = options.get("layers") or ()
    try:
        return explain_pb2.InspectLayersRequest(
            model=options.get("model") or "",
            image=image_bytes(image),
            target=_encode_target(options.get("target")),
            layers=[layers] if isinstance(layers, str) else layers,
            texts=texts_of(options.get("texts", ())),
            value_range=range_of(options.get("value_range")),
            interventions=encode_interventions(options.get("interventions", ())),
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"an option has the wrong type: {error}") from error


def shared_options(images: Sequence[ImageLike], options: FeaturesOptions) -> FeaturesOptions:
    """Return the options of the request that computes the components of several photos.

    Raises:
        InvalidArgument: There is no photo, or a basis is given.
    """
    if not images:
        raise invalid("images", "there is none")
    if options.get("basis") is not None:
        raise invalid("basis", "the components of these photos are computed: for a basis, call features for each photo")
    return {**options, "rank": options.get("rank", "pca"), "fit": images[1:]}


def basis_options(first: Features, options: FeaturesOptions) -> FeaturesOptions:
    """Return the options of a request in the basis of an earlier result."""
    return {**options, "rank": options.get("rank", "pca"), "basis": first.basis}


def features_request(
    image: object, options: FeaturesOptions, file_of: Callable[[ImageLike], bytes] = image_bytes
) -> explain_pb2.ExtractFeaturesRequest:
    """Encode a request for channels.

    Args:
        image: The image.
        options: The options.
        file_of: Encodes further images.

    Raises:
        InvalidArgument: An option is out of range or has the wrong type, or the image cannot be read.
    """
    rank = options.get("rank", "activation")
    top = options.get("top", _DEFAULT_TOP.get(rank))
    try:
        if top is not None and not 1 <= top <= _MAX_CHANNELS:
            raise invalid("top", f"{top} is not between 1 and {_MAX_CHANNELS}")
        return explain_pb2.ExtractFeaturesRequest(
            model=options.get("model") or "",
            image=image_bytes(image),
            layer=options.get("layer") or "",
            target=_encode_target(options.get("target")),
            rank=look_up(_RANKS, rank, "rank"),
            top=top,
            raw=options.get("maps", True),
            picture=look_up(PICTURE_FORMATS, options.get("picture", "png"), "picture"),
            colormap=options.get("colormap", ""),
            texts=texts_of(options.get("texts", ())),
            value_range=range_of(options.get("value_range")),
            interventions=encode_interventions(options.get("interventions", ())),
            fit_images=map(file_of, options.get("fit", ())),
            basis=_encode_basis(options.get("basis")),
            foreground=options.get("foreground", False),
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"an option has the wrong type: {error}") from error


def _encode_basis(basis: FeatureBasis | None) -> explain_pb2.FeatureBasis | None:
    if basis is None:
        return None
    arrays = {name: getattr(basis, name) for name in _BASIS}
    return explain_pb2.FeatureBasis(
        **{name: np.asarray(array, "<f4").tobytes() for name, array in arrays.items() if array is not None}
    )


def _encode_target(target: TargetLike | None) -> explain_pb2.Target | None:
    return None if target is None else encode_target(target, "target", image_bytes)


def decode_inspection(message: explain_pb2.InspectLayersResponse) -> Inspection:
    """Decode a response with the statistics of layers.

    Raises:
        Internal: The response is invalid, or has too many layers.
    """
    if len(message.layers) > _MAX_LAYERS:
        raise Internal(f"the server sent {len(message.layers):,} layers; the limit is {_MAX_LAYERS:,}")
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
    return decode_result(
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


def decode_features(message: explain_pb2.ExtractFeaturesResponse, options: FeaturesOptions) -> Features:
    """Decode a response with channels.

    Args:
        message: The response.
        options: The options of the request.

    Raises:
        Internal: The raw maps do not have the declared number of values, or the parts of the basis do not fit.
    """
    common = _decode_common_fields(message)
    return Features(
        channels=tuple(
            Channel(
                channel.index,
                channel.mean_activation,
                channel.gradient_weight,
                channel.share,
                tuple(map(decode_prediction, channel.nearest)),
            )
            for channel in message.channels
        ),
        maps=_decode_maps(message),
        picture=decode_picture(message.picture) if message.HasField("picture") else None,
        layer=message.layer,
        channel_count=message.channel_count,
        grid=(message.grid_height, message.grid_width),
        model=message.model,
        target=common.predictions[0] if message.HasField("target") else None,
        contrast=common.predictions[1] if message.HasField("contrast") else None,
        score=message.score,
        photo=common.photo,
        request_id=message.request_id,
        timing=common.timing,
        predictions=common.predictions[2:],
        unchanged_predictions=common.unchanged_predictions,
        basis=_decode_basis(message.basis) if message.HasField("basis") else None,
        rank=options.get("rank", "activation"),
    )


def _decode_basis(message: explain_pb2.FeatureBasis) -> FeatureBasis:
    channels, components = len(message.mean) // 4, len(message.shares) // 4
    shapes = {
        "mean": (channels,),
        "vectors": (components, channels),
        "shares": (components,),
        "ranges": (components, 2),
        "background_mean": (channels,),
        "background_vector": (channels,),
    }
    files = {name: getattr(message, name) for name in shapes}
    found = {name: data for name, data in files.items() if data or not name.startswith("background")}
    if not channels or any(len(data) != 4 * math.prod(shapes[name]) for name, data in found.items()):
        raise Internal("the server sent a basis whose parts do not fit each other")
    return FeatureBasis(
        **{
            name: np.frombuffer(data, "<f4").astype(np.float32, copy=False).reshape(shapes[name])
            for name, data in found.items()
        }
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
