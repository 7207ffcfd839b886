"""Run passes down to the input: the score's gradient there, by the chain rule or another rule for each ReLU."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from camserve_server.engine.batch import (
    find_unique_inputs,
    forward,
    in_row_order,
    make_inputs,
    run_backward_passes,
)
from camserve_server.engine.relu import relu_rule
from camserve_server.engine.values import Row, RowResult
from camserve_server.methods import Saliency, method_of
from camserve_server.models import LoadedModel
from camserve_server.models.values import Pass


def run(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
    """Run one batch: one forward pass, then the backward passes."""
    unique = find_unique_inputs(rows)
    # Contiguous, as in other libraries: kernels of each memory format round differently, and where rounding moves a
    # value across a ReLU's zero, the gradient jumps.
    copies = make_inputs(model.info, unique.rows).contiguous().requires_grad_()
    results: dict[int, RowResult] = {}
    images = _images(model, unique.rows)
    with torch.enable_grad(), relu_rule(pass_.kind):
        # A clone: a model may change its input in place, which autograd forbids for a leaf.
        outputs = forward(model, copies.clone())
        for backward in run_backward_passes(outputs, unique, rows):
            gradients = _take_gradient(copies)
            pass_rows = [(rows[row], index) for row, index in zip(backward.rows, backward.inputs, strict=True)]
            terms = [
                _term(row, images[_image_key(row)], copies[index].detach(), gradients[index])
                for row, index in pass_rows
            ]
            pass_results, (nonzero, *maps) = backward.fetch([gradients.flatten(1).any(1)[backward.at], *terms])
            results |= pass_results.single_map_results(maps, nonzero.tolist())
    return in_row_order(results)


def _images(model: LoadedModel, rows: Sequence[Row]) -> dict[Hashable, Tensor]:
    """Return the normalised images that the rows' inputs are copies of; most rows of a batch share one."""
    distinct = {_image_key(row): Row(row.image, row.target, views=row.views) for row in rows}
    return dict(zip(distinct, make_inputs(model.info, list(distinct.values())), strict=True))


def _image_key(row: Row) -> Hashable:
    return id(row.image), row.views


def _term(row: Row, image: Tensor, copy: Tensor, gradient: Tensor) -> Tensor:
    """Return the term that one copy adds to its method's mean."""
    call = row.calls[0]
    method = method_of(Saliency, call.name)
    return method.term(image, copy, gradient, row.copy or 0, **call.parameters)


def _take_gradient(leaf: Tensor) -> Tensor:
    """Return a leaf's gradient and clear it, since the next backward pass would add to it."""
    gradient, leaf.grad = leaf.grad, None
    return torch.zeros_like(leaf) if gradient is None else gradient
