"""What every pass does: the distinct inputs of a batch, made and run; its rows' scores, differentiated."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from camserve_server import targets
from camserve_server.core.arrays import Input, Map
from camserve_server.core.devices import device_of, fetched
from camserve_server.engine.inputs import edited, normalise, uploaded, viewed
from camserve_server.engine.values import Reading, Row, RowResult
from camserve_server.methods import METHODS
from camserve_server.models import LoadedModel, tasks
from camserve_server.models.hooks import embedding_of
from camserve_server.models.outputs import Outputs
from camserve_server.models.values import ModelInfo
from camserve_server.targets.values import FixedTarget


@dataclass(frozen=True, slots=True)
class UniqueInputs:
    """The distinct inputs of a batch, and the rows of each; such an input is a unit here.

    Attributes:
        rows: for each unit, one row that has its input.
        of_row: for each row, its unit.
        turns: the rows of each backward pass: at most one of each unit.
    """

    rows: list[Row]
    of_row: list[int]
    turns: list[list[int]]

    def index_of(self, rows: Sequence[int], device: torch.device) -> slice | Tensor:
        """Return the index of some rows' units along the batch axis."""
        chosen, place = [self.of_row[row] for row in rows], device_of(device)
        # A slice copies nothing. On a CPU the copy stays: sums over it are rounded as they always were.
        if chosen == list(range(len(self.rows))) and not place.is_cpu:
            return slice(len(chosen))
        return place.tensor(chosen)


def units_of(rows: Sequence[Row]) -> UniqueInputs:
    """Find the distinct inputs of a batch."""
    units = UniqueInputs([], [], [])
    known: dict[Hashable, int] = {}
    asked: list[int] = []
    for index, row in enumerate(rows):
        unit = known.setdefault(row.input, len(known))
        if unit == len(units.rows):
            units.rows.append(row)
            asked.append(0)
        if asked[unit] == len(units.turns):
            units.turns.append([])
        units.turns[asked[unit]].append(index)
        units.of_row.append(unit)
        asked[unit] += 1
    return units


def inputs_of(info: ModelInfo, rows: Sequence[Row]) -> Tensor:
    """Make the model's input [B,3,H,W] of each row: the image, normalised; its views; the method's copy; edited."""
    order = torch.channels_last if info.channels_last else torch.contiguous_format
    plain = _normalised([row.image for row in rows], info)  # channels last, as photos are
    if all(_is_plain(row) for row in rows):
        return plain.contiguous(memory_format=order)
    changed = torch.stack([_changed(image, row) for image, row in zip(plain, rows, strict=True)])
    # In the memory format of those that are not changed: another one has other kernels, which round in another way.
    return changed.contiguous(memory_format=order)


def _normalised(images: Sequence[Input], info: ModelInfo) -> Tensor:
    device = torch.device(info.device)
    if len({image.dtype for image in images}) == 1:
        return normalise(uploaded(images, device), info.preprocess)
    return torch.cat([normalise(uploaded([image], device), info.preprocess) for image in images])


def _is_plain(row: Row) -> bool:
    return not row.views and row.edit is None and row.copy is None


def _changed(image: Tensor, row: Row) -> Tensor:
    for view in row.views:
        image = viewed(image, view)
    if row.copy is not None:
        call = row.calls[0]
        image = METHODS[call.name].copy(image, row.copy, **call.parameters)
    return edited(image, row.edit) if row.edit else image


def forward(model: LoadedModel, inputs: Tensor) -> Outputs:
    """Return what the model answers, float32."""
    info = model.info
    precision: torch.dtype = getattr(torch, info.precision)
    half = precision != torch.float32 and model.dtype == torch.float32  # else its weights are in that precision
    autocast = torch.autocast(inputs.device.type, precision if half else torch.bfloat16, enabled=half)
    with embedding_of(model.module, info.embedding) as embeddings, autocast:
        values = tasks.values_of(model.module(inputs.to(model.dtype)), info.task).float()
    return Outputs(info, values, embeddings[-1].float() if embeddings else None)


