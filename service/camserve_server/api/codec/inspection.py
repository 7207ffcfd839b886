"""Codec of InspectLayers and ExtractFeatures."""

from collections.abc import Mapping

from camserve.v1 import explain_pb2
from camserve_server.api.codec.checks import check_range
from camserve_server.api.codec.components import basis_message, read_basis
from camserve_server.api.codec.interventions import read_interventions
from camserve_server.api.codec.layers import find_layer
from camserve_server.api.codec.predictions import (
    contrast_message,
    explained_message,
    prediction_message,
    prediction_messages,
)
from camserve_server.api.codec.rendering import read_format
from camserve_server.api.codec.replies import photo_message, picture_message, timing_message
from camserve_server.api.codec.requests import (
    DEFAULT_PREDICTIONS,
    check_layer,
    read_model,
    with_value_range,
)
from camserve_server.api.codec.sizes import check_sizes
from camserve_server.api.codec.targets import read_target, unfit, with_texts
from camserve_server.core.errors import FailedPrecondition, InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.engine.values import Reading, Statistics
from camserve_server.jobs import channels_of
from camserve_server.models.values import KnownModel, LayerInfo, ModelInfo
from camserve_server.serving.requests import FeaturesRequest, InspectRequest, Rank
from camserve_server.serving.results import Channel, FeaturesResult, InspectResult
from camserve_server.targets import anything, kind_of
from camserve_server.targets.values import RankTarget, Target

DEFAULT_TOP: Mapping[Rank, int] = {"pca": 3, "factors": 5}
"""The number of components and of concepts, unless the request names one. It names none of heads for all of them."""

DEFAULT_CHANNELS = 16
FACTORS_PER_VALUE = (
    4  # factors of as many values as `Limits.feature_values`; of more factors, there may be fewer values
)

RANKS: Mapping["explain_pb2.ChannelRank.ValueType", Rank] = {
    explain_pb2.CHANNEL_RANK_UNSPECIFIED: "activation",
    explain_pb2.CHANNEL_RANK_ACTIVATION: "activation",
    explain_pb2.CHANNEL_RANK_GRADIENT: "gradient",
    explain_pb2.CHANNEL_RANK_PCA: "pca",
    explain_pb2.CHANNEL_RANK_FACTORS: "factors",
    explain_pb2.CHANNEL_RANK_HEADS: "heads",
}
"""Ranks by their protobuf values."""


def read_inspection(
    request: explain_pb2.InspectLayersRequest, models: Mapping[str, KnownModel], limits: Limits
) -> InspectRequest:
    """Check an InspectLayers request and resolve its names.

    Raises:
        ServiceError: a field is invalid; the error names it.
    """
    check_sizes(request, limits)
    model = with_value_range(with_texts(read_model(request.model, models, "model"), request.texts), request)
    for index, name in enumerate(request.layers):
        find_layer(name, model, f"layers[{index}]")
    if len(set(request.layers)) < len(request.layers):
        raise InvalidArgument("a layer is named twice", field="layers")
    interventions = read_interventions(request.interventions, model)
    return InspectRequest(model, _target(request, model), tuple(request.layers), request.image, interventions)


