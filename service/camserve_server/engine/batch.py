"""Steps that every kind of pass shares: make the inputs of a batch, run them forward, score the rows, go backward."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from camserve_server import targets
from camserve_server.core.arrays import Input, Map
from camserve_server.core.devices import device_for, fetch_arrays
from camserve_server.engine.inputs import apply_edit, apply_view, normalise, upload
from camserve_server.engine.values import Reading, Row, RowResult
from camserve_server.methods import METHODS
from camserve_server.models import LoadedModel, tasks
from camserve_server.models.hooks import record_embeddings
from camserve_server.models.outputs import Outputs
from camserve_server.models.values import ModelInfo
from camserve_server.targets.values import FixedTarget


@dataclass(frozen=True, slots=True)
class UniqueInputs:
    """The distinct inputs of a batch, and the rows of each.

    Ten targets of one image share its input, so they cost one forward pass, and one backward pass each.

    Attributes:
        rows: for each input, one row that has it.
        input_of_row: for each row of the batch, the index of its input.
        backward_rows: for each backward pass, the indices of its rows: at most one row of each input.
    """

    rows: list[Row]
    input_of_row: list[int]
    backward_rows: list[list[int]]

    def index_of(self, rows: Sequence[int], device: torch.device) -> slice | Tensor:
        """Return the index of the inputs of rows along the batch axis.

        Args:
            rows: indices of rows.
            device: the device of the tensors to index.
        """
        inputs, place = [self.input_of_row[row] for row in rows], device_for(device)
        # A slice copies nothing. On a CPU the copy stays: without it, sums over the tensor are rounded differently.
        if inputs == list(range(len(self.rows))) and not place.is_cpu:
            return slice(len(inputs))
        return place.tensor(inputs)


def find_unique_inputs(rows: Sequence[Row]) -> UniqueInputs:
    """Find the distinct inputs of a batch, and divide its rows among backward passes."""
    unique = UniqueInputs([], [], [])
    indices: dict[Hashable, int] = {}
    rows_of_input: list[int] = []  # the number of rows of each input so far
    for row_index, row in enumerate(rows):
        index = indices.setdefault(row.input, len(indices))
        if index == len(unique.rows):
            unique.rows.append(row)
            rows_of_input.append(0)
        if rows_of_input[index] == len(unique.backward_rows):
            unique.backward_rows.append([])
        unique.backward_rows[rows_of_input[index]].append(row_index)
        unique.input_of_row.append(index)
        rows_of_input[index] += 1
    return unique


def make_inputs(info: ModelInfo, rows: Sequence[Row]) -> Tensor:
    """Make the model's input [B,3,H,W] of each row: normalised, with the row's views, method's copy and edit."""
    memory_format = torch.channels_last if info.channels_last else torch.contiguous_format
    images = _normalise([row.image for row in rows], info)  # channels last, as photos are
    if all(_is_unchanged(row) for row in rows):
        return images.contiguous(memory_format=memory_format)
    changed = torch.stack([_change(image, row) for image, row in zip(images, rows, strict=True)])
    # The same memory format as unchanged images: another one has other kernels, which round differently.
    return changed.contiguous(memory_format=memory_format)


def _normalise(images: Sequence[Input], info: ModelInfo) -> Tensor:
    device = torch.device(info.device)
    if len({image.dtype for image in images}) == 1:
        return normalise(upload(images, device), info.preprocess)
    return torch.cat([normalise(upload([image], device), info.preprocess) for image in images])


def _is_unchanged(row: Row) -> bool:
    return not row.views and row.edit is None and row.copy is None


def _change(image: Tensor, row: Row) -> Tensor:
    """Apply a row's views, its method's copy and its edit to a normalised image."""
    for view in row.views:
        image = apply_view(image, view)
    if row.copy is not None:
        call = row.calls[0]
        image = METHODS[call.name].copy(image, row.copy, **call.parameters)
    return apply_edit(image, row.edit) if row.edit else image


