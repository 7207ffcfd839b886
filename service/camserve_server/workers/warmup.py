"""The first batches of a model, run while it is loaded, so that no request pays for what is made on first use."""

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
"""Runs a batch on the model, and raises what the engine raises."""


def warm_up(run: Run, name: str, info: ModelInfo) -> None:
    """Run one row of Grad-CAM and one of saliency: enough on a CPU."""
    for kind in KINDS[:2]:
        run(typical(info, kind, name), rows_of(info, kind, 1))


def warm_up_all_sizes(run: Run, name: str, info: ModelInfo, max_rows: int) -> None:
    """Run batches of 1, 2, 4, … rows: a GPU loads kernels and plans convolutions for each size.

    Where memory ends before, the log tells the size, and larger batches of that kind are not tried.

    Args:
        run: runs a batch.
        name: by which it knows the model.
        info: of the model.
        max_rows: of the largest batch.

    Raises:
        OutOfMemory: there is not enough memory for one row.
    """
    for kind in KINDS:
        fit = 0
        for size in _sizes(max_rows):
            try:
                run(typical(info, kind, name), rows_of(info, kind, size))
            except OutOfMemory:
                if not fit:
                    raise
                words = "model %s: memory is enough for %d images in a batch of %s, and not for %d"
                log.warning(words, info.name, fit, kind, size)
                break
            fit = size


def _sizes(most: int) -> Iterator[int]:
    """Yield the powers of two below a size, and the size."""
    yield from (1 << power for power in range((most - 1).bit_length()))
    yield most
