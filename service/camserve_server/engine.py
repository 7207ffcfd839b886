"""The only caller of a model: rows in, logits and raw maps out, all of them plain values.

A batch is one forward pass over the distinct images in it, and one backward pass for each further target that an image
has, so that many methods and targets of one image share all that they can.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from camserve_server import targets
from camserve_server.errors import FailedPrecondition, OutOfMemory
from camserve_server.hooks import Capture, first_tensor, watching
from camserve_server.methods import METHODS, Cam, Saliency
from camserve_server.models import LoadedModel
from camserve_server.models.grid import to_grid
from camserve_server.types import (
    FixedTarget,
    Map,
    MethodCall,
    ModelInfo,
    Pass,
    Preprocess,
    Row,
    RowResult,
)


class Engine:
    """Runs batches, one at a time, on the models it was given.

    Args:
        models: by name.
    """

    def __init__(self, models: Mapping[str, LoadedModel]) -> None:
        self._models = models

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
            return _RUNS[pass_.kind](self._models[pass_.model], pass_, rows)
        except torch.OutOfMemoryError:
            pass  # raised again below: an error that led to ours would hold the tensors that fill the memory
        raise OutOfMemory("the device has no memory for this", retry_after=1.0)


def normalise(images: Tensor, preprocess: Preprocess) -> Tensor:
    """Turn uint8 images [B,h,w,3] into the model's input [B,3,h,w], float32."""
    mean = torch.tensor(preprocess.mean, device=images.device)
    std = torch.tensor(preprocess.std, device=images.device)
    return ((images.float() / 255 - mean) / std).permute(0, 3, 1, 2)


def _run_score(model: LoadedModel, _pass: Pass, rows: Sequence[Row]) -> list[RowResult]:
    units = _units(rows, lambda row: id(row.image))
    with torch.inference_mode():
        logits = _forward(model, _inputs(model.info, units.rows))[units.of_row]
    fixed = targets.resolve(logits, [row.target for row in rows])
    scores = targets.scores(logits, fixed)
    return [
        RowResult(row_logits, target, score)
        for row_logits, target, score in zip(_numpy(logits), fixed, scores.tolist(), strict=True)
    ]


