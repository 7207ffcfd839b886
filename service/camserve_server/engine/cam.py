"""Run passes at layers: capture feature maps and the score's gradients there, and compute maps from both.

A `Pass` is the description of what a batch computes. Running it takes one forward pass of the model, and then one or
more backward passes, each of which is a `BackwardPass`.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor

from camserve_server.core import process
from camserve_server.core.arrays import Map
from camserve_server.core.devices import device_for
from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.attention import PlainAttention
from camserve_server.engine.batch import (
    BackwardPass,
    UniqueInputs,
    find_unique_inputs,
    forward,
    in_row_order,
    join_passes,
    make_inputs,
    recording_gradients,
    run_backward_passes,
    score_passes,
)
from camserve_server.engine.joined import can_join, run_joined_passes
from camserve_server.engine.values import Row, RowResult
from camserve_server.methods import Cam, method_of, wrong_shape
from camserve_server.methods.cams import principal
from camserve_server.methods.kinds import as_it_is
from camserve_server.methods.values import MethodCall
from camserve_server.models import LoadedModel
from camserve_server.models.grid import to_grid
from camserve_server.models.hooks import Capture, capture_layers
from camserve_server.models.outputs import Outputs
from camserve_server.models.values import Layout, ModelInfo, Pass


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """Tensors of one layer for several rows, on the layer's grid, [b,C,h,w] each.

    Attributes:
        activations: the feature maps.
        gradients: gradients of the scores with respect to the feature maps.
        hessian_product: products of the scores' Hessians and the feature maps, in a pass that differentiates twice.
    """

    activations: Tensor
    gradients: Tensor
    hessian_product: Tensor | None = None

    @property
    def nonzero(self) -> Tensor:
        """For each row, True if its gradient has a non-zero value [b]."""
        return self.gradients.flatten(1).any(1)


_CapturedPass: TypeAlias = tuple[BackwardPass, list[LayerTensors]]
"""A backward pass, and the tensors of each layer for its rows."""

ROWS_TO_COMPUTE = 16
"""Once the gathered backward passes have this number of rows, their maps are computed.

With more rows the maps would not be computed faster, but take more memory. The last pass may exceed the number.
"""

BYTES_TO_COMPUTE = 8 * 2**20  # 8 MiB
"""Once the gathered backward passes have this size of activations and gradients, their maps are computed."""

LARGE_ROW_BYTES = 8 * 2**20  # 8 MiB
"""If a row's activations and gradients have this size or more, memory freed on a CPU is returned to the system.

Blocks of this size, freed between small blocks that stay in use, leave the heap fragmented: 16 targets on four layers
of 1.6 MB each took 215 MiB, half of it free.
"""


def run(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
    """Run one batch: one forward pass, then the backward passes."""
    unique = find_unique_inputs(rows)
    modules = {name: model.module.get_submodule(name) for name in pass_.layers}
    results: dict[int, RowResult] = {}
    with recording_gradients(model.info, pass_.layers), capture_layers(modules) as captures:
        outputs = forward(model, make_inputs(model.info, unique.rows))
        for passes in _gather(_captured_passes(model.info, pass_.layers, captures, outputs, unique, rows)):
            results |= _results(passes, rows)
            large = _bytes_of(passes) >= LARGE_ROW_BYTES * sum(len(backward.rows) for backward, _ in passes)
            passes.clear()
            if large and device_for(model.info.device).is_cpu:
                process.release_free_memory()
    return in_row_order(results)


def run_curvature(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
    """Run one batch and differentiate twice: also compute the score's Hessian times the activations, at each layer."""
    unique = find_unique_inputs(rows)
    modules = {name: model.module.get_submodule(name) for name in pass_.layers}
    results: dict[int, RowResult] = {}
    # torch can differentiate fused attention only once.
    with torch.enable_grad(), PlainAttention(), capture_layers(modules) as captures:
        outputs = forward(model, make_inputs(model.info, unique.rows))
        for backward, scores in score_passes(outputs, unique, rows):
            # One layer after the other: the tensors of eight early layers of efficientnet_lite0 take 75 MiB.
            layers = (_differentiate_twice(model.info, captures, name, backward.at, scores) for name in pass_.layers)
            results |= _results([(backward, layers)], rows)
    return in_row_order(results)


