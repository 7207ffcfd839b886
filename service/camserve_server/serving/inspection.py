"""Inspect the layers of a model, and extract feature maps: a validated request in, a result out.

The steps are those of `explain`: admit, decode, run a row for each photo, draw the channels if asked, and return the
result. No protocol is known here.
"""

import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np

from camserve_server import jobs
from camserve_server.core.arrays import Input, Map, Pixels
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.engine.values import Row, RowResult
from camserve_server.imaging import components, fitting, render
from camserve_server.imaging.channels import picture as picture_of
from camserve_server.imaging.values import Box, Preprocess
from camserve_server.jobs.texts import NO_IMAGE
from camserve_server.models.values import Kind, Pass
from camserve_server.serving import channels, memory
from camserve_server.serving.explain import Pipeline, submit_for
from camserve_server.serving.photos import decoded, memory_of_photo
from camserve_server.serving.replies import UntilSent
from camserve_server.serving.requests import FeaturesRequest, InspectRequest
from camserve_server.serving.results import FeaturesResult, InspectResult, ModelPrediction, Prediction, Timing
from camserve_server.targets import anything, kind_of
from camserve_server.targets.values import ClassTarget, Target
from camserve_server.telemetry import RequestTimings

SAME_LOGITS = 0.02
"""Largest difference of two outputs, as a share of the largest, that half precision explains: 0.004 of each value."""


@dataclass(frozen=True, slots=True)
class _PreparedPhoto:
    """The model's input made from a photo.

    Attributes:
        size: height and width of the photo.
        image: the model's input.
        seen: the part of the photo that the model sees.
        shown: the photo, reduced, to draw on; None if nothing is drawn on it.
    """

    size: tuple[int, int]
    image: Input
    seen: Box
    shown: Pixels | None = None


@dataclass(frozen=True, slots=True)
class _ImageRun:
    """A finished run of the model on one image, and on the further images of the request.

    Attributes:
        photo: the image.
        result: the result of its row.
        prediction: the model's prediction.
        unchanged: the prediction of the model without interventions; None for a request without any.
        others: the results of the further images.
        submit: runs further rows.
        decoding: seconds that decoding took.
        timings: time in the queue and in the batch.
    """

    photo: _PreparedPhoto
    result: RowResult
    prediction: ModelPrediction
    unchanged: ModelPrediction | None
    others: Sequence[RowResult]
    submit: jobs.Submit
    decoding: float
    timings: RequestTimings

    def timing(self, drawing: float = 0.0) -> Timing:
        return Timing(self.decoding, self.timings.queue, self.timings.compute, drawing, self.timings.batch_rows)

    def observed(self, layer: str) -> channels.Observed:
        """Return the photo, and what the layer returned for it."""
        maps, result = self.result.features[0], self.result
        scored = bool(result.maps) and kind_of(result.target).name != "similarity"
        weights = result.maps[0][0] if scored else np.zeros(len(maps), np.float32)
        photo = (self.photo.image, self.photo.shown, self.photo.seen, self.photo.size)
        return channels.Observed(
            *photo, maps, weights, self.prediction, result.target, result.score, result.layer or layer
        )


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
    pipeline: Pipeline, request: FeaturesRequest, until_sent: UntilSent, *, deadline: float = math.inf
) -> FeaturesResult:
    """Return the highest-ranked channels of a layer for one image, or what the rank returns instead.

    Args:
        pipeline: runs the request.
        request: the layer, the target and the image, and how to rank and draw the channels.
        until_sent: stack that the caller closes when the reply is sent, to release the reply's memory.
        deadline: time on the event loop's clock after which no row starts.

    Raises:
        ServiceError: the request was refused, or failed.
    """
    _check_colormap(request.colormap)
    kind: Kind = "heads" if request.rank == "heads" else "features"
    layers = (request.layer,) if request.layer else ()
    size = request.model.preprocess.size
    pass_ = Pass(request.model.key, kind, size, layers, interventions=request.interventions)
    async with AsyncExitStack() as held:
        with pipeline.repository.held(request.model):  # its version, until `_run` holds it
            await pipeline.reserve_reply(memory.feature_bytes(request), until_sent)  # no row is held yet
            run = await held.enter_async_context(_run(pipeline, request, pass_, deadline))
        began, photo, picture = time.perf_counter(), run.observed(request.layer), None
        found = await _find(pipeline, request, run, photo)
        if request.picture is not None:
            picture = await pipeline.in_thread(channels.draw, request, photo, found)
        count, height, width = photo.maps.shape
        return FeaturesResult(
            prediction=run.prediction,
            target=photo.target,
            score=photo.score,
            layer=photo.layer,
            shape=(count, height, width),
            channels=found.channels,
            picture=picture,
            size=photo.size,
            timing=run.timing(time.perf_counter() - began),
            unchanged=run.unchanged,
            basis=found.basis,
        )