def read_extraction(
    request: explain_pb2.ExtractFeaturesRequest, models: Mapping[str, KnownModel], limits: Limits
) -> FeaturesRequest:
    """Check an ExtractFeatures request and resolve its names.

    Raises:
        ServiceError: a field is invalid; the error names it.
    """
    check_sizes(request, limits)
    model = with_value_range(with_texts(read_model(request.model, models, "model"), request.texts), request)
    if request.rank not in RANKS:
        raise InvalidArgument(f"unknown rank {request.rank}", field="rank")
    rank = RANKS[request.rank]
    layer = _read_layer(request, model, rank)
    if not (request.raw or request.picture):
        raise InvalidArgument("request a picture, raw maps, or both", field="picture")
    _check_rank_fields(request, rank)
    channels = 0 if rank == "heads" else channels_of(model, [layer])[0]
    features_request = FeaturesRequest(
        model=model,
        target=_target(request, model) if _needs_target(request, model, rank) else anything(model),
        layer=layer,
        image=request.image,
        rank=rank,
        top=_read_top(request, rank, limits),
        raw=request.raw,
        picture=read_format(request.picture, "picture"),
        colormap=request.colormap or "viridis",
        interventions=read_interventions(request.interventions, model),
        fit_images=tuple(request.fit_images),
        basis=read_basis(request.basis, channels, limits.channels) if request.HasField("basis") else None,
        foreground=request.foreground,
    )
    if rank != "heads":
        _check_raw_size(features_request, limits)
    if rank in DEFAULT_TOP:
        _check_values(features_request, channels, limits)
    return features_request


def _read_layer(request: explain_pb2.ExtractFeaturesRequest, model: ModelInfo, rank: Rank) -> str:
    """Return the layer's name: the last attention has none."""
    if rank == "heads":
        if request.layer:
            find_layer(request.layer, model, "layer")
        return request.layer
    layer = request.layer or model.default_layer
    if not layer:
        raise FailedPrecondition(f"{model.name} has no layer with a grid over the image", field="layer")
    check_layer(layer, model, "layer")
    return layer


def _read_top(request: explain_pb2.ExtractFeaturesRequest, rank: Rank, limits: Limits) -> int:
    most = limits.factors if rank == "factors" else limits.channels
    default = most if rank == "heads" else DEFAULT_TOP.get(rank, DEFAULT_CHANNELS)
    if not request.HasField("top") and request.HasField("basis"):
        default = most
    top = request.top if request.HasField("top") else default
    check_range(top, 1, most, "top")
    return top


def _check_rank_fields(request: explain_pb2.ExtractFeaturesRequest, rank: Rank) -> None:
    """Check the fields that only principal components have."""
    basis = request.HasField("basis")
    for name, present in (("fit_images", request.fit_images), ("basis", basis), ("foreground", request.foreground)):
        if present and rank != "pca":
            raise InvalidArgument("only principal components have this field: set rank to CHANNEL_RANK_PCA", field=name)
    if basis and request.fit_images:
        raise InvalidArgument("a basis is given, so no further photos are used", field="fit_images")
    if basis and request.foreground and not request.basis.background_vector:
        raise InvalidArgument("the basis was computed with the background", field="foreground")


def _needs_target(request: explain_pb2.ExtractFeaturesRequest, model: ModelInfo, rank: Rank) -> bool:
    """Return False if a model without scores is asked for what needs none."""
    return request.HasField("target") or model.task != "embed" or rank in ("activation", "gradient")