def _captured_passes(
    info: ModelInfo,
    layers: Sequence[str],
    captures: Mapping[str, Capture],
    outputs: Outputs,
    unique: UniqueInputs,
    rows: Sequence[Row],
) -> Iterator[_CapturedPass]:
    """Run the backward passes of a batch, several together where that is faster, and yield each with its tensors."""
    if len(layers) == 1 and layers[0] in captures and can_join(outputs, unique, rows, captures[layers[0]]):
        capture, layout = _check_capture(info, captures, layers[0])
        for backward, gradients in run_joined_passes(outputs, unique, rows, capture):
            activations = to_grid(capture.activation, layout)[backward.at]
            yield backward, [LayerTensors(activations, to_grid(gradients, layout))]
        return
    for backward in run_backward_passes(outputs, unique, rows):
        yield backward, [take_tensors(info, captures, name, backward.at) for name in layers]


def _gather(captured: Iterable[_CapturedPass]) -> Iterator[list[_CapturedPass]]:
    """Gather backward passes until they have enough rows: a method costs less per row for many rows together."""
    passes: list[_CapturedPass] = []
    for each in captured:
        passes.append(each)
        rows = sum(len(backward.rows) for backward, _ in passes)
        if _bytes_of(passes) >= BYTES_TO_COMPUTE or rows >= ROWS_TO_COMPUTE:
            yield passes
            passes = []
    if passes:
        yield passes


def _bytes_of(passes: Sequence[_CapturedPass]) -> int:
    """Return the bytes of the activations and gradients of backward passes."""
    return sum(2 * layer.activations.nbytes for _, layers in passes for layer in layers)


def _results(
    passes: Sequence[tuple[BackwardPass, Iterable[LayerTensors]]], rows: Sequence[Row]
) -> dict[int, RowResult]:
    """Compute the maps of all rows of backward passes, layer by layer; return the results by row index."""
    joined = join_passes([backward for backward, _ in passes])
    pass_rows = [rows[index] for index in joined.rows]
    with_features = [position for position, row in enumerate(pass_rows) if row.features]
    nonzeros, computed, activations = list[Tensor](), list[list[_MethodMaps]](), list[list[Tensor]]()
    for parts in zip(*(tensors for _, tensors in passes), strict=True):
        layer = _join_tensors(parts)
        nonzeros.append(layer.nonzero)
        computed.append(_compute_maps(pass_rows, layer, joined.scores))
        activations.append([layer.activations[position] for position in with_features])
    pass_results, arrays = joined.fetch(
        [
            *nonzeros,
            *(maps.values for method_maps in computed for maps in method_maps),
            *(each for layers in zip(*activations, strict=True) for each in layers),
        ]
    )
    remaining = iter(arrays)  # in the same order
    nonzero = [next(remaining) for _ in nonzeros]
    maps_by_layer = [_maps_by_row(pass_rows, method_maps, remaining) for method_maps in computed]
    features = {position: tuple(next(remaining) for _ in nonzeros) for position in with_features}
    return {
        index: pass_results.row_result(
            position,
            tuple(maps[position] for maps in maps_by_layer),
            tuple(not layer[position] for layer in nonzero),
            features.get(position, ()),
        )
        for position, index in enumerate(joined.rows)
    }


def _join_tensors(parts: Sequence[LayerTensors]) -> LayerTensors:
    """Join the tensors of one layer in several backward passes.

    Hessian products are not joined: a pass that differentiates twice computes each backward pass alone.
    """
    if len(parts) == 1:
        return parts[0]
    activations = torch.cat([part.activations for part in parts])
    return LayerTensors(activations, torch.cat([part.gradients for part in parts]))


def take_tensors(info: ModelInfo, captures: Mapping[str, Capture], name: str, at: slice | Tensor) -> LayerTensors:
    """Return the tensors of a layer for some inputs, and clear its gradient for the next backward pass.

    Args:
        info: the model.
        captures: captures of the layers, by name.
        name: name of the layer.
        at: slice or indices of the inputs along the batch axis.
    """
    capture, layout = _check_capture(info, captures, name)
    gradient, capture.gradient = capture.gradient, None
    activations = to_grid(capture.activation, layout)[at]
    gradients = torch.zeros_like(activations) if gradient is None else to_grid(gradient, layout)[at]
    return LayerTensors(activations, gradients)


def _differentiate_twice(
    info: ModelInfo, captures: Mapping[str, Capture], name: str, at: slice | Tensor, scores: Tensor
) -> LayerTensors:
    """Return the tensors of a layer for some inputs, with the product H·A of each score's Hessian and activations."""
    capture, layout = _check_capture(info, captures, name)
    source = capture.source
    gradient = _gradient(scores.sum(), source, create_graph=True)
    hessian_product = _gradient((gradient * capture.activation).sum(), source, create_graph=False)
    return LayerTensors(
        to_grid(capture.activation, layout)[at],
        to_grid(gradient.detach(), layout)[at],
        to_grid(hessian_product.detach(), layout)[at],
    )


