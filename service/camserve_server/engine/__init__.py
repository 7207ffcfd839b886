"""The only caller of a model: rows in, logits and raw maps out, all of them plain values.

A batch is one forward pass over the distinct inputs in it, and one backward pass for each further target that an input
has, so that many methods and targets of one image share all that they can.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from camserve_server.engine import attention, bias, cam, saliency, score, xray
from camserve_server.engine.inputs import normalise, viewed
from camserve_server.errors import OutOfMemory
from camserve_server.models import LoadedModel
from camserve_server.models.randomise import randomised
from camserve_server.types import Kind, Pass, Row, RowResult

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
    "inspect": xray.run,
    "features": xray.run_features,
}
"""What runs a batch of each kind."""


class Engine:
    """Runs batches, one at a time, on the models it was given.

    Args:
        models: by name, all on one device; no other engine may have the same. More may come, and some go, meanwhile.
        device: that they are on; if not given, that of the first.
        beside: whether other engines may work on that device at the same time.
    """

    def __init__(self, models: Mapping[str, LoadedModel], *, device: str = "", beside: bool = False) -> None:
        self._models = models
        self._place = _place(device or next(iter(models.values())).info.device, beside=beside)

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
            with self._place, randomised(model, pass_.randomised):
                return RUNS[pass_.kind](model.serving(pass_), pass_, rows)
        except torch.OutOfMemoryError:
            pass  # raised again below: an error that led to ours would hold the tensors that fill the memory
        raise OutOfMemory("the device has no memory for this", retry_after=1.0)


def _place(device: str, *, beside: bool) -> AbstractContextManager[object]:
    """Return a context that can be entered again and again, in which torch computes on a device.

    Beside other engines in a stream of its own, so that none waits for what another has asked of the same GPU.
    """
    if device == "cpu":
        return nullcontext()
    if not beside:
        return torch.cuda.device(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not declare it
    stream.wait_stream(torch.cuda.default_stream(device))  # in which the models were made
    return torch.cuda.stream(stream)


__all__ = ["RUNS", "Engine", "normalise", "viewed"]
