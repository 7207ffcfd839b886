"""Inspect the layers of a model, and extract feature maps: a validated request in, a result out.

The steps are those of `explain`: admit, decode, run one row, draw the channels if asked, and return the result. No
protocol is known here.
"""

import math
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np

from camserve_server import jobs
from camserve_server.core.arrays import Input, Map, Pixels
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.engine.values import Row, RowResult
from camserve_server.imaging import images, render, tiles
from camserve_server.imaging.values import Box, Picture, Preprocess
from camserve_server.models.values import Pass
from camserve_server.serving import memory
from camserve_server.serving.explain import Pipeline, submit_for
from camserve_server.serving.requests import FeaturesRequest, InspectRequest, Rank
from camserve_server.serving.results import Channel, FeaturesResult, InspectResult, ModelPrediction, Timing
from camserve_server.telemetry import RequestTimings


@dataclass(frozen=True, slots=True)
class _PreparedPhoto:
    """The model's input made from a photo.

    Attributes:
        size: height and width of the photo.
        image: the model's input.
        seen: the part of the photo that the model sees.
    """

    size: tuple[int, int]
    image: Input
    seen: Box


@dataclass(frozen=True, slots=True)
class _ImageRun:
    """A finished run of the model on one image.

    Attributes:
        photo: the image.
        result: the result of its row.
        prediction: the model's prediction.
        unchanged: the prediction of the model without interventions; None for a request without any.
        decoding: seconds that decoding took.
        timings: time in the queue and in the batch.
    """

    photo: _PreparedPhoto
    result: RowResult
    prediction: ModelPrediction
    unchanged: ModelPrediction | None
    decoding: float
    timings: RequestTimings

    def timing(self, drawing: float = 0.0) -> Timing:
        return Timing(self.decoding, self.timings.queue, self.timings.compute, drawing, self.timings.batch_rows)


async def inspect(pipeline: Pipeline, request: InspectRequest, *, deadline: float = math.inf) -> InspectResult:
    """Measure the layers of a model for one image.

    Args:
        pipeline: runs the request.
        request: the layers, the target and the image.
        deadline: time on the event loop's clock after which the row does not start.

    Raises:
        ServiceError: the request was refused, or failed.
    """
    size = request.model.preprocess.size
    pass_ = Pass(request.model.key, "inspect", size, request.layers, interventions=request.interventions)
    async with _run(pipeline, request, pass_, deadline) as run:
        result = run.result
        fixed = (result.target, result.score, result.readings)
        return InspectResult(run.prediction, *fixed, run.timing(), run.unchanged)


async def features(
    pipeline: Pipeline, request: FeaturesRequest, until_sent: ExitStack, *, deadline: float = math.inf
) -> FeaturesResult:
    """Return the highest-ranked channels of a layer for one image.

    Args:
        pipeline: runs the request.
        request: the layer, the target and the image, and how to rank and draw the channels.
        until_sent: stack that the caller closes when the reply is sent, to release the reply's memory.
        deadline: time on the event loop's clock after which the row does not start.

    Raises:
        ServiceError: the request was refused, or failed.
    """
    colours = _colours(request.colormap)
    size = request.model.preprocess.size
    pass_ = Pass(request.model.key, "features", size, (request.layer,), interventions=request.interventions)
    async with _run(pipeline, request, pass_, deadline) as run:
        await pipeline.reserve_reply(_feature_bytes(request), until_sent)
        began = time.perf_counter()
        channels, picture = await pipeline.in_thread(_rank_and_draw, request, run, colours)
        count, height, width = run.result.features[0].shape
        return FeaturesResult(
            prediction=run.prediction,
            target=run.result.target,
            score=run.result.score,
            shape=(count, height, width),
            channels=channels,
            picture=picture,
            size=run.photo.size,
            timing=run.timing(time.perf_counter() - began),
            unchanged=run.unchanged,
        )


def _colours(name: str) -> Pixels:
    """Return a colour map by name; an error names the request's own field."""
    try:
        return render.colormap(name)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field="colormap") from error


