"""The wire of the x-ray: what every layer gives for an image, and the channels of one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from camserve.v1 import explain_pb2
from camserve_server.errors import FailedPrecondition, InvalidArgument
from camserve_server.jobs import channels_of
from camserve_server.targets import kind_of
from camserve_server.types import (
    KnownModel,
    LayerInfo,
    Limits,
    Map,
    ModelInfo,
    Picture,
    RankTarget,
    Reading,
    RowResult,
    Statistics,
    Target,
)
from camserve_server.wire.checks import check_range
from camserve_server.wire.predictions import Told
from camserve_server.wire.replies import Seconds, picture_of, timing_of
from camserve_server.wire.requests import check_layer, find_layer, read_format, read_model
from camserve_server.wire.sizes import check_sizes
from camserve_server.wire.targets import read_target

DEFAULT_TOP = 16

Rank = Literal["activation", "gradient"]

RANKS: Mapping["explain_pb2.ChannelRank.ValueType", Rank] = {
    explain_pb2.CHANNEL_RANK_UNSPECIFIED: "activation",
    explain_pb2.CHANNEL_RANK_ACTIVATION: "activation",
    explain_pb2.CHANNEL_RANK_GRADIENT: "gradient",
}
"""Ours by theirs."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """A request to measure layers, checked.

    Attributes:
        model: whose layers.
        target: whose score is differentiated.
        layers: by name; none for all.
        image: the photo's file.
    """

    model: ModelInfo
    target: Target
    layers: tuple[str, ...]
    image: bytes

    @property
    def names(self) -> tuple[str, ...]:
        """The layers that are measured."""
        return self.layers or tuple(self.model.layers)


@dataclass(frozen=True, slots=True)
class Extraction:
    """A request for channels of a layer, checked.

    Attributes:
        model: whose layer.
        target: whose score the weights are for.
        layer: its name.
        image: the photo's file.
        rank: by what the channels are ranked.
        top: how many are wanted.
        raw: whether their maps go out.
        picture: encoding of the tiles, or None.
        colormap: of the tiles.
    """

    model: ModelInfo
    target: Target
    layer: str
    image: bytes
    rank: Rank
    top: int
    raw: bool
    picture: Literal["jpeg", "png", "webp"] | None
    colormap: str


@dataclass(frozen=True, slots=True)
class Channel:
    """One channel of a layer.

    Attributes:
        index: its number.
        activation: its mean over the grid.
        weight: the mean of the score's gradient over the grid.
        map: float32 [h,w].
    """

    index: int
    activation: float
    weight: float
    map: Map


def read_inspection(
    request: explain_pb2.InspectLayersRequest, models: Mapping[str, KnownModel], limits: Limits
) -> Inspection:
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
    return Inspection(model, _target(request, model), tuple(request.layers), request.image)


def read_extraction(
    request: explain_pb2.ExtractFeaturesRequest, models: Mapping[str, KnownModel], limits: Limits
) -> Extraction:
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
    found = Extraction(
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


def _check_size(order: Extraction, limits: Limits) -> None:
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


def inspect_response(
    order: Inspection, told: Told, result: RowResult, seconds: Seconds
) -> explain_pb2.InspectLayersResponse:
    """Put the reply together; its id is the caller's to fill in."""
    inside = {name.rpartition(".")[0] for name in order.model.layers}
    return explain_pb2.InspectLayersResponse(
        model=order.model.name,
        target=told.explained(result.target, result.score),
        contrast=told.against(result.target),
        score=result.score,
        layers=[
            _reading(order.model.layers[name], reading, container=name in inside)
            for name, reading in zip(order.names, result.readings, strict=True)
        ],
        timing=timing_of(seconds),
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


def features_response(
    order: Extraction,
    told: Told,
    result: RowResult,
    channels: Sequence[Channel],
    picture: Picture | None,
    seconds: Seconds,
) -> explain_pb2.ExtractFeaturesResponse:
    """Put the reply together; its id and its photo are the caller's to fill in.

    Args:
        order: the request.
        told: what the model said.
        result: of its row.
        channels: in rank.
        picture: of them, or None.
        seconds: where the time went.
    """
    count, height, width = result.features[0].shape
    return explain_pb2.ExtractFeaturesResponse(
        model=order.model.name,
        layer=order.layer,
        target=told.explained(result.target, result.score),
        contrast=told.against(result.target),
        score=result.score,
        channels=[
            explain_pb2.Channel(index=one.index, mean_activation=one.activation, gradient_weight=one.weight)
            for one in channels
        ],
        channel_count=count,
        grid_height=height,
        grid_width=width,
        maps=b"".join(one.map.astype("<f4").tobytes() for one in channels) if order.raw else b"",
        picture=picture_of(picture),
        timing=timing_of(seconds),
    )
