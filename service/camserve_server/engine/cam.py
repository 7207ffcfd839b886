"""The passes over layers: their feature maps, the score's gradients there, and what the methods make of them."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor

from camserve_server.core import process
from camserve_server.core.arrays import Map
from camserve_server.core.devices import device_of
from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.attention import PlainAttention
from camserve_server.engine.batch import (
    BackwardPass,
    differentiated,
    forward,
    in_order,
    inputs_of,
    joined,
    scored,
    units_of,
)
from camserve_server.engine.values import Row, RowResult
from camserve_server.methods import Cam, method_of
from camserve_server.methods.cams import principal
from camserve_server.methods.kinds import as_it_is
from camserve_server.methods.values import MethodCall
from camserve_server.models import LoadedModel
from camserve_server.models.grid import to_grid
from camserve_server.models.hooks import Capture, capture_layers
from camserve_server.models.values import Layout, ModelInfo, Pass


@dataclass(frozen=True, slots=True)
class Grids:
    """What one layer gave for some rows: activations, gradients and, where asked for, curvature, each [b,C,h,w]."""

    activations: Tensor
    gradients: Tensor
    curvature: Tensor | None = None

    @property
    def alive(self) -> Tensor:
        """Whether each row's gradient is not zero somewhere [b]."""
        return self.gradients.flatten(1).any(1)


_Seen: TypeAlias = tuple[BackwardPass, list[Grids]]
"""One backward pass, and what it showed of each layer."""

TOGETHER = 16
"""Rows that methods are computed for at once, where there are as many; more would only take memory."""

TOGETHER_BYTES = 8 * 2**20
"""Bytes of activations and gradients at which no more rows are gathered."""

LARGE = 8 * 2**20
"""Bytes of activations and gradients of a row, after which freed memory goes back to the system on a CPU.

Blocks of this size, freed between small blocks that stay in use, leave the heap fragmented: 16 targets on four layers
of 1.6 MB each took 215 MiB, half of it free.
"""