def _run_cam(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
    units = _units(rows, lambda row: id(row.image))
    layers = {name: model.module.get_submodule(name) for name in pass_.layers}
    with torch.enable_grad(), watching(layers) as captures:
        logits = _forward(model, _inputs(model.info, units.rows))
        results: dict[int, RowResult] = {}
        for turn in _backward(logits, units, rows):
            calls = [rows[i].calls for i in turn.rows]
            seen = [_see(model.info, captures, name, turn.units) for name in pass_.layers]
            maps = [_weigh(calls, *grids, turn.scores) for grids in seen]
            dead = [(~gradients.flatten(1).any(1)).tolist() for _, gradients in seen]
            for place, index in enumerate(turn.rows):
                results[index] = turn.result(
                    place, tuple(layer[place] for layer in maps), tuple(layer[place] for layer in dead)
                )
    return [results[index] for index in range(len(rows))]


def _run_saliency(model: LoadedModel, _pass: Pass, rows: Sequence[Row]) -> list[RowResult]:
    units = _units(rows, _copy_key)
    copies = _copies(model.info, units.rows).requires_grad_()
    results: dict[int, RowResult] = {}
    with torch.enable_grad():
        logits = _forward(model, copies.clone())  # a model may change its input in place, but not a leaf
        for turn in _backward(logits, units, rows):
            gradients = _taken(copies)
            for place, (index, unit) in enumerate(zip(turn.rows, turn.units, strict=True)):
                one = slice(unit, unit + 1)
                method = cast("Saliency", METHODS[rows[index].calls[0].name])
                term = method.term(copies[one].detach(), gradients[one])
                dead = not bool(gradients[one].any())
                results[index] = turn.result(place, ((_numpy(term)[0],),), (dead,))
    return [results[index] for index in range(len(rows))]


_RUNS: Mapping[str, Callable[[LoadedModel, Pass, Sequence[Row]], list[RowResult]]] = {
    "score": _run_score,
    "cam": _run_cam,
    "saliency": _run_saliency,
}


@dataclass(frozen=True, slots=True)
class _Units:
    """The distinct inputs of a batch, and who asks for each.

    Attributes:
        rows: of each unit, one row that has its input.
        of_row: of each row, its unit.
        turns: rows that one backward pass can serve: at most one of each unit.
    """

    rows: list[Row]
    of_row: list[int]
    turns: list[list[int]]


def _units(rows: Sequence[Row], key: Callable[[Row], Hashable]) -> _Units:
    units = _Units([], [], [])
    known: dict[Hashable, int] = {}
    asked: list[int] = []
    for index, row in enumerate(rows):
        unit = known.setdefault(key(row), len(known))
        if unit == len(units.rows):
            units.rows.append(row)
            asked.append(0)
        if asked[unit] == len(units.turns):
            units.turns.append([])
        units.turns[asked[unit]].append(index)
        units.of_row.append(unit)
        asked[unit] += 1
    return units


@dataclass(frozen=True, slots=True)
class _Turn:
    """One backward pass: the rows it served, and for each its unit, target, score and logits."""

    rows: list[int]
    units: list[int]
    targets: list[FixedTarget]
    scores: Tensor
    logits: Tensor

    def result(self, place: int, maps: tuple[tuple[Map, ...], ...], dead: tuple[bool, ...]) -> RowResult:
        logits, score = _numpy(self.logits[place]), float(self.scores[place])
        return RowResult(logits, self.targets[place], score, maps, dead)


def _backward(logits: Tensor, units: _Units, rows: Sequence[Row]) -> Iterator[_Turn]:
    """Differentiate every row's score: the sum over rows of different units has each one's own gradient."""
    for number, indices in enumerate(units.turns, start=1):
        at = [units.of_row[index] for index in indices]
        mine = logits[at]
        fixed = targets.resolve(mine, [rows[index].target for index in indices])
        scores = targets.scores(mine, fixed)
        if scores.requires_grad:  # else no score depends on what is watched, and its gradient is zero
            torch.autograd.backward(scores.sum(), retain_graph=number < len(units.turns))
        yield _Turn(indices, at, fixed, scores.detach(), mine.detach())


def _see(info: ModelInfo, captures: Mapping[str, Capture], name: str, at: list[int]) -> tuple[Tensor, Tensor]:
    """Return a layer's activations and gradients [b,C,h,w] for some units, and forget the gradients."""
    layer, capture = info.layers.get(name), captures.get(name)
    if layer is None or capture is None:
        raise FailedPrecondition(f'layer "{name}" did not run')
    if layer.layout is None:
        raise FailedPrecondition(f'layer "{name}" cannot be explained: {layer.reason}')
    if not capture.intact():
        raise FailedPrecondition(f'the model overwrites what layer "{name}" returns')
    gradient = capture.gradient
    capture.gradient = None
    activations = to_grid(capture.activation, layer.layout)[at]
    gradients = torch.zeros_like(activations) if gradient is None else to_grid(gradient, layer.layout)[at]
    return activations, gradients


def _weigh(
    calls: Sequence[tuple[MethodCall, ...]], activations: Tensor, gradients: Tensor, scores: Tensor
) -> list[tuple[Map, ...]]:
    """Compute every row's methods, each method once for all the rows that want it."""
    wanted: dict[Hashable, tuple[MethodCall, list[int]]] = {}
    for place, row_calls in enumerate(calls):
        for call in row_calls:
            wanted.setdefault(call.key, (call, []))[1].append(place)
    maps: list[dict[Hashable, Map]] = [{} for _ in calls]
    for key, (call, places) in wanted.items():
        method = cast("Cam", METHODS[call.name])
        found = method.weigh(activations[places], gradients[places], scores[places], **call.parameters)
        for place, heatmap in zip(places, _numpy(found), strict=True):
            maps[place][key] = heatmap
    return [tuple(found[call.key] for call in row_calls) for found, row_calls in zip(maps, calls, strict=True)]


def _forward(model: LoadedModel, inputs: Tensor) -> Tensor:
    """Return the logits [B, classes], float32."""
    info = model.info
    precision: torch.dtype = getattr(torch, info.precision)
    half = precision != torch.float32
    with torch.autocast(inputs.device.type, precision if half else torch.bfloat16, enabled=half):
        logits = first_tensor(model.module(inputs))
    return cast("Tensor", logits).float()


def _inputs(info: ModelInfo, rows: Sequence[Row]) -> Tensor:
    images = torch.from_numpy(np.stack([row.image for row in rows])).to(info.device)
    return normalise(images, info.preprocess)


def _copies(info: ModelInfo, rows: Sequence[Row]) -> Tensor:
    copies = [
        cast("Saliency", METHODS[row.calls[0].name]).copy(image, row.copy, row.calls[0].parameters)
        for row, image in zip(rows, _inputs(info, rows), strict=True)
    ]
    return torch.stack(copies)


def _copy_key(row: Row) -> Hashable:
    call = row.calls[0]
    return id(row.image), call.key, row.copy


def _taken(leaf: Tensor) -> Tensor:
    """Take a leaf's gradient away, so that the next backward pass starts from nothing."""
    gradient, leaf.grad = leaf.grad, None
    return torch.zeros_like(leaf) if gradient is None else gradient


def _numpy(tensor: Tensor) -> Map:
    return cast("Map", tensor.detach().float().cpu().numpy())