@dataclass(frozen=True, slots=True)
class BackwardPass:
    """One backward pass, with what is still on the device.

    Attributes:
        rows: that it served.
        units: of these rows.
        at: the index of these units along the batch axis.
        targets: of these rows.
        scores: of these rows [b].
        summaries: what is told of each row's image.
    """

    rows: list[int]
    units: list[int]
    at: slice | Tensor
    targets: list[FixedTarget]
    scores: Tensor
    summaries: list[Tensor]

    def read(self, tensors: Sequence[Tensor]) -> "tuple[Answers, list[Map]]":
        """Read its scores and summaries from the device together with other tensors, which is one wait for all."""
        scores, *found = fetched([self.scores, *self.summaries, *tensors])
        count = len(self.summaries)
        return Answers(self.rows, self.targets, scores.tolist(), found[:count]), found[count:]


@dataclass(frozen=True, slots=True)
class Answers:
    """What a backward pass found, in the host's memory: of each of its rows the target, the score and the summary."""

    rows: list[int]
    targets: list[FixedTarget]
    scores: list[float]
    summaries: list[Map]

    def result(
        self,
        place: int,
        maps: tuple[tuple[Map, ...], ...],
        zero_gradient: tuple[bool, ...],
        features: tuple[Map, ...] = (),
        readings: tuple[Reading | None, ...] = (),
    ) -> RowResult:
        """Put together what was found for one of the rows."""
        return RowResult(
            self.summaries[place], self.targets[place], self.scores[place], maps, zero_gradient, features, readings
        )

    def single_maps(self, maps: Sequence[Map], alive: Sequence[float]) -> dict[int, RowResult]:
        """Return the results of rows with one map each, and no layer; `alive` says whose gradient is not zero."""
        return {row: self.result(place, ((maps[place],),), (not alive[place],)) for place, row in enumerate(self.rows)}


def joined(turns: Sequence[BackwardPass]) -> BackwardPass:
    """Put several turns together; each has its own units."""
    if len(turns) == 1:
        return turns[0]
    return BackwardPass(
        [row for turn in turns for row in turn.rows],
        [unit for turn in turns for unit in turn.units],
        slice(0),  # its rows are of several passes, each with tensors of its own
        [target for turn in turns for target in turn.targets],
        torch.cat([turn.scores for turn in turns]),
        [one for turn in turns for one in turn.summaries],
    )


def scored(outputs: Outputs, units: UniqueInputs, rows: Sequence[Row]) -> Iterator[tuple[BackwardPass, Tensor]]:
    """Yield the turns of a batch, each with its rows' scores [b] still on the graph.

    Nothing is read from the device but what targets depend on: a GPU goes on to the backward pass at once.
    """
    for indices in units.turns:
        at = units.index_of(indices, outputs.values.device)
        mine = outputs[at]
        fixed, scores = resolve_targets(mine, [rows[index] for index in indices])
        turn_units = [units.of_row[index] for index in indices]
        yield BackwardPass(indices, turn_units, at, fixed, scores.detach(), targets.summary(mine)), scores


def resolve_targets(outputs: Outputs, rows: Sequence[Row]) -> tuple[list[FixedTarget], Tensor]:
    """Return each row's target, fixed, and its score [b], of the outputs for the row's input."""
    fixed = targets.resolve(outputs, [row.target for row in rows])
    size = outputs.info.preprocess.size
    seen = [targets.seen_in(target, row.views, size) for target, row in zip(fixed, rows, strict=True)]
    return fixed, targets.scores(outputs, seen)


def differentiated(outputs: Outputs, units: UniqueInputs, rows: Sequence[Row]) -> Iterator[BackwardPass]:
    """Differentiate every row's score: the sum over rows of different units has each one's own gradient."""
    for number, (turn, scores) in enumerate(scored(outputs, units, rows), start=1):
        if scores.requires_grad:  # else no score depends on what is watched, and its gradient is zero
            torch.autograd.backward(scores.sum(), retain_graph=number < len(units.turns))
        yield turn


def in_order(results: dict[int, RowResult]) -> list[RowResult]:
    """Return the results of all rows in the rows' order."""
    return [results[index] for index in range(len(results))]
