"""Warm-up: run the first batches of a model while it is loaded, so that no request pays the cost of first use."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from camserve_server.core.errors import OutOfMemory
from camserve_server.engine.values import Row
from camserve_server.jobs.footprint import typical
from camserve_server.models.values import Kind, ModelInfo, Pass
from camserve_server.workers.sizing import rows_of

log = logging.getLogger(__name__)

KINDS: tuple[Kind, ...] = ("cam", "saliency", "score")
"""Kinds of pass that most requests need."""

Run: TypeAlias = Callable[[Pass, Sequence[Row]], object]
"""Function that runs a batch on the model, and raises the errors of the engine."""


def warm_up(run: Run, name: str, info: ModelInfo) -> None:
    """Run one row of Grad-CAM and one of saliency, which is enough on a CPU, or of scores for a model without these."""
    for kind in dict.fromkeys((info.usual_pass, "saliency" if info.differentiable else "score")):
        run(typical(info, kind, name), rows_of(info, kind, 1))


def warm_up_all_sizes(run: Run, name: str, info: ModelInfo, max_rows: int) -> None:
    """Run batches of 1, 2, 4, … rows, because a GPU loads kernels and plans convolutions for each size.

    When a batch runs out of memory, its size is logged, and larger batches of that kind are not tried.

    Args:
        run: function that runs a batch.
        name: name of the model in rows.
        info: description of the model.
        max_rows: number of rows in the largest batch.

    Raises:
        OutOfMemory: a single row does not fit in memory.
    """
    for kind in (kind for kind in KINDS if _can_run(info, kind)):
        fitting = 0
        for size in _sizes(max_rows):
            try:
                run(typical(info, kind, name), rows_of(info, kind, size))
            except OutOfMemory:
                if not fitting:
                    raise
                message = "model %s: memory is enough for %d images in a batch of %s, and not for %d"
                log.warning(message, info.name, fitting, kind, size)
                break
            fitting = size


def _can_run(info: ModelInfo, kind: Kind) -> bool:
    return bool(info.default_layer) if kind == "cam" else kind != "saliency" or info.differentiable


def _sizes(max_rows: int) -> Iterator[int]:
    """Yield the powers of two below a size, and the size."""
    yield from (1 << power for power in range((max_rows - 1).bit_length()))
    yield max_rows
