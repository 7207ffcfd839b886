"""The pass without gradients: logits of images, whole or edited."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from camserve_server import targets
from camserve_server.core.devices import fetched
from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.batch import forward, inputs_of, resolve_targets, units_of
from camserve_server.engine.values import Row, RowResult
from camserve_server.models import LoadedModel
from camserve_server.models.hooks import silencing
from camserve_server.models.values import Pass


def run(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
    """Run one batch; a pass's layer is the one whose channels the rows' edits silence."""
    units = units_of(rows)
    # Not in inference mode: code compiled for the passes that differentiate would not take its tensors.
    with torch.no_grad(), _silenced(model, pass_, units.rows):
        outputs = forward(model, inputs_of(model.info, units.rows))
        outputs = outputs[units.index_of(range(len(rows)), outputs.values.device)]
        fixed, scores = resolve_targets(outputs, rows)
        found, *summaries = fetched([scores, *targets.summary(outputs)])
    return [RowResult(*one) for one in zip(summaries, fixed, found.tolist(), strict=True)]


def _silenced(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> AbstractContextManager[None]:
    if not pass_.layers:
        return nullcontext()
    (name,) = pass_.layers
    layout = model.info.layers[name].layout
    if layout is None:
        raise FailedPrecondition(f'layer "{name}" cannot be explained: {model.info.layers[name].reason}')
    return silencing(
        model.module.get_submodule(name), layout, [row.edit.silenced if row.edit else None for row in rows]
    )