async def _find(
    pipeline: Pipeline, request: FeaturesRequest, run: _ImageRun, photo: channels.Observed
) -> channels.Found:
    """Return the channels of a photo, and the classes of concepts, once memory to compute them is reserved."""
    work = channels.work_bytes(request)
    async with pipeline.reserve_drawing(work) if work else nullcontext():
        others = [result.features[0] for result in run.others]
        found = await pipeline.run_in_steps(channels.find(request, photo, others))
    if found.vectors is None:
        return found
    return channels.with_nearest(found, await _nearest(run, photo.maps, found.vectors))


def _check_colormap(name: str) -> None:
    """Check the name of a colour map; an error names the request's own field."""
    try:
        render.check_colormap(name)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field="colormap") from error


@asynccontextmanager
async def _run(
    pipeline: Pipeline, request: InspectRequest | FeaturesRequest, pass_: Pass, deadline: float
) -> AsyncIterator[_ImageRun]:
    """Run the images through the model; inside the block, room for their inputs and results stays reserved."""
    needed = jobs.texts_of(request.model, [request.target])
    rows = _rows_of(request)
    size = (
        memory.input_pixel(request.model) * math.prod(request.model.preprocess.size) * len(_files(request))
        + memory.feature_bytes(request)
        + memory.shown_bytes(request)
        + memory.text_bytes(request.model)
    )
    rows += min(len(needed), pipeline.limits.chunk)
    async with pipeline.hold(request.model, size) as accepted, pipeline.admit(rows, accepted):
        began = time.perf_counter()
        photos = [await _decode(pipeline, request, index) for index in range(len(_files(request)))]
        decoding = time.perf_counter() - began
        timings = RequestTimings()
        submit = submit_for(pipeline, deadline, timings)
        model = request.model.at_size(_size_of(photos[0]))
        texts = await jobs.embed_texts(model, needed, submit)
        targets = [texts.fill(request.target), *[anything(model)] * len(photos[1:])]
        results = await _run_photos(pass_, photos, targets, texts.classes, submit)
        prediction = ModelPrediction(model, results[0].logits, photos[0].seen)
        unchanged = await _unchanged(pass_, photos[0], results[0].target, texts.classes, submit)
        plain = ModelPrediction(model, unchanged.logits, photos[0].seen) if unchanged else None
        yield _ImageRun(photos[0], results[0], prediction, plain, results[1:], submit, decoding, timings)


async def _unchanged(
    pass_: Pass, photo: _PreparedPhoto, target: Target, texts: Map | None, submit: jobs.Submit
) -> RowResult | None:
    """Run the model without the interventions of a pass; return None if it has none."""
    if not pass_.interventions:
        return None
    results: list[RowResult] = []
    plain = Pass(pass_.model, "score", _size_of(photo))
    await submit(plain, [Row(photo.image, target, texts=texts)], lambda _index, result: results.append(result))
    return results[0]


