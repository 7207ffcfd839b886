"""Run passes over vectors: the outputs that a model's last linear layer gives them, without images."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import nn

from camserve_server.core.devices import device_for, fetch_arrays
from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.batch import in_precision
from camserve_server.engine.values import Row, RowResult
from camserve_server.models import LoadedModel
from camserve_server.models.values import Pass
from camserve_server.targets.values import ClassTarget

if TYPE_CHECKING:
    from camserve_server.core.arrays import Map


def run(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:  # noqa: ARG001 -- as every pass
    """Run one batch of vectors through the last linear layer. The rows' images and targets are not used.

    The logits of a vector are empty if the layer takes vectors of another length.
    """
    name = model.info.embedding
    layer = model.module.get_submodule(name) if name else None
    if not isinstance(layer, nn.Linear):
        raise FailedPrecondition(f"{model.info.name} does not end in a linear layer")
    vectors = [cast("Map", row.vector) for row in rows]
    fitting = [place for place, vector in enumerate(vectors) if len(vector) == layer.in_features]
    outputs = dict.fromkeys(range(len(rows)), np.empty(0, np.float32))
    if fitting:
        batch = torch.from_numpy(np.stack([vectors[place] for place in fitting]))
        with torch.no_grad(), in_precision(model):
            logits = layer(device_for(model.info.device).copied(batch).to(model.dtype)).float()
        (array,) = fetch_arrays([logits])
        outputs |= dict(zip(fitting, array, strict=True))
    return [RowResult(outputs[place], ClassTarget(0), 0.0) for place in range(len(rows))]
