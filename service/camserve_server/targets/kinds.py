"""The kinds of target: a frozen value for each, made of the functions for its targets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from camserve_server.imaging.values import Box, View
from camserve_server.models.outputs import Outputs
from camserve_server.targets import fixing, geometry, scoring
from camserve_server.targets.fixing import HostOutputs, Reads
from camserve_server.targets.values import (
    ClassTarget,
    ContrastTarget,
    DetectionTarget,
    FinerTarget,
    FixedTarget,
    MaskTarget,
    ProbabilityTarget,
    RankTarget,
    SegmentTarget,
    SimilarityTarget,
    Target,
    TextTarget,
)

Scale: TypeAlias = Literal["logit", "log-odds", "probability", "other"]
"""Meaning of a score: a class's logit, a difference of logits, a probability, or any other number."""


def _no_value(_target: Any) -> None:
    return None


def _no_label(_target: Any) -> str:
    return ""


def _no_file(_target: Any) -> bytes:
    return b""


def _no_reads(_target: Any) -> Reads:
    return Reads.NOTHING


@dataclass(frozen=True, slots=True)
class TargetKind:
    """Functions for the targets of one kind.

    Attributes:
        name: name of the kind.
        score: outputs, place in the batch, target -> the score, a tensor without axes.
        batch_scores: outputs, one target for each image -> the scores [B], for batches whose targets all have this
            function; None if scores are computed one by one.
        scale: meaning of the score.
        resolve: outputs in the host's memory, place, target -> the target that no longer depends on the model's
            prediction; None for targets that never depend on it.
        reads: target -> the outputs that `resolve` needs besides the values.
        in_view: target, view of the image, height and width of the input -> the target in that view; None for targets
            without a place in the image.
        class_index: target -> the explained class, or None.
        contrasted: target -> the class to explain against in a contrast of two, or None.
        box: target -> the box that it names in the image, or None.
        file: target -> the image file of its own that it has until that is decoded, else an empty one.
        compared: target -> the target itself while the embedding of its other image is unknown, else None.
        label: target -> label of the prediction for targets without a class.
        text: target -> the target itself while the embedding of its text is unknown, else None.
    """

    name: str
    score: Callable[[Outputs, int, Any], Tensor]
    scale: Scale = "other"
    batch_scores: Callable[[Outputs, Sequence[Any]], Tensor] | None = None
    resolve: Callable[[HostOutputs, int, Any], FixedTarget] | None = None
    reads: Callable[[Any], Reads] = _no_reads
    in_view: Callable[[Any, View, tuple[int, int]], FixedTarget] | None = None
    class_index: Callable[[Any], int | None] = attrgetter("index")
    contrasted: Callable[[Any], int | None] = _no_value
    box: Callable[[Any], Box | None] = _no_value
    file: Callable[[Any], bytes] = _no_file
    compared: Callable[[Any], SimilarityTarget | None] = _no_value
    label: Callable[[Any], str] = _no_label
    text: Callable[[Any], TextTarget | None] = _no_value


_KINDS: Mapping[type[Target], TargetKind] = {
    ClassTarget: TargetKind("class", scoring.logit, "logit", scoring.logits),
    RankTarget: TargetKind(
        "rank", scoring.unresolved, resolve=fixing.rank, reads=fixing.reads_of_rank, class_index=_no_value
    ),
    ContrastTarget: TargetKind(
        "contrast",
        scoring.difference,
        "log-odds",
        scoring.logits,
        class_index=attrgetter("why"),
        contrasted=attrgetter("why_not"),
    ),
    ProbabilityTarget: TargetKind("probability", scoring.probability, "probability"),
    FinerTarget: TargetKind("finer", scoring.finer, "log-odds", resolve=fixing.finer, class_index=attrgetter("why")),
    SimilarityTarget: TargetKind(
        "similarity",
        scoring.similarity,
        resolve=fixing.similarity,
        reads=fixing.reads_of_similarity,
        class_index=_no_value,
        file=attrgetter("file"),
        compared=fixing.comparison,
        label=lambda _target: "similarity",
    ),
    TextTarget: TargetKind(
        "text", scoring.text, class_index=_no_value, label=attrgetter("text"), text=fixing.unread_text
    ),
    SegmentTarget: TargetKind(
        "segment",
        scoring.segment,
        resolve=fixing.segment,
        reads=fixing.reads_of_segment,
        in_view=geometry.segment_in_view,
        contrasted=attrgetter("against"),
        box=attrgetter("box"),
    ),
    MaskTarget: TargetKind(
        "mask",
        scoring.segment,
        resolve=fixing.mask,
        in_view=geometry.segment_in_view,
        file=attrgetter("file"),
    ),
    DetectionTarget: TargetKind(
        "detection",
        scoring.detection,
        "probability",
        scoring.detections,
        resolve=fixing.detection,
        in_view=geometry.detection_in_view,
        contrasted=attrgetter("against"),
        box=attrgetter("box"),
    ),
}


def kind_of(target: Target) -> TargetKind:
    """Return a target's kind."""
    return _KINDS[type(target)]


def with_box(target: Target, box: Box) -> Target:
    """Return a segment or detection target with another box."""
    return replace(cast("SegmentTarget | DetectionTarget", target), box=box)


def scores(outputs: Outputs, targets: Sequence[FixedTarget]) -> Tensor:
    """Return the score [B] of each image.

    A class's score is its logit. A contrast's is the difference of two logits, so that every method can explain "why
    this and not that" (Selvaraju et al. 2017, section 3.3, for Grad-CAM). `values` documents the scores of the others.
    """
    kinds = [kind_of(target) for target in targets]
    batch_scores = kinds[0].batch_scores
    if batch_scores is not None and all(kind.batch_scores is batch_scores for kind in kinds):
        return batch_scores(outputs, targets)
    return torch.stack(
        [kind.score(outputs, place, target) for place, (kind, target) in enumerate(zip(kinds, targets, strict=True))]
    )


def resolve(outputs: Outputs, targets: Sequence[Target]) -> list[FixedTarget]:
    """Resolve targets that depend on the model's prediction: ranks, nearest classes, masks, boxes.

    Args:
        outputs: outputs for B images, one for each target.
        targets: B targets.

    Raises:
        FailedPrecondition: the model detects no such class or object in an image.
    """
    kinds = [kind_of(target) for target in targets]
    if all(kind.resolve is None for kind in kinds):
        return cast("list[FixedTarget]", list(targets))
    host = fixing.read(outputs, [kind.reads(target) for kind, target in zip(kinds, targets, strict=True)])
    return [
        kind.resolve(host, place, target) if kind.resolve else cast("FixedTarget", target)
        for place, (kind, target) in enumerate(zip(kinds, targets, strict=True))
    ]


def seen_in(target: FixedTarget, views: Sequence[View], size: tuple[int, int]) -> FixedTarget:
    """Return a target with its mask or box at its place in a view of the image.

    Args:
        target: the resolved target.
        views: views to apply one after another.
        size: height and width of the model's input.
    """
    if in_view := kind_of(target).in_view:
        for view in views:
            target = in_view(target, view, size)
    return target
