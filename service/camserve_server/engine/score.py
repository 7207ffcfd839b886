"""Run passes without gradients: the model's outputs for images, whole or edited, or with channels of a layer silenced.

Rows that silence channels of a layer for one image share everything up to that layer: the modules before it run once,
and those after it for all the rows. A trial decides for each layer whether the model allows that. Otherwise the whole
model runs for each row.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from camserve_server.core.devices import device_for, fetch_arrays
from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.batch import (
    UniqueInputs,
    find_unique_inputs,
    forward,
    make_inputs,
    read_outputs,
)
from camserve_server.engine.values import Row, RowResult
from camserve_server.models import LoadedModel
from camserve_server.models.hooks import output_of, replace_output, zero_channels
from camserve_server.models.outputs import Outputs, join_outputs
from camserve_server.models.values import Pass

ROUNDING = 0.02
"""The largest distance of two outputs that are equal but for rounding, as a share of their norm, in any precision."""


def run(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
    """Run one batch; if the pass has a layer, the rows' edits silence channels of it."""
    # Not in inference mode: code compiled for the passes that differentiate does not accept its tensors. It would save
    # nothing: no_grad took 0.98 to 1.02 of its time.
    with torch.no_grad():
        if pass_.layers:
            return _run_silenced(model, pass_, rows)
        unique = find_unique_inputs(rows)
        return _results(forward(model, make_inputs(model.info, unique.rows)), unique, rows)


def _results(outputs: Outputs, unique: UniqueInputs, rows: Sequence[Row]) -> list[RowResult]:
    """Return the results of rows, given the outputs for their distinct inputs."""
    outputs = outputs[unique.index_of(range(len(rows)), outputs.values.device)]
    fixed, scores, summaries_on_device = read_outputs(outputs, rows)
    score_array, *summaries = fetch_arrays([scores, *summaries_on_device])
    results = [RowResult(*result) for result in zip(summaries, fixed, score_array.tolist(), strict=True)]
    return [
        replace(result, class_map=_class_map(values)) if row.class_map else result
        for row, values, result in zip(rows, outputs.values, results, strict=True)
    ]


def _class_map(values: Tensor) -> NDArray[np.uint16]:
    """Return the class with the largest logit in each cell, uint16 [h,w], given the logits [classes,h,w]."""
    classes: NDArray[np.uint16] = values.argmax(0).cpu().numpy().astype(np.uint16)
    return classes


def _run_silenced(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
    """Run rows whose edits silence channels of a layer."""
    info, name = model.info, pass_.layers[0]
    layout = info.layers[name].layout
    if layout is None:
        raise FailedPrecondition(f'layer "{name}" cannot be explained: {info.layers[name].reason}')
    layer, shares = model.module.get_submodule(name), _shares_image(model, pass_, rows[0])
    unique, parts = find_unique_inputs(rows), list[Outputs]()  # an edit is an input of its own
    groups = _by_image(unique.rows) if shares else _few(unique.rows, info.rows_after()[name])
    for indices in groups:
        edits = [unique.rows[index] for index in indices]
        inputs = make_inputs(info, [_without_silence(row) for row in (edits[:1] if shares else edits)])
        with zero_channels(layer, layout, [row.edit.silenced if row.edit else None for row in edits]):
            parts.append(forward(model, inputs))
    places = {index: place for place, index in enumerate(itertools.chain.from_iterable(groups))}
    in_order = device_for(info.device).tensor([places[index] for index in range(len(places))])
    return _results(join_outputs(parts)[in_order], unique, rows)


def _without_silence(row: Row) -> Row:
    """Return a row without the part of its edit that silences a channel."""
    if row.edit is None or not (row.edit.keep is None and row.edit.fill is None):
        return row
    return replace(row, edit=None)


def _by_image(rows: Sequence[Row]) -> list[list[int]]:
    """Return the indices of the rows of each image."""
    by_image: dict[object, list[int]] = {}
    for index, row in enumerate(rows):
        by_image.setdefault(_without_silence(row).input, []).append(index)
    return list(by_image.values())


def _few(rows: Sequence[Row], share: int) -> list[list[int]]:
    """Return the indices of rows, at most a share of the batch at a time: it may have more rows than whole images."""
    size = max(1, len(rows) // share)
    return [list(range(start, min(start + size, len(rows)))) for start in range(0, len(rows), size)]


def _shares_image(model: LoadedModel, pass_: Pass, row: Row) -> bool:
    """Return whether the modules after a layer can run for several versions of its output; tried once for each layer.

    Args:
        model: the model.
        pass_: a pass that silences channels of the layer.
        row: row of the image to try it with.
    """
    name = pass_.layers[0]
    if pass_.interventions:  # the trial runs with them, so that it says nothing about other passes
        return model.info.layers[name].calls == 1 and _runs_versions(model, name, row)
    if name not in model.runs_versions:
        model.runs_versions[name] = model.info.layers[name].calls == 1 and _runs_versions(model, name, row)
    return model.runs_versions[name]


def _runs_versions(model: LoadedModel, name: str, row: Row) -> bool:
    """Try it with a layer's output and its negative: the outputs must be those of each version alone.

    It fails if later modules join tensors from before the layer to its output, or mix the images of a batch. It also
    fails if both versions have the same outputs, because the trial then shows nothing.
    """
    layer, image = model.module.get_submodule(name), make_inputs(model.info, [_without_silence(row)])

    def outputs(version: Tensor) -> Tensor:
        with replace_output(layer, version.clone()):  # the model may change it in place
            return forward(model, image).values

    try:
        output = output_of(model.module, name, image.to(model.dtype))
        first, second = outputs(output), outputs(-output)
        both = outputs(torch.cat([output, -output]))
    except Exception as error:  # a user's model may raise anything; it can run for each row
        if device_for(model.info.device).is_out_of_memory(error):
            raise
        return False
    return not _equal(first, second) and _equal(both, torch.cat([first, second]))


def _equal(some: Tensor, others: Tensor) -> bool:
    """Return whether outputs are equal but for rounding."""
    return some.shape == others.shape and bool((some - others).norm() <= ROUNDING * others.norm())
