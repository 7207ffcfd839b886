"""The passes down to the input: the score's gradient there, by the chain rule or by another rule for each ReLU."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from camserve_server.engine.batch import differentiated, forward, in_order, inputs_of, units_of
from camserve_server.engine.relu import relu_rule
from camserve_server.engine.values import Row, RowResult
from camserve_server.methods import Saliency, method_of
from camserve_server.models import LoadedModel
from camserve_server.models.values import Pass


def run(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
    """Run one batch: one forward pass, and one backward pass a turn."""
    units = units_of(rows)
    # In one memory format, that of the other libraries: each has kernels that round in their own way, and where
    # rounding moves a value across a ReLU's zero the gradient jumps.
    copies = inputs_of(model.info, units.rows).contiguous().requires_grad_()
    results: dict[int, RowResult] = {}
    images = _images(model, units.rows)
    with torch.enable_grad(), relu_rule(pass_.kind):
        outputs = forward(model, copies.clone())  # a model may change its input in place, but not a leaf
        for turn in differentiated(outputs, units, rows):
            gradients = _taken(copies)
            mine = [(rows[index], unit) for index, unit in zip(turn.rows, turn.units, strict=True)]
            terms = [_term(row, images[_image_key(row)], copies[unit].detach(), gradients[unit]) for row, unit in mine]
            answers, (alive, *maps) = turn.read([gradients.flatten(1).any(1)[turn.at], *terms])
            results |= answers.single_maps(maps, alive.tolist())
    return in_order(results)


def _images(model: LoadedModel, rows: Sequence[Row]) -> dict[Hashable, Tensor]:
    """Return what the rows' inputs are copies of; most rows of a batch have one."""
    distinct = {_image_key(row): Row(row.image, row.target, views=row.views) for row in rows}
    return dict(zip(distinct, inputs_of(model.info, list(distinct.values())), strict=True))


def _image_key(row: Row) -> Hashable:
    return id(row.image), row.views


def _term(row: Row, image: Tensor, copy: Tensor, gradient: Tensor) -> Tensor:
    """Return what one copy adds to its method's mean."""
    call = row.calls[0]
    method = method_of(Saliency, call.name)
    return method.term(image, copy, gradient, row.copy or 0, **call.parameters)


def _taken(leaf: Tensor) -> Tensor:
    """Take a leaf's gradient away, so that the next backward pass starts from nothing."""
    gradient, leaf.grad = leaf.grad, None
    return torch.zeros_like(leaf) if gradient is None else gradient
