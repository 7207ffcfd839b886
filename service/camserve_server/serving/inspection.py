"""Inspect layers and extract features: a validated request in, a result out, and no protocol.

Request -> images (decode, in a thread) -> batcher -> engine (measure, or capture) -> tiles (picture, in a thread)
-> result
"""

import math
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np

from camserve_server.core.arrays import Input, Map, Pixels
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.engine.values import Row, RowResult
from camserve_server.imaging import images, render, tiles
from camserve_server.imaging.values import Box, Picture, Preprocess
from camserve_server.models.values import Pass
from camserve_server.serving.explain import RGB, Pipeline
from camserve_server.serving.requests import FeaturesRequest, InspectRequest, Rank
from camserve_server.serving.results import Channel, FeaturesResult, InspectResult, ModelPrediction, Timing
from camserve_server.telemetry import Spent


@dataclass(frozen=True, slots=True)
class _View:
    """A photo's height and width, what the model sees of it, and the part of the photo that this is."""

    size: tuple[int, int]
    image: Input
    seen: Box


@dataclass(frozen=True, slots=True)
class _Look:
    """The result of one image's row, and where the time went until then."""

    view: _View
    result: RowResult
    prediction: ModelPrediction
    decoding: float
    spent: Spent

    def timing(self, drawing: float = 0.0) -> Timing:
        return Timing(self.decoding, self.spent.queue, self.spent.compute, drawing, self.spent.batch_rows)


async def inspect(pipeline: Pipeline, request: InspectRequest, *, deadline: float = math.inf) -> InspectResult:
    """Measure the layers of a model for one image.

    Args:
        pipeline: runs the request.
        request: the layers, the target and the image.
        deadline: on the event loop's clock.

    Raises:
        ServiceError: whatever was wrong.
    """
    pass_ = Pass(request.model.key, "inspect", request.model.preprocess.size, request.layers)
    async with _looking(pipeline, request, pass_, deadline) as look:
        result = look.result
        return InspectResult(look.prediction, result.target, result.score, result.readings, look.timing())


async def features(
    pipeline: Pipeline, request: FeaturesRequest, unsent: ExitStack, *, deadline: float = math.inf
) -> FeaturesResult:
    """Return channels of a layer, ranked.

    Args:
        pipeline: runs the request.
        request: the layer, the target, the image, and how to rank and draw the channels.
        unsent: to be closed when the reply is sent: releases its memory.
        deadline: on the event loop's clock.

    Raises:
        ServiceError: whatever was wrong.
    """
    colours = _colours(request.colormap)
    pass_ = Pass(request.model.key, "features", request.model.preprocess.size, (request.layer,))
    async with _looking(pipeline, request, pass_, deadline) as look:
        await pipeline.reserve_reply(_kept_of(request), unsent)
        began = time.perf_counter()
        channels, picture = await pipeline.in_thread(_drawn, request, look, colours)
        count, height, width = look.result.features[0].shape
        return FeaturesResult(
            prediction=look.prediction,
            target=look.result.target,
            score=look.result.score,
            shape=(count, height, width),
            channels=channels,
            picture=picture,
            size=look.view.size,
            timing=look.timing(time.perf_counter() - began),
        )


def _colours(name: str) -> Pixels:
    try:
        return render.colormap(name)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field="colormap") from error


@asynccontextmanager
async def _looking(
    pipeline: Pipeline, request: InspectRequest | FeaturesRequest, pass_: Pass, deadline: float
) -> AsyncIterator[_Look]:
    """Run an image through the model; inside the block, room for its inputs and results stays reserved."""
    found: list[RowResult] = []
    size = RGB * math.prod(request.model.preprocess.size) + _kept_of(request)
    async with pipeline.admitted(request.model, 1, size=size):
        began = time.perf_counter()
        async with pipeline.decoding(request.image):
            view = await pipeline.in_thread(_see, request.image, request.model.preprocess, pipeline.limits)
        decoding = time.perf_counter() - began
        rows = [Row(view.image, request.target, features=pass_.kind == "features")]
        spent = Spent()
        await pipeline.batcher.submit(
            pass_, rows, lambda _index, result: found.append(result), deadline, spent, pipeline.origin
        )
        prediction = ModelPrediction(request.model, found[0].logits, view.seen)
        yield _Look(view, found[0], prediction, decoding, spent)


def _kept_of(request: InspectRequest | FeaturesRequest) -> int:
    """Return how many bytes of a layer's output are kept until the reply is made."""
    return 4 * math.prod(request.model.layers[request.layer].shape) if isinstance(request, FeaturesRequest) else 0


def _see(data: bytes, preprocess: Preprocess, limits: Limits) -> _View:
    photo = images.decode(data, limits)
    image, seen = images.prepared(photo, data, preprocess)
    return _View((photo.shape[0], photo.shape[1]), image, seen)


def _drawn(request: FeaturesRequest, look: _Look, colours: Pixels) -> tuple[list[Channel], Picture | None]:
    maps, weights = look.result.features[0], look.result.maps[0][0]
    channels = ranked(maps, weights, request)
    if request.picture is None:
        return channels, None
    shown = [tiles.Tile(f"#{one.index}", _rank_value(one, request.rank), one.map) for one in channels]
    image = images.displayed(look.view.image, request.model.preprocess)
    return channels, tiles.draw(image, shown, _titles(request, look, len(channels)), colours, request.picture)


def ranked(maps: Map, weights: Map, request: FeaturesRequest) -> list[Channel]:
    """Return the first channels in rank; of equals the first, and what is not finite last.

    Args:
        maps: float32 [C,h,w].
        weights: the score's mean gradient over each, float32 [C].
        request: says by what to rank, and how many are wanted.
    """
    means = maps.mean((1, 2), dtype=np.float64)
    keys = np.abs(weights) if request.rank == "gradient" else means
    keys = np.where(np.isfinite(keys), keys, -np.inf)
    first = np.argsort(-keys, kind="stable")[: request.top]
    return [Channel(int(k), float(means[k]), float(weights[k]), maps[k]) for k in first]


def _rank_value(channel: Channel, rank: Rank) -> float:
    return channel.weight if rank == "gradient" else channel.activation


def _titles(request: FeaturesRequest, look: _Look, shown: int) -> tuple[str, str]:
    count, height, width = look.result.features[0].shape
    prediction, result = look.prediction, look.result
    target, contrast = prediction.explained(result.target, result.score), prediction.against(result.target)
    names = [one.label or f"class {one.class_index}" for one in (target, contrast) if one]
    what, whose = "mean activation", ""
    if request.rank == "gradient":
        what, whose = "gradient weight", f" for {', not '.join(names)}"
    return (
        f"{request.model.name} · {request.layer}",
        f"{shown} of {count} channels, {height}×{width}, by {what}{whose}",
    )
