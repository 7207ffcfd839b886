"""The wire of the x-ray: what every layer gives for an image, and the channels of one."""

from collections.abc import Mapping

from camserve.v1 import explain_pb2
from camserve_server.api.codec.checks import check_range
from camserve_server.api.codec.predictions import contrast_message, explained_message
from camserve_server.api.codec.replies import photo_message, picture_message, timing_message
from camserve_server.api.codec.requests import check_layer, find_layer, read_format, read_model
from camserve_server.api.codec.sizes import check_sizes
from camserve_server.api.codec.targets import read_target
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
"""Ours by theirs."""


def read_inspection(
    request: explain_pb2.InspectLayersRequest, models: Mapping[str, KnownModel], limits: Limits
) -> InspectRequest:
    """Check a request to measure layers.

    Raises:
        ServiceError: a field is wrong; the error names it.
    """
    check_sizes(request, limits)
    model = read_model(request.model, models, "model")
    for place, name in enumerate(request.layers):
        find_layer(name, model, f"layers[{place}]")
    if len(set(request.layers)) < len(request.layers):
        raise InvalidArgument("a layer is named twice", field="layers")
    return InspectRequest(model, _target(request, model), tuple(request.layers), request.image)


def read_extraction(
    request: explain_pb2.ExtractFeaturesRequest, models: Mapping[str, KnownModel], limits: Limits
) -> FeaturesRequest:
    """Check a request for channels of a layer.

    Raises:
        ServiceError: a field is wrong; the error names it.
    """
    check_sizes(request, limits)
    model = read_model(request.model, models, "model")
    layer = request.layer or model.default_layer
    check_layer(layer, model, "layer")
    if request.rank not in RANKS:
        raise InvalidArgument(f"there is no rank {request.rank}", field="rank")
    top = request.top if request.HasField("top") else DEFAULT_TOP
    check_range(top, 1, limits.channels, "top")
    if not (request.raw or request.picture):
        raise InvalidArgument("ask for a picture, for raw maps, or for both", field="picture")
    found = FeaturesRequest(
        model=model,
        target=_target(request, model),
        layer=layer,
        image=request.image,
        rank=RANKS[request.rank],
        top=top,
        raw=request.raw,
        picture=read_format(request.picture, "picture"),
        colormap=request.colormap or "viridis",
    )
    _check_size(found, limits)
    return found


def _target(request: explain_pb2.InspectLayersRequest | explain_pb2.ExtractFeaturesRequest, model: ModelInfo) -> Target:
    if not request.HasField("target"):
        if model.task == "embed":
            raise FailedPrecondition(f"{model.name} answers with an embedding, which is no score", field="target")
        return RankTarget(0)
    target = read_target(request.target, model, "target")
    if kind_of(target).compared(target) or kind_of(target).box(target):
        raise InvalidArgument(
            "here a target is a class: say it without another image, a region or a box", field="target"
        )
    return target


def _check_size(order: FeaturesRequest, limits: Limits) -> None:
    layout = order.model.layers[order.layer].layout
    if not (order.raw and layout):
        return
    count = min(order.top, *channels_of(order.model, [order.layer]))
    height, width = layout.height, layout.width
    one = 4 * height * width
    if count * one > limits.raw_bytes:
        raise InvalidArgument(
            f"{count} raw maps of {height} by {width} have {count * one / 2**20:,.1f} MiB, and "
            f"{limits.raw_bytes // 2**20} is the limit: ask for at most {limits.raw_bytes // one}",
            field="top",
        )


def inspect_response(request: InspectRequest, result: InspectResult) -> explain_pb2.InspectLayersResponse:
    """Encode the reply to a request; the caller sets its id."""
    inside = {name.rpartition(".")[0] for name in request.model.layers}
    return explain_pb2.InspectLayersResponse(
        model=request.model.name,
        target=explained_message(result.prediction, result.target, result.score),
        contrast=contrast_message(result.prediction, result.target),
        score=result.score,
        layers=[
            _reading(request.model.layers[name], reading, container=name in inside)
            for name, reading in zip(request.names, result.readings, strict=True)
        ],
        timing=timing_message(result.timing),
    )


def _reading(layer: LayerInfo, reading: Reading | None, *, container: bool) -> explain_pb2.LayerReading:
    message = explain_pb2.LayerReading(name=layer.name, type=layer.type, container=container)
    if reading:
        message.output_shape.extend(reading.shape)
        message.elements = reading.elements
        message.activation.CopyFrom(_statistics(reading.activation))
        message.gradient.CopyFrom(_statistics(reading.gradient))
    return message


def _statistics(one: Statistics) -> explain_pb2.Statistics:
    return explain_pb2.Statistics(
        mean=one.mean,
        std=one.std,
        minimum=one.minimum,
        maximum=one.maximum,
        zeros=one.zeros,
        norm=one.norm,
        non_finite=one.non_finite,
    )


def features_response(request: FeaturesRequest, result: FeaturesResult) -> explain_pb2.ExtractFeaturesResponse:
    """Encode the reply to a request; the caller sets its id."""
    count, height, width = result.shape
    return explain_pb2.ExtractFeaturesResponse(
        model=request.model.name,
        layer=request.layer,
        target=explained_message(result.prediction, result.target, result.score),
        contrast=contrast_message(result.prediction, result.target),
        score=result.score,
        channels=[
            explain_pb2.Channel(index=one.index, mean_activation=one.activation, gradient_weight=one.weight)
            for one in result.channels
        ],
        channel_count=count,
        grid_height=height,
        grid_width=width,
        maps=b"".join(one.map.astype("<f4").tobytes() for one in result.channels) if request.raw else b"",
        picture=picture_message(result.picture),
        photo=photo_message(result.size, result.prediction.seen),
        timing=timing_message(result.timing),
    )
