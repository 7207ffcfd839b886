"""Evaluate explanations: explain one image, and rate every map by metrics."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from camserve_server import jobs
from camserve_server.imaging import render
from camserve_server.serving import memory
from camserve_server.serving.explain import Pipeline
from camserve_server.serving.photos import PreparedPhoto
from camserve_server.serving.replies import UntilSent
from camserve_server.serving.requests import EvaluateRequest
from camserve_server.serving.results import ExplainResult

T = TypeVar("T")


async def evaluate(
    pipeline: Pipeline,
    request: EvaluateRequest,
    until_sent: UntilSent,
    *,
    encode: Callable[[ExplainResult], T],
    deadline: float = math.inf,
) -> tuple[T, jobs.Readings]:
    """Explain one image, and evaluate every map.

    Args:
        pipeline: runs the request.
        request: the explanations to compute, and the metrics to evaluate them by.
        until_sent: stack that the caller closes when the reply is sent, to release the reply's memory.
        encode: makes the reply from the explanations; called in the thread that drew the last picture.
        deadline: time on the event loop's clock after which no row of the request starts.

    Returns:
        The encoded reply; and for each explanation, one reading of each metric.

    Raises:
        ServiceError: the request was refused, or failed; its field is one of the request to explain.
    """
    job = request.explain.job
    chunk = pipeline.chunk(job, edits=True)
    readings: jobs.Readings = []

    async def compute(photo: PreparedPhoto, submit: jobs.Submit) -> jobs.JobResult:
        assessment = replace(request.assessment, job=photo.job)
        result, job_readings = await jobs.evaluate(
            assessment, photo.image, photo.seen, submit, chunk=chunk, execute=pipeline.in_thread
        )
        readings.extend(job_readings)
        return result

    render.check_colormap(request.explain.rendering.colormap)  # an unknown name is refused before it costs anything
    rows = min(request.assessment.rows, chunk)
    size = rows * memory.row_bytes(job) + memory.map_bytes(job)
    async with (
        pipeline.hold(job.model, size) as accepted,
        pipeline.run(request.explain, compute, accepted, rows=rows, deadline=deadline) as explained,
    ):
        accepted.computed()
        await pipeline.reserve_reply(explained.reply_bytes, until_sent)
        return await pipeline.draw(explained, encode), readings
