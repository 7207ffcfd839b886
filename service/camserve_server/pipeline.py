"""One request from its bytes to its pictures; what the RPCs, and the command line without a network, both call.

bytes -> wire (check) -> images (decode, in a thread) -> batcher (wait for company) -> engine (capture)
-> methods (map) -> render (picture, in a thread) -> wire -> bytes
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from camserve.v1 import explain_pb2
from camserve_server import images, jobs, render, wire
from camserve_server.batcher import Batcher, Collect, Spent
from camserve_server.errors import InvalidArgument
from camserve_server.types import Box, Limits, ModelInfo, Pass, Pixels, Rendering, Row

P = ParamSpec("P")
T = TypeVar("T")

HELD = 3_000_000  # bytes of a decoded photo that are held while its request waits; larger ones are decoded again
PIXELWISE_TOP = 0.99  # quantile of a map of the input's pixels that has the strongest colour: Smilkov et al. 2017


@dataclass(frozen=True, slots=True)
class _View:
    """A photo, decoded.

    Attributes:
        photo: uint8 [height, width, 3]; None where it is too large to be held while its request waits.
        size: its height and width.
        image: what the model sees, uint8 [h,w,3].
        seen: the part of the photo that this is.
        receipt: what was explained, by what and on what.
    """

    photo: Pixels | None
    size: tuple[int, int]
    image: Pixels
    seen: Box
    receipt: explain_pb2.Receipt


@dataclass(frozen=True, slots=True)
class Pipeline:
    """All that a request goes through.

    Attributes:
        models: that are loaded; the first is the default.
        batcher: that runs rows.
        threads: that decode and draw.
        limits: on what one request may ask for.
    """

    models: Mapping[str, ModelInfo]
    batcher: Batcher
    threads: ThreadPoolExecutor
    limits: Limits

    async def explain(
        self,
        request: explain_pb2.ExplainRequest,
        *,
        deadline: float = math.inf,
        wait: bool = False,
        progress: jobs.Progress = jobs.unheard,
    ) -> explain_pb2.ExplainResponse:
        """Explain one image.

        Args:
            request: as it came.
            deadline: on the event loop's clock.
            wait: for room in the queue, rather than be refused.
            progress: is told how many rows are done, and of how many.

        Raises:
            ServiceError: whatever was wrong.
        """
        order = wire.read_order(request, self.models, self.limits)
        render.colormap(order.rendering.colormap)
        async with self.batcher.admit(min(order.job.rows, self.limits.chunk), wait=wait):
            return await self._explain(order, deadline, progress)

    async def _explain(
        self, order: wire.Order, deadline: float, progress: jobs.Progress
    ) -> explain_pb2.ExplainResponse:
        clock, spent = time.perf_counter, Spent()

        async def submit(pass_: Pass, rows: Sequence[Row], collect: Collect) -> None:
            spent.add(await self.batcher.submit(pass_, rows, collect, deadline))

        began = clock()
        view = await self._in_thread(_see, order, self.limits)
        decoded = clock()
        outcome = await jobs.explain(
            order.job, view.image, submit, chunk=self.limits.chunk, think=self._in_thread, progress=progress
        )
        computed = clock()
        answers = await self._draw(order, view, outcome)
        seconds = wire.Seconds(decoded - began, spent.queue, spent.compute, clock() - computed, spent.batch_rows)
        response = wire.explain_response(order, outcome.logits, answers, view.size, view.seen, seconds)
        response.receipt.CopyFrom(view.receipt)
        return response

    async def _draw(self, order: wire.Order, view: _View, outcome: jobs.Outcome) -> list[wire.Answer]:
        wants = order.rendering
        if not (wants.pictures or wants.intensity):
            return [wire.Answer(finding, wants.heatmap) for finding in outcome.findings]
        photo = view.photo
        if photo is None and wants.pictures:
            photo = await self._in_thread(images.decode, order.image, self.limits)
        # One by one, so that a caller who gave up is noticed in between.
        return [await self._in_thread(_answer, finding, photo, view, wants) for finding in outcome.findings]

    async def _in_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, partial(function, *args, **kwargs))


def _answer(finding: jobs.Finding, photo: Pixels | None, view: _View, wants: Rendering) -> wire.Answer:
    size = (view.image.shape[0], view.image.shape[1])
    top = PIXELWISE_TOP if finding.heatmap.shape == size else 1.0
    whole = render.intensities(finding.heatmap, wants.profile, size, top) if wants.whole else None
    if photo is None:
        return wire.Answer(finding, wants.heatmap, intensity=whole)
    # The papers' intensities are drawn from the layer's own grid: one interpolation, straight to the photo.
    drawn = render.intensity(finding.heatmap, top) if whole is None or wants.profile == "paper" else whole
    pictures = render.draw(photo, drawn, view.seen, wants)
    return wire.Answer(finding, wants.heatmap, *pictures, whole if wants.intensity else None)


def _see(order: wire.Order, limits: Limits) -> _View:
    photo = images.decode(order.image, limits)
    size = (photo.shape[0], photo.shape[1])
    _check_drawing(order, size, limits)
    image, seen = images.fit(photo, order.job.model.preprocess)
    kept = order.rendering.pictures and photo.size <= HELD
    receipt = wire.receipt(order.job.model, order.image, image)
    return _View(photo if kept else None, size, image, seen, receipt)


def _check_drawing(order: wire.Order, size: tuple[int, int], limits: Limits) -> None:
    shrunk = min(1.0, (order.rendering.max_side or math.inf) / max(size))
    drawn = order.job.explanations * order.rendering.pictures * size[0] * size[1] * shrunk**2
    if drawn > limits.drawn_pixels:
        raise InvalidArgument(
            f"the pictures have {drawn / 1e6:,.0f} million pixels, and {limits.drawn_pixels / 1e6:,.0f} is the limit: "
            "set max_side, or ask for fewer",
            field="rendering.max_side",
        )