def run(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
    """Run one batch: one forward pass, and one backward pass a turn."""
    units = units_of(rows)
    layers = {name: model.module.get_submodule(name) for name in pass_.layers}
    results: dict[int, RowResult] = {}
    with torch.enable_grad(), capture_layers(layers) as captures:
        outputs = forward(model, inputs_of(model.info, units.rows))
        turns = differentiated(outputs, units, rows)
        seen = ((turn, [see(model.info, captures, name, turn.at) for name in pass_.layers]) for turn in turns)
        for some in _together(seen):
            results |= _results(some, rows)
            large = _bytes_of(some) >= LARGE * sum(len(turn.rows) for turn, _ in some)
            some.clear()
            if large and device_of(model.info.device).is_cpu:
                process.give_back()
    return in_order(results)


def run_curvature(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
    """Run one batch, differentiating twice: for each layer also the Hessian of the score times the activations."""
    units = units_of(rows)
    layers = {name: model.module.get_submodule(name) for name in pass_.layers}
    results: dict[int, RowResult] = {}
    # Fused attention can be differentiated only once.
    with torch.enable_grad(), PlainAttention(), capture_layers(layers) as captures:
        outputs = forward(model, inputs_of(model.info, units.rows))
        for turn, scores in scored(outputs, units, rows):
            grids = [_see_twice(model.info, captures, name, turn.at, scores) for name in pass_.layers]
            results |= _results([(turn, grids)], rows)
    return in_order(results)


def _together(seen: Iterable[_Seen]) -> Iterator[list[_Seen]]:
    """Gather turns until they have enough rows: a method costs less for many rows at once than for each by itself."""
    some: list[_Seen] = []
    for one in seen:
        some.append(one)
        if _bytes_of(some) >= TOGETHER_BYTES or sum(len(turn.rows) for turn, _ in some) >= TOGETHER:
            yield some
            some = []
    if some:
        yield some


def _bytes_of(seen: Sequence[_Seen]) -> int:
    """Return how many bytes of activations and gradients some backward passes showed."""
    return sum(2 * grid.activations.nbytes for _, grids in seen for grid in grids)


def _results(seen: Sequence[_Seen], rows: Sequence[Row]) -> dict[int, RowResult]:
    turn = joined([turn for turn, _ in seen])
    grids = [_joined(layer) for layer in zip(*(grids for _, grids in seen), strict=True)]
    mine = [rows[index] for index in turn.rows]
    computed = [_weigh(mine, layer, turn.scores) for layer in grids]
    featured = [place for place, row in enumerate(mine) if row.features]
    answers, found = turn.read(
        [
            *(layer.alive for layer in grids),
            *(some.values for layer in computed for some in layer),
            *(layer.activations[place] for place in featured for layer in grids),
        ]
    )
    read = iter(found)
    alive = [next(read) for _ in grids]
    maps = [_by_row(mine, layer, read) for layer in computed]
    features = {place: tuple(next(read) for _ in grids) for place in featured}
    return {
        index: answers.result(
            place,
            tuple(layer[place] for layer in maps),
            tuple(not layer[place] for layer in alive),
            features.get(place, ()),
        )
        for place, index in enumerate(turn.rows)
    }


def _joined(parts: Sequence[Grids]) -> Grids:
    if len(parts) == 1:
        return parts[0]
    return Grids(torch.cat([one.activations for one in parts]), torch.cat([one.gradients for one in parts]))


def see(info: ModelInfo, captures: Mapping[str, Capture], name: str, at: slice | Tensor) -> Grids:
    """Return what a layer gave for some units, and forget its gradients."""
    capture, layout = _captured(info, captures, name)
    gradient, capture.gradient = capture.gradient, None
    activations = to_grid(capture.activation, layout)[at]
    return Grids(activations, torch.zeros_like(activations) if gradient is None else to_grid(gradient, layout)[at])


def _see_twice(
    info: ModelInfo, captures: Mapping[str, Capture], name: str, at: slice | Tensor, scores: Tensor
) -> Grids:
    """Return what a layer gave for some units, with the Hessian-vector product H·A of each one's score."""
    capture, layout = _captured(info, captures, name)
    source = capture.source
    first = _gradient(scores.sum(), source)
    second = _gradient((first * capture.activation).sum(), source)
    return Grids(
        to_grid(capture.activation, layout)[at],
        to_grid(first.detach(), layout)[at],
        to_grid(second.detach(), layout)[at],
    )


def _gradient(score: Tensor, source: Tensor) -> Tensor:
    """Differentiate once, so that it can be done again; zero where the score does not depend on the source.

    Raises:
        FailedPrecondition: torch has no second derivative of something behind the source.
    """
    if not score.requires_grad:
        return torch.zeros_like(source)
    try:
        found = cast("Tensor | None", torch.autograd.grad(score, source, create_graph=True, allow_unused=True)[0])
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        raise FailedPrecondition(f"the model cannot be differentiated twice behind this layer: {error}") from error
    return torch.zeros_like(source) if found is None else found


def _captured(info: ModelInfo, captures: Mapping[str, Capture], name: str) -> tuple[Capture, Layout]:
    layer, capture = info.layers.get(name), captures.get(name)
    if layer is None or capture is None:
        raise FailedPrecondition(f'layer "{name}" did not run')
    if layer.layout is None:
        raise FailedPrecondition(f'layer "{name}" cannot be explained: {layer.reason}')
    if not capture.intact():
        raise FailedPrecondition(f'the model overwrites what layer "{name}" returns')
    return capture, layer.layout


@dataclass(frozen=True, slots=True)
class _Maps:
    """The maps [b,h,w] of one method for those of some rows, by place, that ask for it."""

    call: MethodCall
    places: list[int]
    values: Tensor


def _weigh(rows: Sequence[Row], grids: Grids, scores: Tensor) -> list[_Maps]:
    """Compute every row's methods, each method once for all the rows that want it."""
    wanted: dict[Hashable, tuple[MethodCall, list[int]]] = {}
    for place, row in enumerate(rows):
        for call in row.calls:
            wanted.setdefault(call.key, (call, []))[1].append(place)
    return [_Maps(call, places, _maps(call, grids, scores, places)) for call, places in wanted.values()]


def _by_row(rows: Sequence[Row], computed: Sequence[_Maps], read: Iterator[Map]) -> list[tuple[Map, ...]]:
    """Return each row's maps in the order of its methods, from what was read of each method."""
    maps: list[dict[Hashable, Map]] = [{} for _ in rows]
    for some in computed:
        for place, heatmap in zip(some.places, next(read), strict=True):
            maps[place][some.call.key] = heatmap
    return [tuple(found[call.key] for call in row.calls) for found, row in zip(maps, rows, strict=True)]


def _maps(call: MethodCall, grids: Grids, scores: Tensor, places: list[int]) -> Tensor:
    """Return a method's maps [b,h,w] for some rows; or what each adds to its mean, for a method that makes copies."""
    method = method_of(Cam, call.name)
    device = device_of(scores.device)
    at = slice(None) if len(places) == len(scores) else device.tensor(places)  # all of them need not be copied
    more = {} if grids.curvature is None else {"curvature": grids.curvature[at]}
    found = method.weigh(grids.activations[at], grids.gradients[at], scores[at], **call.parameters, **more)
    if method.finish is not as_it_is or found.dim() == 3:  # noqa: PLR2004 -- maps [b,h,w]
        return found
    return principal(found) if call.eigen else found.sum(1)
