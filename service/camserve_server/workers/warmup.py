"""The first batches of a model, run while it is loaded, so that no request pays for what is made on first use."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from camserve_server.errors import OutOfMemory
from camserve_server.targets import anything
from camserve_server.types import MethodCall, ModelInfo, Pass, Row

log = logging.getLogger(__name__)

Run: TypeAlias = Callable[[Pass, Sequence[Row]], object]
"""Runs a batch on the model, and raises what the engine raises."""


def warm_up(run: Run, name: str, info: ModelInfo) -> None:
    """Run one row of Grad-CAM and one of saliency: enough on a CPU."""
    for pass_, call in _passes(name, info)[:2]:
        run(pass_, _rows(info, call, 1))


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
    for pass_, call in _passes(name, info):
        fit = 0
        for size in _sizes(max_rows):
            try:
                run(pass_, _rows(info, call, size))
            except OutOfMemory:
                if not fit:
                    raise
                words = "model %s: memory is enough for %d images in a batch of %s, and not for %d"
                log.warning(words, info.name, fit, pass_.kind, size)
                break
            fit = size


def _passes(name: str, info: ModelInfo) -> list[tuple[Pass, tuple[MethodCall, ...]]]:
    """Return the kinds of pass that most requests need, and the methods of their rows."""
    size = info.preprocess.size
    return [
        (Pass(name, "cam", size, (info.default_layer,)), (MethodCall("gradcam"),)),
        (Pass(name, "saliency", size), (MethodCall("saliency"),)),
        (Pass(name, "score", size), ()),
    ]


def _sizes(most: int) -> Iterator[int]:
    """Yield the powers of two below a size, and the size."""
    yield from (1 << power for power in range((most - 1).bit_length()))
    yield most


def _rows(info: ModelInfo, calls: tuple[MethodCall, ...], count: int) -> list[Row]:
    """Return rows of different images: those of one image would share an input."""
    images = [np.full((*info.preprocess.size, 3), 128, np.uint8) for _ in range(count)]
    return [Row(image, anything(info), calls) for image in images]
