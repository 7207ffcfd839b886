"""The only caller of a model: rows in, logits and raw maps out, all of them plain values.

A batch is one forward pass over the distinct inputs in it, and one backward pass for each further target that an input
has, so that many methods and targets of one image share all that they can.

It may import `metrics` and the rooms below.
"""

from collections.abc import Callable, Mapping, Sequence

from camserve_server.core.devices import device_of
from camserve_server.core.errors import OutOfMemory
from camserve_server.engine import attention, bias, cam, inspection, saliency, score
from camserve_server.engine.inputs import normalise, viewed
from camserve_server.engine.values import Row, RowResult
from camserve_server.models import LoadedModel
from camserve_server.models.randomise import randomised
from camserve_server.models.values import Kind, Pass

RUNS: Mapping[Kind, Callable[[LoadedModel, Pass, Sequence[Row]], list[RowResult]]] = {
    "score": score.run,
    "cam": cam.run,
    "curvature": cam.run_curvature,
    "saliency": saliency.run,
    "guided": saliency.run,
    "deconvnet": saliency.run,
    "attention": attention.run,
    "each": attention.run_each,
    "bias": bias.run,
    "inspect": inspection.run,
    "features": inspection.run_features,
}
"""What runs a batch of each kind."""


class Engine:
    """Runs batches, one at a time, on the models it was given.

    Args:
        models: by name, all on one device; no other engine may have the same. More may come, and some go, meanwhile.
        device: that they are on; if not given, that of the first.
        shares_device: whether other engines may work on that device at the same time: it then has a stream of its own.
    """

    def __init__(self, models: Mapping[str, LoadedModel], *, device: str = "", shares_device: bool = False) -> None:
        self._models = models
        self._device = device_of(device or next(iter(models.values())).info.device)
        self._context = self._device.context(own_stream=shares_device)

    def run(self, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
        """Run one batch.

        Args:
            pass_: what the rows have in common.
            rows: at least one; those of one image hold the same array.

        Returns:
            A result for each row, in their order.

        Raises:
            OutOfMemory: the batch is too large for the device.
            ServiceError: a row cannot be computed; which one, running them apart will tell.
        """
        try:
            model = self._models[pass_.model]
            with self._context, model.evaluation_mode(), randomised(model, pass_.randomised):
                return RUNS[pass_.kind](model.for_pass(pass_), pass_, rows)
        except Exception as error:
            if not self._device.is_out_of_memory(error):
                raise
        # Not raised inside of the block: an error that led to ours would hold the tensors that fill the memory.
        raise OutOfMemory("the device has no memory for this", retry_after=1.0)


__all__ = ["RUNS", "Engine", "normalise", "viewed"]
