"""Run batches of rows on a model, and return logits and raw maps as plain values. No other package calls a model.

A batch runs one forward pass over its distinct inputs, and as many backward passes as one input has rows at most. Eight
of these passes run together if only a small head follows the layer (`joined`). So the methods and targets of one image
share as much as possible: ten classes by five CAMs cost 1.34 times one class by Grad-CAM (resnet50, float32). Rows that
silence channels of a layer share everything up to the layer (`score`).

This package may import `metrics` and the packages below.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from camserve_server.core.devices import device_for
from camserve_server.core.errors import FailedPrecondition, OutOfMemory, ServiceError
from camserve_server.engine import (
    attention,
    bias,
    cam,
    classifier,
    heads,
    inspection,
    last_attention,
    saliency,
    score,
    text,
)
from camserve_server.engine.batch import find_unique_inputs, in_row_order
from camserve_server.engine.inputs import apply_view, normalise
from camserve_server.engine.values import Row, RowResult
from camserve_server.models import LoadedModel, faults
from camserve_server.models.interventions import intervene
from camserve_server.models.randomise import random_weights
from camserve_server.models.values import Kind, Pass

log = logging.getLogger(__name__)

RUNS: Mapping[Kind, Callable[[LoadedModel, Pass, Sequence[Row]], list[RowResult]]] = {
    "score": score.run,
    "cam": cam.run,
    "curvature": cam.run_curvature,
    "saliency": saliency.run,
    "guided": saliency.run,
    "deconvnet": saliency.run,
    "attention": attention.run,
    "each": attention.run_each,
    "last": last_attention.run,
    "bias": bias.run,
    "inspect": inspection.run,
    "features": inspection.run_features,
    "text": text.run,
    "heads": heads.run,
    "classifier": classifier.run,
}
"""The function that runs a batch, by the kind of its pass."""


class Engine:
    """Runs batches on models, one batch at a time.

    Args:
        models: models by name, all on one device and used by no other engine. The mapping may change at any time.
        device: the device of the models; empty for that of the first one.
        shares_device: True if other engines use the device at the same time: this one then has its own stream.
    """

    def __init__(self, models: Mapping[str, LoadedModel], *, device: str = "", shares_device: bool = False) -> None:
        self._models = models
        self._device = device_for(device or next(iter(models.values())).info.device)
        self._context = self._device.context(own_stream=shares_device)

    def run(self, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
        """Run one batch.

        Args:
            pass_: the pass that all rows share.
            rows: at least one row; rows of one image must hold the same array.

        Returns:
            The result of each row, in the order of the rows.

        Raises:
            OutOfMemory: the batch is too large for the device.
            ServiceError: a row cannot be computed, also because the model's own code raises an error; run the rows one
                by one to find out which.
        """
        model = self._models[pass_.model]
        try:
            # Before the hooks of the captures: they capture what an intervention has changed.
            changes = intervene(model, pass_.interventions) if pass_.interventions else nullcontext()
            with self._context, model.evaluation_mode(), random_weights(model, pass_.randomised), changes:
                run = partial(RUNS[pass_.kind], model.for_pass(pass_), pass_)
                return run(rows) if model.info.independent_rows else _run_alone(run, rows)
        except ServiceError:
            raise
        except Exception as error:
            if not self._device.is_out_of_memory(error):
                place = faults.place_of(error, model.for_pass(pass_).module)
                if not place:
                    raise
                words = f"{model.info.name} failed in {place}: {faults.message_of(error)}"
                if len(rows) == 1:  # of several, each will be run alone
                    log.warning("%s", words, exc_info=error)
                raise FailedPrecondition(words) from None
        # Raised after the block: as the context of our error, torch's would keep the tensors that fill the memory.
        raise OutOfMemory("the device has no memory for this", retry_after=1.0)


def _run_alone(run: Callable[[Sequence[Row]], list[RowResult]], rows: Sequence[Row]) -> list[RowResult]:
    """Run the rows of each input in a batch of their own."""
    by_input: dict[int, list[int]] = {}
    for index, input_index in enumerate(find_unique_inputs(rows).input_of_row):
        by_input.setdefault(input_index, []).append(index)
    results: dict[int, RowResult] = {}
    for indices in by_input.values():
        results |= zip(indices, run([rows[index] for index in indices]), strict=True)
    return in_row_order(results)


__all__ = ["RUNS", "Engine", "apply_view", "normalise"]