def _check_values(request: FeaturesRequest, channels: int, limits: Limits) -> None:
    """Check that the features to decompose are not too large."""
    layout = request.model.layers[request.layer].layout
    cells = layout.height * layout.width * (1 + len(request.fit_images)) if layout else 0
    factors = max(1, request.top // FACTORS_PER_VALUE) if request.rank == "factors" else 1
    if cells * channels * factors > limits.feature_values:
        raise InvalidArgument(
            f"{cells:,} cells of {channels:,} channels are more than {limits.feature_values // factors:,} values: "
            "name a layer with a smaller grid, or ask for fewer photos or factors",
            field="layer",
        )


def _target(request: explain_pb2.InspectLayersRequest | explain_pb2.ExtractFeaturesRequest, model: ModelInfo) -> Target:
    if not request.HasField("target"):
        if model.text is not None and model.task == "embed":
            raise unfit(model, "target")
        if model.task == "embed":
            message = f"{model.name} returns an embedding, so there is no score to differentiate"
            raise FailedPrecondition(message, field="target")
        return RankTarget(0)
    target = read_target(request.target, model, "target")
    if kind_of(target).file(target) or kind_of(target).box(target):
        message = "here a target is a class, without another image, a region, a mask or a box"
        raise InvalidArgument(message, field="target")
    return target


def _check_raw_size(request: FeaturesRequest, limits: Limits) -> None:
    layout = request.model.layers[request.layer].layout
    if not (request.raw and layout):
        return
    count = min(request.top, *channels_of(request.model, [request.layer]))
    height, width = layout.height, layout.width
    map_bytes = 4 * height * width
    if count * map_bytes > limits.raw_bytes:
        raise InvalidArgument(
            f"{count} raw maps of {height} by {width} have {count * map_bytes / 2**20:,.1f} MiB, and "
            f"{limits.raw_bytes // 2**20} is the limit: request at most {limits.raw_bytes // map_bytes}",
            field="top",
        )


def inspect_response(request: InspectRequest, result: InspectResult) -> explain_pb2.InspectLayersResponse:
    """Encode the response to a request; the caller sets its id."""
    containers = {name.rpartition(".")[0] for name in request.model.layers}
    return explain_pb2.InspectLayersResponse(
        model=request.model.name,
        target=explained_message(result.prediction, result.target, result.score),
        contrast=contrast_message(result.prediction, result.target, result.score),
        score=result.score,
        layers=[
            _reading(request.model.layers[name], reading, container=name in containers)
            for name, reading in zip(request.names, result.readings, strict=True)
        ],
        timing=timing_message(result.timing),
        predictions=prediction_messages(result.prediction, DEFAULT_PREDICTIONS),
        unchanged_predictions=prediction_messages(result.unchanged, DEFAULT_PREDICTIONS),
    )


def _reading(layer: LayerInfo, reading: Reading | None, *, container: bool) -> explain_pb2.LayerReading:
    message = explain_pb2.LayerReading(name=layer.name, type=layer.type, container=container)
    if reading:
        message.output_shape.extend(reading.shape)
        message.elements = reading.elements
        message.activation.CopyFrom(_statistics(reading.activation))
        message.gradient.CopyFrom(_statistics(reading.gradient))
    return message


def _statistics(statistics: Statistics) -> explain_pb2.Statistics:
    return explain_pb2.Statistics(
        mean=statistics.mean,
        std=statistics.std,
        minimum=statistics.minimum,
        maximum=statistics.maximum,
        zeros=statistics.zeros,
        norm=statistics.norm,
        non_finite=statistics.non_finite,
    )


def features_response(request: FeaturesRequest, result: FeaturesResult) -> explain_pb2.ExtractFeaturesResponse:
    """Encode the response to a request; the caller sets its id."""
    count, height, width = result.shape
    scored = kind_of(result.target).name != "similarity"
    return explain_pb2.ExtractFeaturesResponse(
        model=request.model.name,
        layer=result.layer,
        target=explained_message(result.prediction, result.target, result.score) if scored else None,
        contrast=contrast_message(result.prediction, result.target, result.score),
        score=result.score if scored else 0.0,
        channels=list(map(_channel, result.channels)),
        channel_count=count,
        grid_height=height,
        grid_width=width,
        maps=b"".join(channel.map.astype("<f4").tobytes() for channel in result.channels) if request.raw else b"",
        picture=picture_message(result.picture),
        photo=photo_message(result.size, result.prediction.seen),
        timing=timing_message(result.timing),
        predictions=prediction_messages(result.prediction, DEFAULT_PREDICTIONS),
        unchanged_predictions=prediction_messages(result.unchanged, DEFAULT_PREDICTIONS),
        basis=basis_message(result.basis),
    )


def _channel(channel: Channel) -> explain_pb2.Channel:
    return explain_pb2.Channel(
        index=channel.index,
        mean_activation=channel.activation,
        gradient_weight=channel.weight,
        share=channel.share,
        nearest=map(prediction_message, channel.nearest),
    )
