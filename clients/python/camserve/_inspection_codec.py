"""Encode requests for layer statistics and channels as protobuf messages, and decode the responses.

Nothing here does network I/O, so the synchronous and the asynchronous client share it.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from camserve import _codec, _interventions, _targets
from camserve._checks import invalid, look_up
from camserve._errors import Internal, InvalidArgument
from camserve._inspection import Channel, FeatureBasis, Features, Inspection, LayerReading, Statistics
from camserve._rendering import FORMATS
from camserve.v1 import explain_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from camserve._interventions import Intervention
    from camserve._result import Result


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

    Example:
        >>> options: camserve.InspectOptions = {"target": "tabby", "layers": ["conv_stem", "bn2"]}
        >>> inspection = client.inspect("cat.jpg", **options)
        >>> inspection.target.label, [layer.name for layer in inspection.layers]
        ('tabby', ['conv_stem', 'bn2'])
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
        layer: Name of the layer. Default: the model's default layer; for "heads", the last attention.
        model: Name of a loaded model. Default: the server's first model.
        target: The target that the gradient weights are computed for: see ``InspectOptions``.
        rank: Order of the channels: "activation", by their mean; or "gradient", by the absolute
            value of their Grad-CAM weight. The greatest is first. Or what to return instead of
            channels: "pca", the principal components of the features; "factors", the concepts of a
            deep feature factorisation; "heads", the heads of an attention. Default: "activation".
        top: Number of channels, 1 to 256. A layer with fewer returns all. Default: 16; 3 components;
            5 concepts, of which 32 is the limit; all heads.
        maps: True to return the raw maps. Default: True.
        picture: Format of a picture with a tile for each channel: "png", "jpeg", "webp", or None
            for no picture. Default: "png".
        colormap: Name of the tiles' colour map. Default: "viridis".
        texts: Texts that are the classes of this request: see ``ExplainOptions``.
        value_range: Values of the photo that the model takes as 0 and 1: see ``ExplainOptions``.
        interventions: Changes to what layers return: see ``ExplainOptions``.
        fit: With "pca", up to 15 further photos, whose features the components describe too.
        basis: With "pca", the ``basis`` of an earlier result to project the features on, instead of
            computing components.
        foreground: With "pca", True to leave out the background, found by the first component.

    Example:
        >>> options: camserve.FeaturesOptions = {"layer": "bn2", "rank": "gradient", "top": 4, "picture": None}
        >>> client.features("cat.jpg", **options).maps.shape
        (4, 7, 7)
    """

    layer: str | None
    model: str | None
    target: _targets.TargetLike | None
    rank: str
    top: int | None
    maps: bool
    picture: str | None
    colormap: str
    texts: Sequence[str]
    value_range: tuple[float, float] | None
    interventions: Sequence[Intervention]
    fit: Sequence[_codec.ImageLike]
    basis: FeatureBasis | None
    foreground: bool


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


def shared_options(images: Sequence[_codec.ImageLike], options: FeaturesOptions) -> FeaturesOptions:
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
    image: object, options: FeaturesOptions, file_of: Callable[[_codec.ImageLike], bytes] = _codec.image_bytes
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
            image=_codec.image_bytes(image),
            layer=options.get("layer") or "",
            target=_encode_target(options.get("target")),
            rank=look_up(_RANKS, rank, "rank"),
            top=top,
            raw=options.get("maps", True),
            picture=look_up(FORMATS, options.get("picture", "png"), "picture"),
            colormap=options.get("colormap", ""),
            texts=_codec.texts_of(options.get("texts", ())),
            value_range=_codec.range_of(options.get("value_range")),
            interventions=_interventions.encode(options.get("interventions", ())),
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


def _encode_target(target: _targets.TargetLike | None) -> explain_pb2.Target | None:
    return None if target is None else _targets.encode(target, "target", _codec.image_bytes)


def inspection(message: explain_pb2.InspectLayersResponse) -> Inspection:
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


def features(message: explain_pb2.ExtractFeaturesResponse, options: FeaturesOptions) -> Features:
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
                tuple(map(_codec.decode_prediction, channel.nearest)),
            )
            for channel in message.channels
        ),
        maps=_decode_maps(message),
        picture=_codec.decode_picture(message.picture) if message.HasField("picture") else None,
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
