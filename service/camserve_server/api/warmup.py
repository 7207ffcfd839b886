"""Warm-up of the server's own process: a request on which no model runs, so that the first caller does not wait longer.

Workers run the first batches of a model while it is loaded. In this process, the first request starts a thread, fills
caches, looks up the versions for receipts and initialises the JPEG codec: 25 ms of processor time, and 11 ms later on.
"""

import io
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from camserve.v1 import explain_pb2
from camserve_server.api import codec
from camserve_server.engine.values import Row, RowResult
from camserve_server.imaging.channels import RGB
from camserve_server.imaging.opencv import cv2
from camserve_server.models.values import ModelInfo, Pass
from camserve_server.serving.replies import UntilSent
from camserve_server.targets.values import ClassTarget

if TYPE_CHECKING:
    from camserve_server.scheduling import Batcher, Collect
    from camserve_server.serving.explain import Pipeline

log = logging.getLogger(__name__)

SIDES = 64, 80  # height and width of the photo


async def warm_up(pipeline: "Pipeline") -> None:
    """Explain a grey photo with the first classifier, without its worker; log any error instead of raising it."""
    loaded = (model for model in pipeline.models.values() if isinstance(model, ModelInfo))
    model = next((model for model in loaded if model.task == "classify"), None)
    if model is None:
        return
    try:
        await _explain(replace(pipeline, batcher=cast("Batcher", _Answers(model))), model)
    except Exception:
        log.exception("the server's warm-up failed")


async def _explain(pipeline: "Pipeline", model: ModelInfo) -> None:
    rendering = explain_pb2.Rendering(overlay=explain_pb2.IMAGE_FORMAT_JPEG, heatmap=True)
    message = explain_pb2.ExplainRequest(model=model.name, image=_grey_photo(model.channels), rendering=rendering)
    request = codec.read_explanation(message, pipeline.models, pipeline.limits)
    with UntilSent() as until_sent:
        reply = await pipeline.explain(request, until_sent, encode=partial(codec.explain_response, request))
        reply.SerializeToString()


def _grey_photo(channels: int) -> bytes:
    """Return a photo as a file: a JPEG, which is what most callers send, if it can have these channels."""
    photo = np.full((*SIDES, channels), 128, np.uint8)
    if channels == RGB:
        return cv2.imencode(".jpg", photo)[1].tobytes()
    file = io.BytesIO()
    np.save(file, photo)
    return file.getvalue()


class _Answers:
    """Batcher that answers every row by itself, and counts none.

    Args:
        model: the model of the rows.
    """

    largest = 2**20  # more than the warm-up's request takes

    def __init__(self, model: ModelInfo) -> None:
        self._model = model

    @asynccontextmanager
    async def admit(self, _rows: int, **_: object) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def reserve(self, _size: int, **_: object) -> AsyncIterator[None]:
        yield

    async def submit(self, pass_: Pass, rows: Sequence[Row], collect: "Collect", *_: object) -> None:
        logits = np.zeros(self._model.classes, np.float32)
        layouts = [self._model.layers[name].layout for name in pass_.layers]
        grids = [(layout.height, layout.width) if layout else pass_.size for layout in layouts]
        for index, row in enumerate(rows):
            maps = tuple(tuple(np.ones(grid, np.float32) for _ in row.calls) for grid in grids)
            collect(index, RowResult(logits, ClassTarget(0), 0.0, maps, (False,) * len(grids)))
