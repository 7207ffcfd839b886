"""The passes that look at layers for their own sake: what every one of them returns, and what one of them sees."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from camserve_server.engine.batch import differentiated, forward, in_order, inputs_of, units_of
from camserve_server.engine.cam import see
from camserve_server.engine.values import Reading, Row, RowResult, Statistics
from camserve_server.models import LoadedModel
from camserve_server.models.hooks import capture_layers, observe_layers
from camserve_server.models.values import Pass

NOTHING = Statistics(mean=0.0, std=0.0, minimum=0.0, maximum=0.0, zeros=1.0, norm=0.0, non_finite=0)
"""What a gradient is like that is zero everywhere."""


def run(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
    """Measure the pass's layers, or all of them, for each row: one forward pass and one backward pass each.

    Row by row, since the graph of a whole network is large; and so that every layer is its own image's alone, wherever
    in its output the batch may be.
    """
    return [_look(model, pass_.layers or tuple(model.info.layers), row) for row in rows]


@dataclass(frozen=True, slots=True)
class _Record:
    """What the last call of every layer was like: measured at once, so that no tensor need stay."""

    last: dict[str, Reading] = field(default_factory=dict)

    def glance(self, name: str, output: Tensor) -> Callable[[Tensor], None]:
        self.last[name] = reading = Reading(tuple(output.shape), measure(output), NOTHING)

        def take(gradient: Tensor) -> None:
            if self.last[name] is reading:  # else there was a later call
                self.last[name] = replace(reading, gradient=measure(gradient))

        return take


def _look(model: LoadedModel, names: tuple[str, ...], row: Row) -> RowResult:
    record = _Record()
    layers = {name: model.module.get_submodule(name) for name in names}
    with torch.enable_grad(), observe_layers(layers, record.glance):
        outputs = forward(model, inputs_of(model.info, [row]))
        (turn,) = differentiated(outputs, units_of([row]), [row])
    answers, _ = turn.read([])
    return answers.result(0, (), (), readings=tuple(map(record.last.get, names)))


def measure(values: Tensor) -> Statistics:
    """Say what a tensor's values are like; sums are taken in float64.

    Args:
        values: of any shape, at least one.
    """
    flat = values.flatten().float()
    finite, found = flat, _reduced(flat)
    if not (math.isfinite(found.least) and math.isfinite(found.greatest)):  # NaN is the least of whatever has one
        finite = flat[flat.isfinite()]
        if not finite.numel():
            nan = math.nan
            return Statistics(nan, nan, nan, nan, zeros=0.0, norm=nan, non_finite=flat.numel())
        found = _reduced(finite)
    number = finite.numel()
    return Statistics(
        mean=found.total / number,
        std=found.deviation / math.sqrt(number),
        minimum=found.least,
        maximum=found.greatest,
        zeros=(number - found.others) / flat.numel(),
        norm=found.norm,
        non_finite=flat.numel() - number,
    )


class _Reduced(NamedTuple):
    """The least of some values, the greatest, their sum, norm, norm about their mean, and how many are not zero."""

    least: float
    greatest: float
    total: float
    norm: float
    deviation: float
    others: float


def _reduced(values: Tensor) -> _Reduced:
    # Measured on a CPU: one copy in float64 is twice as fast as sums that convert as they go, and a mask counts fifteen
    # times as fast as the values themselves.
    others = (values != 0).count_nonzero().double()
    wide, extremes = values.double(), [one.double() for one in values.aminmax()]
    total, norm = wide.sum(), torch.linalg.vector_norm(wide)
    deviation = torch.linalg.vector_norm(wide.sub_(total / values.numel()))
    found = torch.stack((*extremes, total, norm, deviation, others))
    return _Reduced(*found.tolist())  # the only wait for the device


def run_features(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
    """Run one batch; of each row return the layers' feature maps and each channel's mean gradient over the grid.

    α_k = 1/Z Σ_ij ∂y/∂A_k,ij: Selvaraju et al. 2017, equation 1.
    """
    units = units_of(rows)
    layers = {name: model.module.get_submodule(name) for name in pass_.layers}
    results: dict[int, RowResult] = {}
    with torch.enable_grad(), capture_layers(layers) as captures:
        outputs = forward(model, inputs_of(model.info, units.rows))
        for turn in differentiated(outputs, units, rows):
            grids = [see(model.info, captures, name, turn.at) for name in pass_.layers]
            each = [(grid.alive, grid.gradients.mean((2, 3)), grid.activations) for grid in grids]
            answers, read = turn.read([tensor for layer in each for tensor in layer])
            alive, weights, maps = read[0::3], read[1::3], read[2::3]
            for place, index in enumerate(turn.rows):
                zero_gradient = tuple(not layer[place] for layer in alive)
                means = tuple((layer[place],) for layer in weights)
                results[index] = answers.result(place, means, zero_gradient, tuple(layer[place] for layer in maps))
    return in_order(results)