@asynccontextmanager
async def _run(
    pipeline: Pipeline, request: InspectRequest | FeaturesRequest, pass_: Pass, deadline: float
) -> AsyncIterator[_ImageRun]:
    """Run an image through the model; inside the block, room for its inputs and results stays reserved."""
    results: list[RowResult] = []
    size = (
        memory.input_pixel(request.model) * math.prod(request.model.preprocess.size)
        + _feature_bytes(request)
        + memory.text_bytes(request.model)
    )
    needed = jobs.texts_of(request.model, [request.target])
    rows = 1 + bool(request.interventions) + min(len(needed), pipeline.limits.chunk)
    async with pipeline.admit(request.model, rows, size=size):
        began = time.perf_counter()
        async with pipeline.reserve_decoding(request.image):
            photo = await pipeline.in_thread(_prepare, request.image, request.model.preprocess, pipeline.limits)
        decoding = time.perf_counter() - began
        timings = RequestTimings()
        submit = submit_for(pipeline, deadline, timings)
        model = request.model.at_size((photo.image.shape[0], photo.image.shape[1]))
        texts = await jobs.embed_texts(model, needed, submit)
        target = texts.fill(request.target)
        row = Row(photo.image, target, features=pass_.kind == "features", texts=texts.classes)
        pass_ = replace(pass_, size=model.preprocess.size)
        await submit(pass_, [row], lambda _index, result: results.append(result))
        if pass_.interventions:
            plain = replace(pass_, kind="score", layers=(), interventions=())
            row = replace(row, target=results[0].target, features=False)
            await submit(plain, [row], lambda _index, result: results.append(result))
        predictions = [ModelPrediction(model, each.logits, photo.seen) for each in results]
        unchanged = predictions[1] if pass_.interventions else None
        yield _ImageRun(photo, results[0], predictions[0], unchanged, decoding, timings)


def _feature_bytes(request: InspectRequest | FeaturesRequest) -> int:
    """Return the size in bytes of the feature maps that are kept until the reply is made."""
    if not isinstance(request, FeaturesRequest):
        return 0
    return memory.FLOAT * math.prod(request.model.layers[request.layer].shape)


def _prepare(data: bytes, preprocess: Preprocess, limits: Limits) -> _PreparedPhoto:
    photo = images.decode(data, limits, preprocess.channels)
    image, seen = images.make_input(photo, data, preprocess)
    return _PreparedPhoto((photo.shape[0], photo.shape[1]), image, seen)


def _rank_and_draw(request: FeaturesRequest, run: _ImageRun, colours: Pixels) -> tuple[list[Channel], Picture | None]:
    maps, weights = run.result.features[0], run.result.maps[0][0]
    channels = rank_channels(maps, weights, request)
    if request.picture is None:
        return channels, None
    shown = [tiles.Tile(f"#{channel.index}", _rank_value(channel, request.rank), channel.map) for channel in channels]
    image = images.displayed(run.photo.image, request.model.preprocess)
    return channels, tiles.draw(image, shown, _titles(request, run, len(channels)), colours, request.picture)


def rank_channels(maps: Map, weights: Map, request: FeaturesRequest) -> list[Channel]:
    """Return the highest-ranked channels; equal ones stay in order, and those with NaN or infinite values are last.

    Args:
        maps: feature maps, float32 [C,h,w].
        weights: mean gradient of the score over each channel, float32 [C].
        request: the request, with the value to rank by and the number of channels to return.
    """
    means = maps.mean((1, 2), dtype=np.float64)
    keys = np.abs(weights) if request.rank == "gradient" else means
    keys = np.where(np.isfinite(keys), keys, -np.inf)
    first = np.argsort(-keys, kind="stable")[: request.top]
    return [Channel(int(k), float(means[k]), float(weights[k]), maps[k]) for k in first]


def _rank_value(channel: Channel, rank: Rank) -> float:
    return channel.weight if rank == "gradient" else channel.activation


def _titles(request: FeaturesRequest, run: _ImageRun, shown: int) -> tuple[str, str]:
    """Return the two lines above the picture: the model and layer, and the number and rank of the channels."""
    count, height, width = run.result.features[0].shape
    prediction, result = run.prediction, run.result
    target = prediction.explained(result.target, result.score)
    contrast = prediction.against(result.target, result.score)
    names = [each.label or f"class {each.class_index}" for each in (target, contrast) if each]
    value, explained = "mean activation", ""
    if request.rank == "gradient":
        value, explained = "gradient weight", f" for {', not '.join(names)}"
    return (
        f"{request.model.name} · {request.layer}",
        f"{shown} of {count} channels, {height}×{width}, by {value}{explained}",
    )
