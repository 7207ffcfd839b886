"""The way of an x-ray, from its bytes to its reply: what every layer gives for an image, and what one of them sees.

bytes -> wire (check) -> images (decode, in a thread) -> batcher -> engine (measure, or capture)
-> tiles (picture, in a thread) -> wire -> bytes
"""

import math
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np

from camserve.v1 import explain_pb2
from camserve_server import images, render, tiles, wire
from camserve_server.errors import InvalidArgument
from camserve_server.pipeline import RGB, Pipeline
from camserve_server.telemetry import Spent
from camserve_server.threads import in_thread
from camserve_server.types import Box, Input, Limits, Map, ModelInfo, Pass, Picture, Pixels, Preprocess, Row, RowResult


@dataclass(frozen=True, slots=True)
class _View:
    """A photo's height and width, what the model sees of it, and the part of the photo that this is."""

    size: tuple[int, int]
    image: Input
    seen: Box


@dataclass(frozen=True, slots=True)
class _Look:
    """One image's way through the model, and where the time went until then."""

    view: _View
    result: RowResult
    decoding: float
    spent: Spent

    def told(self, model: ModelInfo) -> wire.Told:
        return wire.Told(model, self.result.logits, self.view.seen)

    def seconds(self, drawing: float) -> wire.Seconds:
        return wire.Seconds(self.decoding, self.spent.queue, self.spent.compute, drawing, self.spent.batch_rows)


async def inspect(
    pipeline: Pipeline, request: explain_pb2.InspectLayersRequest, *, deadline: float = math.inf
) -> explain_pb2.InspectLayersResponse:
    """Measure the layers of a model for one image.

    Args:
        pipeline: what the request goes through.
        request: as it came.
        deadline: on the event loop's clock.

    Raises:
        ServiceError: whatever was wrong.
    """
    order = wire.read_inspection(request, pipeline.models, pipeline.limits)
    pass_ = Pass(order.model.key, "inspect", order.model.preprocess.size, order.layers)
    async with _looking(pipeline, order, pass_, deadline) as look:
        return wire.inspect_response(order, look.told(order.model), look.result, look.seconds(drawing=0.0))


async def features(
    pipeline: Pipeline, request: explain_pb2.ExtractFeaturesRequest, unsent: ExitStack, *, deadline: float = math.inf
) -> explain_pb2.ExtractFeaturesResponse:
    """Return channels of a layer, ranked.

    Args:
        pipeline: what the request goes through.
        request: as it came.
        unsent: to be closed when the reply is sent: releases its memory.
        deadline: on the event loop's clock.

    Raises:
        ServiceError: whatever was wrong.
    """
    order = wire.read_extraction(request, pipeline.models, pipeline.limits)
    colours = _colours(order.colormap)
    pass_ = Pass(order.model.key, "features", order.model.preprocess.size, (order.layer,))
    async with _looking(pipeline, order, pass_, deadline) as look:
        await pipeline.reserve_reply(_kept_of(order), unsent)
        began = time.perf_counter()
        channels, picture = await in_thread(pipeline.threads, _drawn, order, look, colours)
        seconds = look.seconds(time.perf_counter() - began)
        reply = wire.features_response(order, look.told(order.model), look.result, channels, picture, seconds)
        reply.photo.CopyFrom(wire.photo_of(look.view.size, look.view.seen))
        return reply


def _colours(name: str) -> Pixels:
    try:
        return render.colormap(name)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field="colormap") from error


@asynccontextmanager
async def _looking(
    pipeline: Pipeline, order: wire.Inspection | wire.Extraction, pass_: Pass, deadline: float
) -> AsyncIterator[_Look]:
    """Run an image through the model; inside the block, room for its inputs and results stays reserved."""
    found: list[RowResult] = []
    size = RGB * math.prod(order.model.preprocess.size) + _kept_of(order)
    async with pipeline.admitted(order.model, 1, size=size):
        began = time.perf_counter()
        async with pipeline.decoding(order.image):
            view = await in_thread(pipeline.threads, _see, order.image, order.model.preprocess, pipeline.limits)
        decoding = time.perf_counter() - began
        rows = [Row(view.image, order.target, features=pass_.kind == "features")]
        spent = await pipeline.batcher.submit(pass_, rows, lambda _index, result: found.append(result), deadline)
        yield _Look(view, found[0], decoding, spent)


def _kept_of(order: wire.Inspection | wire.Extraction) -> int:
    """Return how many bytes of a layer's output are kept until the reply is made."""
    return 4 * math.prod(order.model.layers[order.layer].shape) if isinstance(order, wire.Extraction) else 0


def _see(data: bytes, preprocess: Preprocess, limits: Limits) -> _View:
    photo = images.decode(data, limits)
    image, seen = images.prepared(photo, data, preprocess)
    return _View((photo.shape[0], photo.shape[1]), image, seen)


def _drawn(order: wire.Extraction, look: _Look, colours: Pixels) -> tuple[list[wire.Channel], Picture | None]:
    maps, weights = look.result.features[0], look.result.maps[0][0]
    channels = ranked(maps, weights, order)
    if order.picture is None:
        return channels, None
    shown = [tiles.Tile(f"#{one.index}", _rank_value(one, order.rank), one.map) for one in channels]
    return channels, tiles.draw(
        images.displayed(look.view.image, order.model.preprocess),
        shown,
        _titles(order, look, len(channels)),
        colours,
        order.picture,
    )


def ranked(maps: Map, weights: Map, order: wire.Extraction) -> list[wire.Channel]:
    """Return the first channels in rank; of equals the first, and what is not finite last.

    Args:
        maps: float32 [C,h,w].
        weights: the score's mean gradient over each, float32 [C].
        order: says by what to rank, and how many are wanted.
    """
    means = maps.mean((1, 2), dtype=np.float64)
    keys = np.abs(weights) if order.rank == "gradient" else means
    keys = np.where(np.isfinite(keys), keys, -np.inf)
    first = np.argsort(-keys, kind="stable")[: order.top]
    return [wire.Channel(int(k), float(means[k]), float(weights[k]), maps[k]) for k in first]


def _rank_value(channel: wire.Channel, rank: wire.Rank) -> float:
    return channel.weight if rank == "gradient" else channel.activation


def _titles(order: wire.Extraction, look: _Look, shown: int) -> tuple[str, str]:
    count, height, width = look.result.features[0].shape
    told, result = look.told(order.model), look.result
    target, contrast = told.explained(result.target, result.score), told.against(result.target)
    names = [one.label or f"class {one.class_index}" for one in (target, contrast) if one]
    what, whose = "mean activation", ""
    if order.rank == "gradient":
        what, whose = "gradient weight", f" for {', not '.join(names)}"
    return (
        f"{order.model.name} · {order.layer}",
        f"{shown} of {count} channels, {height}×{width}, by {what}{whose}",
    )
