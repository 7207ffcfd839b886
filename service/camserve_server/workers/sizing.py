"""Measure how much GPU memory one input takes, with a batch of each kind of pass."""

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from camserve_server.core.errors import OutOfMemory
from camserve_server.engine.values import Row
from camserve_server.jobs.footprint import typical
from camserve_server.methods.values import MethodCall
from camserve_server.models.values import Kind, ModelInfo, Pass
from camserve_server.targets import anything

log = logging.getLogger(__name__)

BATCH_SIZES = 8, 1
"""Inputs in the measured batch: several, because the memory of one is mostly the libraries'; one if 8 do not fit."""

METHODS: Mapping[Kind, str] = {
    "score": "",
    "cam": "gradcam",
    "curvature": "shapleycam",
    "saliency": "saliency",
    "guided": "guided_backprop",
    "deconvnet": "deconvnet",
    "attention": "attention_rollout",
    "each": "legrad",
    "last": "gradeclip",
    "bias": "fullgrad",
    "features": "",
    "heads": "",
}
"""A method of each kind of pass. "inspect" is missing, because it runs one input after another; "text" and "classifier"
have no images."""

Peak = Callable[[Pass, Sequence[Row]], int]
"""Function that runs a batch, and returns by how many bytes the memory in use rose at most."""


def row_bytes(info: ModelInfo, name: str, peak: Peak) -> dict[Kind, int]:
    """Return how many bytes one input takes in each kind of pass that the model can run.

    Args:
        info: description of the model.
        name: name of the model in rows.
        peak: function that measures a batch.
    """
    return {kind: size for kind in METHODS if (size := _measure(info, typical(info, kind, name), peak))}


def _measure(info: ModelInfo, pass_: Pass, peak: Peak) -> int:
    for count in BATCH_SIZES:
        try:
            peak(
                pass_, rows_of(info, pass_.kind, 1)
            )  # memory that is allocated on first use, and stays, does not count
            return peak(pass_, rows_of(info, pass_.kind, count)) // count
        except OutOfMemory:
            continue
        except Exception as error:  # noqa: BLE001 -- any error of a model without attention, or without second derivatives
            log.debug("model %s: no %s pass was measured: %s", info.name, pass_.kind, error)
            break
    return 0


def rows_of(info: ModelInfo, kind: Kind, count: int) -> list[Row]:
    """Return rows with an image each, since rows with the same image share an input."""
    calls = (MethodCall(METHODS[kind]),) if METHODS[kind] else ()
    shape = (*info.preprocess.size, info.channels)
    return [Row(np.full(shape, 128, np.uint8), anything(info), calls) for _ in range(count)]