async def _run_photos(
    pass_: Pass, photos: Sequence[_PreparedPhoto], targets: Sequence[Target], texts: Map | None, submit: jobs.Submit
) -> list[RowResult]:
    """Run a row for each photo, those with inputs of the same size together."""
    rows = [
        Row(photo.image, target, features=pass_.kind == "features", texts=texts)
        for photo, target in zip(photos, targets, strict=True)
    ]
    results: dict[int, RowResult] = {}
    sizes = [_size_of(photo) for photo in photos]
    for size in dict.fromkeys(sizes):
        places = [place for place, each in enumerate(sizes) if each == size]

        def collect(index: int, result: RowResult, places: Sequence[int] = places) -> None:
            results[places[index]] = result

        await submit(replace(pass_, size=size), [rows[place] for place in places], collect)
    return [results[place] for place in range(len(photos))]


def _size_of(photo: _PreparedPhoto) -> tuple[int, int]:
    return photo.image.shape[0], photo.image.shape[1]


def _files(request: InspectRequest | FeaturesRequest) -> tuple[bytes, ...]:
    """Return the encoded photos of a request."""
    return (request.image, *request.fit_images) if isinstance(request, FeaturesRequest) else (request.image,)


def _rows_of(request: InspectRequest | FeaturesRequest) -> int:
    """Return the number of rows without those of texts: one for each photo, and the vectors that are classified.

    With interventions one more row runs, of the unchanged model.
    """
    factors = isinstance(request, FeaturesRequest) and request.rank == "factors"
    classified = request.top + 1 if isinstance(request, FeaturesRequest) and factors else 0
    return len(_files(request)) + bool(request.interventions) + classified


async def _decode(pipeline: Pipeline, request: InspectRequest | FeaturesRequest, index: int) -> _PreparedPhoto:
    """Decode one of a request's photos; an error names its field."""
    file = _files(request)[index]
    drawn = isinstance(request, FeaturesRequest) and request.rank == "pca" and request.picture is not None
    prepare = (file, request.model.preprocess, pipeline.limits)
    try:
        async with pipeline.reserve_drawing(memory_of_photo(*prepare)):
            return await pipeline.in_thread(_prepare, *prepare, drawn=drawn and index == 0)
    except InvalidArgument as error:
        if not index:
            raise
        raise InvalidArgument(error.message, field=f"fit_images[{index - 1}]") from error


def _prepare(data: bytes, preprocess: Preprocess, limits: Limits, *, drawn: bool) -> _PreparedPhoto:
    photo = decoded(data, preprocess, limits)
    image, seen = fitting.make_input(photo, data, preprocess)
    shown = components.reduce(picture_of(photo)) if drawn else None
    return _PreparedPhoto((photo.shape[0], photo.shape[1]), image, seen, shown)


async def _nearest(run: _ImageRun, maps: Map, vectors: Map) -> list[list[Prediction]]:
    """Return the likeliest classes of each vector of features, by the model's last layer.

    They are known if the mean of the features over the grid is the input of that layer: it then gives the outputs of
    the model. Otherwise other layers come between, and every list is empty.
    """
    model, nothing = run.prediction.model, [list[Prediction]() for _ in vectors]
    if not model.embedding:
        return nothing
    mean = maps.mean((1, 2), dtype=np.float64).astype(np.float32)
    # Each row has an array of its own, because a batch counts its distinct images.
    rows = [Row(np.empty(NO_IMAGE, np.uint8), ClassTarget(0), vector=vector) for vector in (mean, *vectors)]
    outputs: dict[int, Map] = {}
    await run.submit(
        Pass(model.key, "classifier", NO_IMAGE[:2]), rows, lambda index, result: outputs.update({index: result.logits})
    )
    own = run.result.logits
    if outputs[0].shape != own.shape or np.abs(outputs[0] - own).max() > SAME_LOGITS * np.abs(own).max():
        return nothing
    return [
        ModelPrediction(model, outputs[place], run.photo.seen).top(channels.NEAREST) for place in range(1, len(rows))
    ]
