"""How much of a GPU's memory one input takes, measured with a batch of each kind of pass."""

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

INPUTS = 8, 1
"""Of the batch that is measured: several, as the memory of one alone is mostly the libraries'; one if these fit not."""

METHODS: Mapping[Kind, str] = {
    "score": "",
    "cam": "gradcam",
    "curvature": "shapleycam",
    "saliency": "saliency",
    "guided": "guided_backprop",
    "deconvnet": "deconvnet",
    "attention": "attention_rollout",
    "each": "legrad",
    "bias": "fullgrad",
    "features": "",
}
"""A method of each kind of pass. "inspect" is not among them: it runs one input after another."""

Peak = Callable[[Pass, Sequence[Row]], int]
"""Runs a batch, and returns by how many bytes the memory in use rose at most."""


def row_bytes(info: ModelInfo, name: str, peak: Peak) -> dict[Kind, int]:
    """Return how many bytes one input takes, by the kind of pass; a kind that the model cannot run is left out.

    Args:
        info: of the model.
        name: by which rows mean it.
        peak: measures a batch.
    """
    return {kind: found for kind in METHODS if (found := _measured(info, typical(info, kind, name), peak))}


def _measured(info: ModelInfo, pass_: Pass, peak: Peak) -> int:
    for count in INPUTS:
        try:
            peak(pass_, rows_of(info, pass_.kind, 1))  # what is made on first use, and then stays, is not the rows'
            return peak(pass_, rows_of(info, pass_.kind, count)) // count
        except OutOfMemory:
            continue
        except Exception as error:  # noqa: BLE001 -- whatever a model raises that has no attention, or no second derivative
            log.debug("model %s: no %s pass was measured: %s", info.name, pass_.kind, error)
            break
    return 0


def rows_of(info: ModelInfo, kind: Kind, count: int) -> list[Row]:
    """Return rows of as many images, since rows of one image share an input."""
    calls = (MethodCall(METHODS[kind]),) if METHODS[kind] else ()
    return [Row(np.full((*info.preprocess.size, 3), 128, np.uint8), anything(info), calls) for _ in range(count)]
