"""The score of each kind of target, as a tensor whose gradient can be taken."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from camserve_server.core.devices import device_of, to_numpy
from camserve_server.models.outputs import Outputs
from camserve_server.targets.geometry import overlaps
from camserve_server.targets.values import (
    ClassTarget,
    ContrastTarget,
    DetectionTarget,
    FinerTarget,
    ProbabilityTarget,
    RankTarget,
    SegmentTarget,
    SimilarityTarget,
)

if TYPE_CHECKING:
    from camserve_server.core.arrays import Map, Mask
    from camserve_server.imaging.values import Box

SAME = 0.5
"""Intersection over union from which on a box in a copy of the image is that of the same object."""


def logits(outputs: Outputs, targets: Sequence[ClassTarget | ContrastTarget]) -> Tensor:
    """Return the logits [B] of classes, and the differences of logits of contrasts, in one step."""
    values = outputs.values
    why = _pick(values, [t.index if isinstance(t, ClassTarget) else t.why for t in targets])
    if not any(isinstance(t, ContrastTarget) for t in targets):
        return why
    against = [t.why_not if isinstance(t, ContrastTarget) else 0 for t in targets]
    contrasts = device_of(values.device).tensor([isinstance(t, ContrastTarget) for t in targets], torch.bool)
    # Selected, not multiplied by 0: an infinite logit of one row must not reach another's score.
    return torch.where(contrasts, why - _pick(values, against), why)


def _pick(logits: Tensor, indices: Sequence[int]) -> Tensor:
    column = device_of(logits.device).tensor(indices).unsqueeze(1)
    return logits.gather(1, column).squeeze(1)


def logit(outputs: Outputs, place: int, target: ClassTarget) -> Tensor:
    """Return the logit of a class."""
    return outputs.values[place, target.index]


def difference(outputs: Outputs, place: int, target: ContrastTarget) -> Tensor:
    """Return the logit of one class minus that of another."""
    return outputs.values[place, target.why] - outputs.values[place, target.why_not]


def probability(outputs: Outputs, place: int, target: ProbabilityTarget) -> Tensor:
    """Return the probability of a class: its sigmoid or softmax."""
    logits = outputs.values[place]
    return logits[target.index].sigmoid() if target.apart else logits.softmax(0)[target.index]


def finer(outputs: Outputs, place: int, target: FinerTarget) -> Tensor:
    """Return Σ_i p_i (y − α y_i) / Σ_i p_i, p being the softmax: Zhang et al. 2025, and their code.

    The weights p_i / Σ p_i are the softmax over the others alone. The gradient goes through them too, as in the
    authors' code.
    """
    logits = outputs.values[place]
    others = logits[device_of(logits.device).tensor(target.against)]
    return logits[target.why] - target.weight * (others.softmax(0) * others).sum()


def similarity(outputs: Outputs, place: int, target: SimilarityTarget) -> Tensor:
    """Return the cosine of the angle between two embeddings."""
    embedding = outputs.embeddings()[place]
    reference = device_of(embedding.device).copied(torch.from_numpy(cast("Map", target.reference))).to(embedding)
    return functional.cosine_similarity(embedding, reference, dim=0)


def segment(outputs: Outputs, place: int, target: SegmentTarget) -> Tensor:
    """Return the mean logit of a class over a part of the image."""
    logits = outputs.values[place, target.index]
    cells = torch.from_numpy(np.flatnonzero(cast("Mask", target.mask)))  # of a mask, a GPU would wait for their number
    total: Tensor = logits.flatten()[device_of(logits.device).copied(cells)].sum()
    return total / max(1, len(cells))  # a view of the image may show nothing of the part


def detection(outputs: Outputs, place: int, target: DetectionTarget) -> Tensor:
    """Return the score of a target's object; 0 where the model finds no such object."""
    return detections(outputs[slice(place, place + 1)], [target])[0]


def detections(outputs: Outputs, targets: Sequence[DetectionTarget]) -> Tensor:
    """Return the score of each target's object; 0 where the model finds no such object."""
    found = []
    # Objects are read for all images at once, and compared on the host.
    for values, objects, target in zip(outputs.values, to_numpy(outputs.values), targets, strict=True):
        shares = overlaps(objects[:, 2:], cast("Box", target.box)) * (objects[:, 0] == target.index)
        there = len(shares) and shares.max() >= SAME
        found.append(values[int(shares.argmax()), 1] if there else values[:, 1].sum() * 0)
    return torch.stack(found)


def unresolved(_outputs: Outputs, _place: int, target: RankTarget) -> Tensor:
    """Refuse to score a rank, which `resolve` replaces by what has that rank."""
    raise TypeError(f"the target of rank {target.rank} is not resolved")
