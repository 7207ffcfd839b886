"""Test of whether a model gives an image the same output in any batch, and in any run.

The images of a batch may belong to several requests. A batch norm without running statistics, or a shift between the
images of a batch, makes the output for one image depend on the others. Such a model runs one image at a time. A dropout
that is always on, or state that a run changes, makes the output depend on the run, which only its author can mend.

The probe of the layers runs an image alone and in a batch, so the first comparison costs no run. Rounding may differ,
and by it a detector may choose other objects. So modules that differ run again, in float64.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from camserve_server.models import faults
from camserve_server.models.hooks import first_tensor
from camserve_server.models.layout_probe import PLAIN

SUSPICIOUS = 1e-3
"""Difference, as a share of the largest value, from which a module is suspected."""

CERTAIN = 1e-6
"""Difference in float64, as a share of the largest value, that is too large for a rounding error."""

CERTAIN_IN_FLOAT32 = 1e-2
"""The same in float32, for a model that does not run in float64."""


@dataclass(frozen=True, slots=True)
class Dependence:
    """Things that the output for an image depends on, besides the image; each is empty if it does not.

    Attributes:
        mates: why the model runs one image at a time.
        run: the module whose output differs between two runs.
    """

    mates: str = ""
    run: str = ""


def differs(alone: Tensor | None, together: Tensor | None, share: float = SUSPICIOUS) -> bool:
    """Return whether an output for an image [1,...] is another one in a batch [B,...] or in another run.

    Args:
        alone: the output for the image.
        together: the output for the batch, in which the image has the index `PLAIN`; or [1,...] for it alone.
        share: the largest difference of equal outputs, as a share of the largest value.
    """
    if alone is None or together is None or not alone.is_floating_point():
        return False
    if alone.shape[:1] != (1,) or not len(together) or alone.shape[1:] != together.shape[1:]:
        return False  # no batch axis, such as windows, or other objects
    row = together[PLAIN if len(together) > PLAIN else 0]
    return bool(_largest(row - alone[0]) > share * _largest(alone))


def _largest(values: Tensor) -> Tensor:
    """Return the largest magnitude of the finite values; 0 without any."""
    if not values.numel():
        return torch.tensor(0.0)
    least, greatest = torch.aminmax(values)  # a third of the time of the last line
    largest = torch.maximum(-least, greatest)
    return largest if largest.isfinite() else values.abs().nan_to_num(0, 0, 0).max()


def confirm(model: nn.Module, image: Tensor) -> Dependence:
    """Run a suspected model again: on an image alone, once more, and in a batch of very different images.

    Args:
        model: the model.
        image: an image [1,C,H,W].
    """
    mate = 0.5 - 0.3 * image.flip(-1)
    with torch.random.fork_rng(devices=[]):
        try:
            exact = copy.deepcopy(model).double()
            runs, certain = _three_runs(exact, image.double(), mate.double()), CERTAIN
        except Exception:  # noqa: BLE001 -- a user's module may raise anything, such as one that is written for float32
            runs, certain = _three_runs(model, image, mate), CERTAIN_IN_FLOAT32
    first, again, together = runs
    for name, output in first.items():
        if differs(output, again.get(name), certain):
            return Dependence(run=faults.words_of(model, name))
        if differs(output, together.get(name), certain):
            words = (
                f"the output of {faults.words_of(model, name)} for an image depends on the other images of its batch"
            )
            return Dependence(mates=words)
    return Dependence()


def _three_runs(model: nn.Module, image: Tensor, mate: Tensor) -> Sequence[Mapping[str, Tensor]]:
    return [_outputs(model, images) for images in (image, image, torch.cat([mate, image, -mate]))]


def _outputs(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return each module's last output, and the model's own as "", for the image at `PLAIN` or the only one."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, output: object) -> None:
        if (tensor := first_tensor(output)) is not None and tensor.shape[:1] == images.shape[:1]:
            outputs.pop(name, None)
            place = PLAIN if len(images) > PLAIN else 0
            outputs[name] = tensor[place : place + 1].clone()  # a later module may change it in place

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for name, module in model.named_modules():
            if name:
                stack.enter_context(module.register_forward_hook(lambda _m, _i, out, name=name: keep(name, out)))
        keep("", model(images.clone()))
    return outputs
