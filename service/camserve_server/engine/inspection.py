"""Run passes that inspect layers: statistics of every layer, or the feature maps of some."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from camserve_server.engine.batch import (
    find_unique_inputs,
    forward,
    in_row_order,
    make_inputs,
    recording_gradients,
    run_backward_passes,
)
from camserve_server.engine.cam import take_tensors
from camserve_server.engine.values import Reading, Row, RowResult, Statistics
from camserve_server.models import LoadedModel
from camserve_server.models.hooks import capture_layers, observe_layers
from camserve_server.models.values import Pass

ALL_ZERO = Statistics(mean=0.0, std=0.0, minimum=0.0, maximum=0.0, zeros=1.0, norm=0.0, non_finite=0)
"""Statistics of a gradient that is zero everywhere."""


def run(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
    """Measure the pass's layers, or all layers, for each row: one forward and one backward pass each.

    Rows run one by one, for two reasons: the graph of a whole network is large; and the statistics of an output are
    those of one image, whichever of its axes the batch is.
    """
    return [_inspect(model, pass_.layers or tuple(model.info.layers), row) for row in rows]


@dataclass(frozen=True, slots=True)
class _LayerRecorder:
    """Measures the outputs and gradients of layers as soon as they are there, so that no tensor is kept.

    Attributes:
        last: statistics of the last call of every layer, by name.
    """

    last: dict[str, Reading] = field(default_factory=dict)

    def observe(self, name: str, output: Tensor) -> Callable[[Tensor], None]:
        """Measure a layer's output; return a function that measures the gradient at it."""
        self.last[name] = reading = Reading(tuple(output.shape), measure(output), ALL_ZERO)

        def observe_gradient(gradient: Tensor) -> None:
            if self.last[name] is reading:  # otherwise the layer was called again later
                self.last[name] = replace(reading, gradient=measure(gradient))

        return observe_gradient


def _inspect(model: LoadedModel, names: tuple[str, ...], row: Row) -> RowResult:
    recorder = _LayerRecorder()
    layers = {name: model.module.get_submodule(name) for name in names}
    with recording_gradients(model.info, layers), observe_layers(layers, recorder.observe):
        outputs = forward(model, make_inputs(model.info, [row]))
        (backward,) = run_backward_passes(outputs, find_unique_inputs([row]), [row])
    pass_results, _ = backward.fetch([])
    return pass_results.row_result(0, (), (), readings=tuple(map(recorder.last.get, names)))


def measure(values: Tensor) -> Statistics:
    """Return statistics of a tensor; sums are taken in float64.

    Args:
        values: the tensor, of any shape, with at least one value.
    """
    flat = values.flatten().float()
    finite, reduced = flat, _reduce(flat)
    # If a value is NaN, torch's minimum and maximum are NaN too.
    if not (math.isfinite(reduced.minimum) and math.isfinite(reduced.maximum)):
        finite = flat[flat.isfinite()]
        if not finite.numel():
            nan = math.nan
            return Statistics(nan, nan, nan, nan, zeros=0.0, norm=nan, non_finite=flat.numel())
        reduced = _reduce(finite)
    count = finite.numel()
    return Statistics(
        mean=reduced.total / count,
        std=reduced.deviation / math.sqrt(count),
        minimum=reduced.minimum,
        maximum=reduced.maximum,
        zeros=(count - reduced.nonzero) / flat.numel(),
        norm=reduced.norm,
        non_finite=flat.numel() - count,
    )


class _Reduced(NamedTuple):
    """Reductions of values.

    Attributes:
        minimum: the minimum.
        maximum: the maximum.
        total: the sum.
        norm: square root of the sum of squares.
        deviation: norm of the differences from the mean.
        nonzero: number of the values that are not zero.
    """

    minimum: float
    maximum: float
    total: float
    norm: float
    deviation: float
    nonzero: float


def _reduce(values: Tensor) -> _Reduced:
    # Measured on a CPU: one copy in float64 is twice as fast as sums that convert each value, and counting a mask is
    # fifteen times as fast as counting the values themselves.
    nonzero = (values != 0).count_nonzero().double()
    wide, extremes = values.double(), [extreme.double() for extreme in values.aminmax()]
    total, norm = wide.sum(), torch.linalg.vector_norm(wide)
    deviation = torch.linalg.vector_norm(wide.sub_(total / values.numel()))
    reduced = torch.stack((*extremes, total, norm, deviation, nonzero))
    return _Reduced(*reduced.tolist())  # a GPU is waited for only here


def run_features(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
    """Run one batch; return each row's feature maps, and each channel's mean gradient over the grid.

    α_k = 1/Z Σ_ij ∂y/∂A_k,ij: Selvaraju et al. 2017, equation 1.
    """
    unique = find_unique_inputs(rows)
    layers = {name: model.module.get_submodule(name) for name in pass_.layers}
    results: dict[int, RowResult] = {}
    with recording_gradients(model.info, layers), capture_layers(layers) as captures:
        outputs = forward(model, make_inputs(model.info, unique.rows))
        for backward in run_backward_passes(outputs, unique, rows):
            layer_tensors = [take_tensors(model.info, captures, name, backward.at) for name in pass_.layers]
            tensors = [(layer.nonzero, layer.gradients.mean((2, 3)), layer.activations) for layer in layer_tensors]
            pass_results, arrays = backward.fetch([tensor for layer in tensors for tensor in layer])
            nonzero, weights, maps = arrays[0::3], arrays[1::3], arrays[2::3]
            for position, index in enumerate(backward.rows):
                results[index] = pass_results.row_result(
                    position,
                    tuple((layer[position],) for layer in weights),
                    tuple(not layer[position] for layer in nonzero),
                    tuple(layer[position] for layer in maps),
                )
    return in_row_order(results)
