"""Run passes over texts: the embedding of each, by the text side of a model that compares images with texts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from camserve_server.core.devices import fetch_arrays
from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.batch import in_precision
from camserve_server.engine.values import Row, RowResult
from camserve_server.models import LoadedModel
from camserve_server.models.values import Pass

if TYPE_CHECKING:
    from camserve_server.targets.values import TextTarget


def run(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:  # noqa: ARG001 -- as every pass
    """Run one batch: one forward pass over its distinct texts. The rows' images are not used."""
    if model.text is None:
        raise FailedPrecondition(f"{model.info.name} takes no texts", field="targets")
    targets = [cast("TextTarget", row.target) for row in rows]
    places = {text: place for place, text in enumerate(dict.fromkeys(target.text for target in targets))}
    with torch.no_grad(), in_precision(model):
        embeddings = model.text.embed(list(places))
    (array,) = fetch_arrays([embeddings])
    found = [array[places[target.text]] for target in targets]
    return [
        RowResult(embedding, replace(target, embedding=embedding), 0.0)
        for target, embedding in zip(targets, found, strict=True)
    ]
