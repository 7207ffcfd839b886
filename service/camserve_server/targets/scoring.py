"""From what a model answers to the score whose gradient is taken."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from camserve_server.devices import device_of, to_numpy
from camserve_server.outputs import Outputs
from camserve_server.targets.geometry import overlaps
from camserve_server.types import (
    Box,
    ClassTarget,
    ContrastTarget,
    DetectionTarget,
    FinerTarget,
    FixedTarget,
    Map,
    Mask,
    ProbabilityTarget,
    SegmentTarget,
    SimilarityTarget,
)

SAME = 0.5
"""Intersection over union from which on a box in a copy of the image is that of the same object."""


def scores(said: Outputs, targets: Sequence[FixedTarget]) -> Tensor:
    """Return the score [B] of each image.

    A class's score is its logit; a contrast's is the difference of two, so that every method answers "why this and not
    that" (Selvaraju et al. 2017, section 3.3 for Grad-CAM). The other targets say theirs in `types`.
    """
    if all(isinstance(target, ClassTarget | ContrastTarget) for target in targets):
        return _logits(said.values, cast("Sequence[ClassTarget | ContrastTarget]", targets))
    if any(isinstance(target, DetectionTarget) for target in targets):
        return _detections(said, cast("Sequence[DetectionTarget]", targets))
    return torch.stack([_SCORES[type(target)](said, place, target) for place, target in enumerate(targets)])


def _logits(logits: Tensor, targets: Sequence[ClassTarget | ContrastTarget]) -> Tensor:
    why = _pick(logits, [t.index if isinstance(t, ClassTarget) else t.why for t in targets])
    if not any(isinstance(t, ContrastTarget) for t in targets):
        return why
    against = [t.why_not if isinstance(t, ContrastTarget) else 0 for t in targets]
    contrasts = device_of(logits.device).tensor([isinstance(t, ContrastTarget) for t in targets], torch.bool)
    # Selected, not multiplied by 0: an infinite logit of one row must not reach another's score.
    return torch.where(contrasts, why - _pick(logits, against), why)


def _pick(logits: Tensor, indices: Sequence[int]) -> Tensor:
    column = device_of(logits.device).tensor(indices).unsqueeze(1)
    return logits.gather(1, column).squeeze(1)


def _logit(said: Outputs, place: int, target: ClassTarget) -> Tensor:
    return said.values[place, target.index]


def _difference(said: Outputs, place: int, target: ContrastTarget) -> Tensor:
    return said.values[place, target.why] - said.values[place, target.why_not]


def _probability(said: Outputs, place: int, target: ProbabilityTarget) -> Tensor:
    logits = said.values[place]
    return logits[target.index].sigmoid() if target.apart else logits.softmax(0)[target.index]


def _finer(said: Outputs, place: int, target: FinerTarget) -> Tensor:
    """Return Σ_i p_i (y − α y_i) / Σ_i p_i, p being the softmax: Zhang et al. 2025, and their code.

    The weights p_i / Σ p_i are the softmax over the others alone. The gradient goes through them too, as in the
    authors' code.
    """
    logits = said.values[place]
    others = logits[device_of(logits.device).tensor(target.against)]
    return logits[target.why] - target.weight * (others.softmax(0) * others).sum()


def _similarity(said: Outputs, place: int, target: SimilarityTarget) -> Tensor:
    embedding = said.embeddings()[place]
    reference = device_of(embedding.device).copied(torch.from_numpy(cast("Map", target.reference))).to(embedding)
    return functional.cosine_similarity(embedding, reference, dim=0)


def _segment(said: Outputs, place: int, target: SegmentTarget) -> Tensor:
    logits = said.values[place, target.index]
    cells = torch.from_numpy(np.flatnonzero(cast("Mask", target.mask)))  # of a mask, a GPU would wait for their number
    total: Tensor = logits.flatten()[device_of(logits.device).copied(cells)].sum()
    return total / max(1, len(cells))  # a view of the image may show nothing of the part


def _detections(said: Outputs, targets: Sequence[DetectionTarget]) -> Tensor:
    """Return the score of each target's object; 0 where the model finds no such object."""
    found = []
    # Objects are read for all images at once, and compared on the host.
    for values, objects, target in zip(said.values, to_numpy(said.values), targets, strict=True):
        shares = overlaps(objects[:, 2:], cast("Box", target.box)) * (objects[:, 0] == target.index)
        there = len(shares) and shares.max() >= SAME
        found.append(values[int(shares.argmax()), 1] if there else values[:, 1].sum() * 0)
    return torch.stack(found)


_SCORES: Mapping[type, Callable[[Outputs, int, Any], Tensor]] = {
    ClassTarget: _logit,
    ContrastTarget: _difference,
    ProbabilityTarget: _probability,
    FinerTarget: _finer,
    SimilarityTarget: _similarity,
    SegmentTarget: _segment,
}
