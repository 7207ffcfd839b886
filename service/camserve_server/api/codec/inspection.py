"""Codec of InspectLayers and ExtractFeatures."""

from collections.abc import Mapping

from camserve.v1 import explain_pb2
from camserve_server.api.codec.checks import check_range
from camserve_server.api.codec.interventions import read_interventions
from camserve_server.api.codec.layers import find_layer
from camserve_server.api.codec.predictions import contrast_message, explained_message, prediction_messages
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
from camserve_server.serving.results import FeaturesResult, InspectResult
from camserve_server.targets import kind_of
from camserve_server.targets.values import RankTarget, Target

DEFAULT_TOP = 16

RANKS: Mapping["explain_pb2.ChannelRank.ValueType", Rank] = {
    explain_pb2.CHANNEL_RANK_UNSPECIFIED: "activation",
    explain_pb2.CHANNEL_RANK_ACTIVATION: "activation",
    explain_pb2.CHANNEL_RANK_GRADIENT: "gradient",
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
    layer = request.layer or model.default_layer
    check_layer(layer, model, "layer")
    if request.rank not in RANKS:
        raise InvalidArgument(f"unknown rank {request.rank}", field="rank")
    top = request.top if request.HasField("top") else DEFAULT_TOP
    check_range(top, 1, limits.channels, "top")
    if not (request.raw or request.picture):
        raise InvalidArgument("request a picture, raw maps, or both", field="picture")
    features_request = FeaturesRequest(
        model=model,
        target=_target(request, model),
        layer=layer,
        image=request.image,
        rank=RANKS[request.rank],
        top=top,
        raw=request.raw,
        picture=read_format(request.picture, "picture"),
        colormap=request.colormap or "viridis",
        interventions=read_interventions(request.interventions, model),
    )
    _check_raw_size(features_request, limits)
    return features_request


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
    return explain_pb2.ExtractFeaturesResponse(
        model=request.model.name,
        layer=request.layer,
        target=explained_message(result.prediction, result.target, result.score),
        contrast=contrast_message(result.prediction, result.target, result.score),
        score=result.score,
        channels=[
            explain_pb2.Channel(index=channel.index, mean_activation=channel.activation, gradient_weight=channel.weight)
            for channel in result.channels
        ],
        channel_count=count,
        grid_height=height,
        grid_width=width,
        maps=b"".join(channel.map.astype("<f4").tobytes() for channel in result.channels) if request.raw else b"",
        picture=picture_message(result.picture),
        photo=photo_message(result.size, result.prediction.seen),
        timing=timing_message(result.timing),
        predictions=prediction_messages(result.prediction, DEFAULT_PREDICTIONS),
        unchanged_predictions=prediction_messages(result.unchanged, DEFAULT_PREDICTIONS),
    )