def _gradient(score: Tensor, source: Tensor, *, create_graph: bool) -> Tensor:
    """Return a gradient; zero if the score does not depend on the source.

    Args:
        score: the score, a scalar.
        source: the tensor with respect to which the gradient is taken.
        create_graph: True to record the gradient, so that it can be differentiated itself.

    Raises:
        FailedPrecondition: torch has no second derivative of an operation after the source.
    """
    if not score.requires_grad:
        return torch.zeros_like(source)
    try:
        grads = torch.autograd.grad(score, source, retain_graph=True, create_graph=create_graph, allow_unused=True)
    except RuntimeError as error:
        # torch has no error class for this: "derivative for aten::... is not implemented".
        if "derivative for" not in str(error):
            raise
        raise FailedPrecondition(f"the model cannot be differentiated twice after this layer: {error}") from error
    gradient = cast("Tensor | None", grads[0])
    return torch.zeros_like(source) if gradient is None else gradient


def _check_capture(info: ModelInfo, captures: Mapping[str, Capture], name: str) -> tuple[Capture, Layout]:
    """Return a layer's capture and layout.

    Raises:
        FailedPrecondition: the layer did not run, has no grid, or its output was overwritten.
    """
    layer, capture = info.layers.get(name), captures.get(name)
    if layer is None or capture is None:
        raise FailedPrecondition(f'layer "{name}" did not run')
    if layer.layout is None:
        raise FailedPrecondition(f'layer "{name}" cannot be explained: {layer.reason}')
    if not capture.intact():
        raise FailedPrecondition(f'the model overwrites the output of layer "{name}"')
    return capture, layer.layout


@dataclass(frozen=True, slots=True)
class _MethodMaps:
    """Maps of one method on one layer.

    Attributes:
        call: the method.
        positions: indices, in the joined backward passes, of the rows that request it.
        values: the maps of these rows [b,h,w], or other terms if the method averages over copies of the image.
    """

    call: MethodCall
    positions: list[int]
    values: Tensor


def _compute_maps(rows: Sequence[Row], tensors: LayerTensors, scores: Tensor) -> list[_MethodMaps]:
    """Compute the maps of every row's methods on one layer, each method once for all rows that request it."""
    methods: dict[Hashable, tuple[MethodCall, list[int]]] = {}
    for position, row in enumerate(rows):
        for call in row.calls:
            methods.setdefault(call.key, (call, []))[1].append(position)
    return [
        _MethodMaps(call, positions, _weigh(call, tensors, scores, positions)) for call, positions in methods.values()
    ]


def _maps_by_row(rows: Sequence[Row], computed: Sequence[_MethodMaps], arrays: Iterator[Map]) -> list[tuple[Map, ...]]:
    """Return each row's maps in the order of its methods.

    Args:
        rows: the rows.
        computed: the methods that were computed.
        arrays: for each of these methods, the maps of its rows.
    """
    maps: list[dict[Hashable, Map]] = [{} for _ in rows]
    for method_maps in computed:
        for position, heatmap in zip(method_maps.positions, next(arrays), strict=True):
            maps[position][method_maps.call.key] = heatmap
    return [tuple(by_method[call.key] for call in row.calls) for by_method, row in zip(maps, rows, strict=True)]


def _weigh(call: MethodCall, tensors: LayerTensors, scores: Tensor, positions: list[int]) -> Tensor:
    """Return a method's maps [b,h,w] of some rows.

    For a method with a `finish` of its own, return the values of any shape that are averaged over the image's copies.

    Raises:
        Internal: the method returned another shape.
    """
    method = method_of(Cam, call.name)
    device = device_for(scores.device)
    at = slice(None) if len(positions) == len(scores) else device.tensor(positions)  # a slice copies nothing
    options = {} if tensors.hessian_product is None else {"curvature": tensors.hessian_product[at]}
    activations = tensors.activations[at]
    values = method.weigh(activations, tensors.gradients[at], scores[at], **call.parameters, **options)
    if method.finish is not as_it_is:
        return values
    rows, channels, *grid = activations.shape
    if values.shape == (rows, *grid):
        return values
    if values.dim() != activations.dim() or (len(values), *values.shape[2:]) != (rows, *grid):
        expected = f"maps {[rows, *grid]} or each channel's terms {[rows, channels, *grid]}"
        raise wrong_shape(call.name, values.shape, expected)
    return principal(values) if call.eigen else values.sum(1)  # from the terms of each channel [b,C,h,w]