def forward(model: LoadedModel, inputs: Tensor) -> Outputs:
    """Run a model; return its outputs in float32."""
    info = model.info
    with record_embeddings(model.module, info.embedding) as embeddings, in_precision(model):
        values = tasks.values_of(model.module(inputs.to(model.dtype)), info.task, len(inputs)).float()
    return Outputs(info, values, embeddings[-1].float() if embeddings else None)


def recording_gradients(info: ModelInfo, layers: Iterable[str]) -> torch.set_grad_enabled:
    """Record a graph inside the block, unless the score has no gradient at these layers.

    The layers of such a model may convert tensors to arrays, which a tensor on a graph refuses.
    """
    return torch.set_grad_enabled(info.differentiable or info.has_gradient(layers))


def in_precision(model: LoadedModel) -> torch.autocast:
    """Compute in the model's precision inside the block."""
    precision: torch.dtype = getattr(torch, model.info.precision)
    # Weights that are already in half precision need no autocast.
    half = precision != torch.float32 and model.dtype == torch.float32
    kind = torch.device(model.info.device).type
    return torch.autocast(kind, precision if half else torch.bfloat16, enabled=half)


@dataclass(frozen=True, slots=True)
class BackwardPass:
    """One backward pass, with tensors that are still on the device.

    Attributes:
        rows: indices of its rows.
        inputs: for each of its rows, the index of the input.
        at: index of these inputs along the batch axis.
        targets: targets of the rows.
        scores: scores of the rows [b].
        summaries: tensors from which `RowResult.logits` of each row is read.
    """

    rows: list[int]
    inputs: list[int]
    at: slice | Tensor
    targets: list[FixedTarget]
    scores: Tensor
    summaries: list[Tensor]

    def fetch(self, tensors: Sequence[Tensor]) -> "tuple[PassResults, list[Map]]":
        """Copy the scores, the summaries and other tensors to the host together, so that a GPU is waited for once.

        Args:
            tensors: the other tensors.

        Returns:
            The results of the pass, and the other tensors as arrays.
        """
        scores, *arrays = fetch_arrays([self.scores, *self.summaries, *tensors])
        count = len(self.summaries)
        return PassResults(self.rows, self.targets, scores.tolist(), arrays[:count]), arrays[count:]


@dataclass(frozen=True, slots=True)
class PassResults:
    """The results of one backward pass in the host's memory, row by row.

    Attributes:
        rows: indices of the rows.
        targets: targets of the rows.
        scores: scores of the rows.
        summaries: `RowResult.logits` of the rows.
    """

    rows: list[int]
    targets: list[FixedTarget]
    scores: list[float]
    summaries: list[Map]

    def row_result(
        self,
        position: int,
        maps: tuple[tuple[Map, ...], ...],
        zero_gradient: tuple[bool, ...],
        features: tuple[Map, ...] = (),
        readings: tuple[Reading | None, ...] = (),
    ) -> RowResult:
        """Return the result of the row at a position in `rows`; the other arguments are as in `RowResult`."""
        summary, target, score = self.summaries[position], self.targets[position], self.scores[position]
        return RowResult(summary, target, score, maps, zero_gradient, features, readings)

    def single_map_results(self, maps: Sequence[Map], nonzero: Sequence[float]) -> dict[int, RowResult]:
        """Return the results, by row index, of rows with one map each and no layer.

        Args:
            maps: the maps of the rows.
            nonzero: for each row, 0 if its gradient is zero everywhere.
        """
        return {
            row: self.row_result(position, ((maps[position],),), (not nonzero[position],))
            for position, row in enumerate(self.rows)
        }


def join_passes(passes: Sequence[BackwardPass]) -> BackwardPass:
    """Join several backward passes, so that methods run once for the rows of all."""
    if len(passes) == 1:
        return passes[0]
    return BackwardPass(
        [row for each in passes for row in each.rows],
        [index for each in passes for index in each.inputs],
        slice(0),  # not usable: each pass has tensors of its own
        [target for each in passes for target in each.targets],
        torch.cat([each.scores for each in passes]),
        [summary for each in passes for summary in each.summaries],
    )


