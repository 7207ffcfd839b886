"""What every pass does: the distinct inputs of a batch, made and run; its rows' scores, differentiated."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from camserve_server import targets
from camserve_server.engine.inputs import edited, normalise, uploaded, viewed
from camserve_server.hooks import embedding_of
from camserve_server.methods import METHODS
from camserve_server.models import LoadedModel, tasks
from camserve_server.outputs import Outputs
from camserve_server.types import FixedTarget, Map, ModelInfo, Reading, Row, RowResult

if TYPE_CHECKING:
    from camserve_server.methods import Cam, Saliency


@dataclass(frozen=True, slots=True)
class Units:
    """The distinct inputs of a batch, and who asks for each.

    Attributes:
        rows: of each unit, one row that has its input.
        of_row: of each row, its unit.
        turns: rows that one backward pass can serve: at most one of each unit.
    """

    rows: list[Row]
    of_row: list[int]
    turns: list[list[int]]


def units_of(rows: Sequence[Row]) -> Units:
    """Find the distinct inputs of a batch."""
    units = Units([], [], [])
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
    images = uploaded([row.image for row in rows], torch.device(info.device))
    order = torch.channels_last if info.channels_last else torch.contiguous_format
    plain = normalise(images, info.preprocess)  # channels last, as photos are
    if all(_is_plain(row) for row in rows):
        return plain.contiguous(memory_format=order)
    changed = torch.stack([_changed(image, row) for image, row in zip(plain, rows, strict=True)])
    # In the memory format of those that are not changed: another one has other kernels, which round in another way.
    return changed.contiguous(memory_format=order)


def _is_plain(row: Row) -> bool:
    return not row.views and row.edit is None and row.copy is None


def _changed(image: Tensor, row: Row) -> Tensor:
    for view in row.views:
        image = viewed(image, view)
    if row.copy is not None:
        call = row.calls[0]
        image = cast("Cam | Saliency", METHODS[call.name]).copy(image, row.copy, **call.parameters)
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
class Turn:
    """One backward pass: the rows it served, and for each its unit, target, score and what is told of its image."""

    rows: list[int]
    units: list[int]
    targets: list[FixedTarget]
    scores: Tensor
    numbers: list[float]
    logits: list[Map]

    def result(
        self,
        place: int,
        maps: tuple[tuple[Map, ...], ...],
        dead: tuple[bool, ...],
        features: tuple[Map, ...] = (),
        readings: tuple[Reading | None, ...] = (),
    ) -> RowResult:
        """Put together what came of one of its rows."""
        return RowResult(self.logits[place], self.targets[place], self.numbers[place], maps, dead, features, readings)


def joined(turns: Sequence[Turn]) -> Turn:
    """Put several turns together."""
    if len(turns) == 1:
        return turns[0]
    return Turn(
        [row for turn in turns for row in turn.rows],
        [unit for turn in turns for unit in turn.units],
        [target for turn in turns for target in turn.targets],
        torch.cat([turn.scores for turn in turns]),
        [one for turn in turns for one in turn.numbers],
        [one for turn in turns for one in turn.logits],
    )


def scored(said: Outputs, units: Units, rows: Sequence[Row]) -> Iterator[tuple[Turn, Tensor]]:
    """Yield the turns of a batch, each with its rows' scores [b] still on the graph."""
    for indices in units.turns:
        at = [units.of_row[index] for index in indices]
        mine = said[at]
        fixed, scores = aimed(mine, [rows[index] for index in indices])
        values = scores.detach()
        yield Turn(indices, at, fixed, values, values.tolist(), targets.summary(mine)), scores


def aimed(said: Outputs, rows: Sequence[Row]) -> tuple[list[FixedTarget], Tensor]:
    """Return each row's target, fixed, and its score [b], of what the model said of the row's input."""
    fixed = targets.resolve(said, [row.target for row in rows])
    size = said.info.preprocess.size
    seen = [targets.seen_in(target, row.views, size) for target, row in zip(fixed, rows, strict=True)]
    return fixed, targets.scores(said, seen)


def differentiated(said: Outputs, units: Units, rows: Sequence[Row]) -> Iterator[Turn]:
    """Differentiate every row's score: the sum over rows of different units has each one's own gradient."""
    for number, (turn, scores) in enumerate(scored(said, units, rows), start=1):
        if scores.requires_grad:  # else no score depends on what is watched, and its gradient is zero
            torch.autograd.backward(scores.sum(), retain_graph=number < len(units.turns))
        yield turn


def in_order(results: dict[int, RowResult]) -> list[RowResult]:
    """Return the results of all rows in the rows' order."""
    return [results[index] for index in range(len(results))]


def fetched(tensors: Sequence[Tensor]) -> list[Map]:
    """Return tensors as plain float32 arrays, by one copy: this thread waits for the device once, not for each."""
    flat = to_numpy(torch.cat([one.flatten() for one in tensors]))
    ends = np.cumsum([one.numel() for one in tensors])[:-1]
    return [part.reshape(one.shape) for part, one in zip(np.split(flat, ends), tensors, strict=True)]


def to_numpy(tensor: Tensor) -> Map:
    """Return a tensor as a plain float32 array."""
    return cast("Map", tensor.detach().float().cpu().numpy())
