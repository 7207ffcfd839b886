"""Score of each kind of target, as a differentiable tensor."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from camserve_server.core.devices import device_for, to_numpy
from camserve_server.models.outputs import OBJECT_COLUMNS, Outputs
from camserve_server.targets.geometry import overlaps
from camserve_server.targets.values import (
    ClassTarget,
    ContrastTarget,
    DetectionTarget,
    FinerTarget,
    MaskTarget,
    ProbabilityTarget,
    RankTarget,
    SegmentTarget,
    SimilarityTarget,
    TextTarget,
)

if TYPE_CHECKING:
    from camserve_server.core.arrays import Map, Mask
    from camserve_server.imaging.values import Box
    from camserve_server.models.values import TextHead

MIN_OVERLAP = 0.5
"""Smallest intersection over union at which a box in a copy of the image belongs to the same object."""

SAME_OVERLAP = 1e-4
"""Difference of two overlaps that may be due to rounding: another batch moves a box by this share at most."""


def logits(outputs: Outputs, targets: Sequence[ClassTarget | ContrastTarget]) -> Tensor:
    """Return the score [B] of each target in one step: logits of classes, differences of logits of contrasts."""
    values = outputs.values
    why = _pick(values, [t.index if isinstance(t, ClassTarget) else t.why for t in targets])
    if not any(isinstance(t, ContrastTarget) for t in targets):
        return why
    against = [t.why_not if isinstance(t, ContrastTarget) else 0 for t in targets]
    contrasts = device_for(values.device).tensor([isinstance(t, ContrastTarget) for t in targets], torch.bool)
    # `where`, not a product with 0: an infinite logit must not turn another row's score into NaN.
    return torch.where(contrasts, why - _pick(values, against), why)


def _pick(logits: Tensor, indices: Sequence[int]) -> Tensor:
    column = device_for(logits.device).tensor(indices).unsqueeze(1)
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
    """Return Σ_i p_i (y − α y_i) / Σ_i p_i, where p is the softmax, as in Zhang et al. 2025 and their code.

    The weights p_i / Σ p_i are the softmax over the other classes alone. The gradient passes through them too, as in
    the authors' code.
    """
    logits = outputs.values[place]
    others = logits[device_for(logits.device).tensor(target.against)]
    return logits[target.why] - target.weight * (others.softmax(0) * others).sum()


def similarity(outputs: Outputs, place: int, target: SimilarityTarget) -> Tensor:
    """Return the cosine of the angle between two embeddings."""
    embedding = outputs.embeddings()[place]
    reference = device_for(embedding.device).copied(torch.from_numpy(cast("Map", target.reference))).to(embedding)
    return functional.cosine_similarity(embedding, reference, dim=0)


def text(outputs: Outputs, place: int, target: TextTarget) -> Tensor:
    """Return the score that the model gives an image and a text."""
    return compare(outputs, place, _texts_on_device(outputs, cast("Map", target.embedding)[None]))[0]


def with_texts(outputs: Outputs, texts: "Map") -> Outputs:
    """Return the outputs for a batch of images as those of a classifier whose classes are texts.

    Args:
        outputs: outputs of a model that compares images with texts.
        texts: the texts' embeddings, of length 1, float32 [n,E].
    """
    on_device = _texts_on_device(outputs, texts)
    scores = torch.stack([compare(outputs, place, on_device) for place in range(len(outputs.values))])
    names = tuple(map(str, range(len(texts))))  # the texts themselves are not known here, nor needed
    return Outputs(outputs.info.with_texts(names), scores, outputs.embeddings())


def compare(outputs: Outputs, place: int, texts: Tensor) -> Tensor:
    """Return the scores [n] that the model gives an image and texts [n,E].

    Each image is computed alone, so that the rounding does not depend on the other images of the batch.
    """
    head, embedding = cast("TextHead", outputs.info.text), outputs.embeddings()[place]
    return texts @ functional.normalize(embedding, dim=0) * head.scale + head.bias


def _texts_on_device(outputs: Outputs, texts: "Map") -> Tensor:
    embeddings = outputs.embeddings()
    return device_for(embeddings.device).copied(torch.from_numpy(texts)).to(embeddings)


def segment(outputs: Outputs, place: int, target: SegmentTarget | MaskTarget) -> Tensor:
    """Return the mean logit of a class over a part of the image, less that of the class it is compared with."""
    logits = outputs.values[place, target.index]
    if isinstance(target, SegmentTarget) and target.against is not None:
        logits = logits - outputs.values[place, target.against]
    cells = torch.from_numpy(np.flatnonzero(cast("Mask", target.mask)))  # indexing with a mask would wait for the GPU
    total: Tensor = logits.flatten()[device_for(logits.device).copied(cells)].sum()
    return total / max(1, len(cells))  # a view of the image may contain nothing of the part


def detection(outputs: Outputs, place: int, target: DetectionTarget) -> Tensor:
    """Return the score of a target's object; 0 if the model detects no such object."""
    return detections(outputs[slice(place, place + 1)], [target])[0]


def detections(outputs: Outputs, targets: Sequence[DetectionTarget]) -> Tensor:
    """Return the score of each target's object, or its difference from another class; 0 if no such object is found."""
    object_scores = []
    # The objects of all images are copied to the host in one step and compared there.
    for values, objects, target in zip(outputs.values, to_numpy(outputs.values), targets, strict=True):
        overlap = overlaps(objects, cast("Box", target.box)) * (objects[:, 0] == target.index)
        is_detected = len(overlap) and overlap.max() >= MIN_OVERLAP
        score = _object_score(values[_best(overlap, target.rank)], target) if is_detected else values[:, 1].sum() * 0
        object_scores.append(score)
    return torch.stack(object_scores)


def _object_score(found: Tensor, target: DetectionTarget) -> Tensor:
    """Return an object's score, less its score in the class that the target is compared with."""
    return found[1] if target.against is None else found[1] - found[OBJECT_COLUMNS + target.against]


def similarity_of_best(objects: "Map", target: DetectionTarget) -> float:
    """Return the largest product of score and intersection over union with a target's object; 0 without any overlap.

    Args:
        objects: the detected objects, as in `Outputs.values`.
        target: the target, with the box of its object.
    """
    same = objects[objects[:, 0] == target.index]
    return float((same[:, 1] * overlaps(same, cast("Box", target.box))).max(initial=0))


def _best(overlap: "Map", rank: int | None) -> int:
    """Return the index of the object with the largest overlap: of equal ones the object itself, else the first."""
    if rank is not None and rank < len(overlap) and overlap[rank] >= overlap.max() - SAME_OVERLAP:
        return rank
    return int(overlap.argmax())


def unresolved(_outputs: Outputs, _place: int, target: RankTarget) -> Tensor:
    """Raise TypeError: `resolve` replaces a rank by the target of that rank before it is scored."""
    raise TypeError(f"the target of rank {target.rank} is not resolved")
