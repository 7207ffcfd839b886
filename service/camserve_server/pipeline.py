"""One request from its bytes to its pictures; what the RPCs, and the command line without a network, both call.

bytes -> wire (check) -> images (decode, in a thread) -> batcher (wait for company) -> engine (capture)
-> methods (map) -> render (picture, in a thread) -> wire -> bytes
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from camserve.v1 import explain_pb2
from camserve_server import images, jobs, render, wire
from camserve_server.batcher import Batcher, Collect, Spent
from camserve_server.types import Box, Limits, ModelInfo, Pass, Pixels, Preprocess, Row

PIXELWISE_TOP = 0.99  # quantile of a map of the input's pixels that has the strongest colour: Smilkov et al. 2017


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
        self, request: explain_pb2.ExplainRequest, *, deadline: float = math.inf, wait: bool = False
    ) -> explain_pb2.ExplainResponse:
        """Explain one image.

        Args:
            request: as it came.
            deadline: on the event loop's clock.
            wait: for room in the queue, rather than be refused.

        Raises:
            ServiceError: whatever was wrong.
        """
        order = wire.read_order(request, self.models, self.limits)
        render.colormap(order.rendering.colormap)
        async with self.batcher.admit(order.job.rows, wait=wait):
            return await self._explain(order, deadline)

    async def _explain(self, order: wire.Order, deadline: float) -> explain_pb2.ExplainResponse:
        run = asyncio.get_running_loop().run_in_executor
        clock, spent = time.perf_counter, Spent()

        async def submit(pass_: Pass, rows: Sequence[Row], collect: Collect) -> None:
            spent.add(await self.batcher.submit(pass_, rows, collect, deadline))

        began = clock()
        photo, image, seen = await run(self.threads, _see, order.image, order.job.model.preprocess, self.limits)
        decoded = clock()
        outcome = await jobs.explain(order.job, image, submit)
        computed = clock()
        response = await run(self.threads, _draw, order, photo, seen, outcome)
        response.timing.decode_ms = 1e3 * (decoded - began)
        response.timing.queue_ms = 1e3 * spent.queue
        response.timing.compute_ms = 1e3 * spent.compute
        response.timing.render_ms = 1e3 * (clock() - computed)
        response.timing.batch_rows = spent.batch_rows
        return response


def _see(data: bytes, preprocess: Preprocess, limits: Limits) -> tuple[Pixels, Pixels, Box]:
    photo = images.decode(data, limits)
    return photo, *images.fit(photo, preprocess)


def _draw(order: wire.Order, photo: Pixels, seen: Box, outcome: jobs.Outcome) -> explain_pb2.ExplainResponse:
    answers = []
    for finding in outcome.findings:
        top = 1.0 if finding.layer else PIXELWISE_TOP
        overlay, alone = render.draw(photo, finding.heatmap, seen, order.rendering, top)
        answers.append(wire.Answer(finding, order.rendering.heatmap, overlay, alone))
    size = (photo.shape[0], photo.shape[1])
    return wire.explain_response(order.job.model, outcome.logits, order.predictions, answers, size, seen)