def score_passes(outputs: Outputs, unique: UniqueInputs, rows: Sequence[Row]) -> Iterator[tuple[BackwardPass, Tensor]]:
    """Yield the backward passes of a batch before they run, each with the scores [b] of its rows on the graph.

    Only the values that fix targets are read from the device, so that a GPU goes on to the backward pass without a
    pause.
    """
    for indices in unique.backward_rows:
        yield score_pass(outputs, unique, rows, indices)


def score_pass(
    outputs: Outputs, unique: UniqueInputs, rows: Sequence[Row], indices: list[int]
) -> tuple[BackwardPass, Tensor]:
    """Return a backward pass for the rows with these indices before it runs, and the scores [b] of its rows."""
    at = unique.index_of(indices, outputs.values.device)
    pass_outputs = outputs[at]
    fixed, scores, summaries = read_outputs(pass_outputs, [rows[index] for index in indices])
    inputs = [unique.input_of_row[index] for index in indices]
    return BackwardPass(indices, inputs, at, fixed, scores.detach(), summaries), scores


def read_outputs(outputs: Outputs, rows: Sequence[Row]) -> tuple[list[FixedTarget], Tensor, list[Tensor]]:
    """Return each row's fixed target, its score [b], and the tensor from which `RowResult.logits` is read.

    Args:
        outputs: outputs for the input of each row.
        rows: the rows.
    """
    groups = _by_texts(rows)
    if list(groups) == [None]:
        return *_resolve_targets(outputs, rows), targets.summary(outputs)
    parts: dict[int, tuple[FixedTarget, Tensor, Tensor]] = {}
    for texts, places in groups.values():
        group = outputs[device_for(outputs.values.device).tensor(places)]
        if texts is not None:
            group = targets.with_texts(group, texts)
        fixed, scores = _resolve_targets(group, [rows[place] for place in places])
        parts |= dict(zip(places, zip(fixed, scores, targets.summary(group), strict=True), strict=True))
    all_fixed, all_scores, summaries = zip(*(parts[place] for place in range(len(rows))), strict=True)
    return list(all_fixed), torch.stack(all_scores), list(summaries)


def _by_texts(rows: Sequence[Row]) -> dict[int | None, tuple[Map | None, list[int]]]:
    """Return the embeddings of texts that rows have as their classes, and the rows' indices; None without texts."""
    groups: dict[int | None, tuple[Map | None, list[int]]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(None if row.texts is None else id(row.texts), (row.texts, []))[1].append(index)
    return groups


def _resolve_targets(outputs: Outputs, rows: Sequence[Row]) -> tuple[list[FixedTarget], Tensor]:
    """Return each row's fixed target and its score [b]; see `read_outputs`."""
    fixed = targets.resolve(outputs, [row.target for row in rows])
    size = outputs.info.preprocess.size
    in_view = [targets.seen_in(target, row.views, size) for target, row in zip(fixed, rows, strict=True)]
    return fixed, targets.scores(outputs, in_view)


def run_backward_passes(outputs: Outputs, unique: UniqueInputs, rows: Sequence[Row]) -> Iterator[BackwardPass]:
    """Differentiate every row's score, and yield each backward pass after it ran.

    The rows of a pass have different inputs, so the gradient of the sum of their scores at one input is that of its
    own row's score.
    """
    for number, (backward, scores) in enumerate(score_passes(outputs, unique, rows), start=1):
        if scores.requires_grad:  # otherwise no score depends on a captured tensor, and the gradients are zero
            torch.autograd.backward(scores.sum(), retain_graph=number < len(unique.backward_rows))
        yield backward


def in_row_order(results: dict[int, RowResult]) -> list[RowResult]:
    """Return the results of all rows, which are given by row index, in the order of the rows."""
    return [results[index] for index in range(len(results))]
