"""The kinds of target: what can be done with the targets of each kind, as functions of a frozen value."""

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
    ProbabilityTarget,
    RankTarget,
    SegmentTarget,
    SimilarityTarget,
    Target,
)

Scale: TypeAlias = Literal["logit", "log-odds", "probability", "other"]
"""What a score is: a class's logit, a difference of logits, a probability, or a number without bounds of its own."""


def _nothing(_target: Any) -> None:
    return None


def _reads_nothing(_target: Any) -> Reads:
    return Reads.NOTHING


@dataclass(frozen=True, slots=True)
class TargetKind:
    """What can be done with the targets of one kind.

    Attributes:
        name: of the kind.
        score: outputs, place in the batch, target -> the score, a tensor without axes.
        batch_scores: outputs, one target for each image -> the scores [B], for batches in which all targets have this
            function in common; None where they are computed one by one.
        scale: of the score.
        resolve: outputs in the host's memory, place, target -> the target that no longer depends on the model's
            prediction; None for targets that never do.
        reads: target -> the outputs that `resolve` needs beside the values.
        in_view: target, view of the image, height and width of the input -> the target in that view; None for targets
            that have no place in the image.
        class_index: target -> the class that is explained; None where there is none.
        contrasted: target -> the class that it is explained against, for a contrast of two.
        box: target -> the part of the image that it names.
        compared: target -> the comparison with another image whose embedding is still to be computed.
    """

    name: str
    score: Callable[[Outputs, int, Any], Tensor]
    scale: Scale = "other"
    batch_scores: Callable[[Outputs, Sequence[Any]], Tensor] | None = None
    resolve: Callable[[HostOutputs, int, Any], FixedTarget] | None = None
    reads: Callable[[Any], Reads] = _reads_nothing
    in_view: Callable[[Any, View, tuple[int, int]], FixedTarget] | None = None
    class_index: Callable[[Any], int | None] = attrgetter("index")
    contrasted: Callable[[Any], int | None] = _nothing
    box: Callable[[Any], Box | None] = _nothing
    compared: Callable[[Any], SimilarityTarget | None] = _nothing


_KINDS: Mapping[type[Target], TargetKind] = {
    ClassTarget: TargetKind("class", scoring.logit, "logit", scoring.logits),
    RankTarget: TargetKind(
        "rank", scoring.unresolved, resolve=fixing.rank, reads=fixing.reads_of_rank, class_index=_nothing
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
        class_index=_nothing,
        compared=fixing.comparison,
    ),
    SegmentTarget: TargetKind(
        "segment",
        scoring.segment,
        resolve=fixing.segment,
        reads=fixing.reads_of_segment,
        in_view=geometry.segment_in_view,
        box=attrgetter("box"),
    ),
    DetectionTarget: TargetKind(
        "detection",
        scoring.detection,
        "probability",
        scoring.detections,
        resolve=fixing.detection,
        in_view=geometry.detection_in_view,
        box=attrgetter("box"),
    ),
}


def kind_of(target: Target) -> TargetKind:
    """Return a target's kind."""
    return _KINDS[type(target)]


def with_box(target: Target, box: Box) -> Target:
    """Return a target that names a part of the image, with that part at another place."""
    return replace(cast("SegmentTarget | DetectionTarget", target), box=box)


def scores(outputs: Outputs, targets: Sequence[FixedTarget]) -> Tensor:
    """Return the score [B] of each image.

    A class's score is its logit; a contrast's is the difference of two, so that every method answers "why this and not
    that" (Selvaraju et al. 2017, section 3.3 for Grad-CAM). The other targets say theirs in `types`.
    """
    kinds = [kind_of(target) for target in targets]
    together = kinds[0].batch_scores
    if together is not None and all(kind.batch_scores is together for kind in kinds):
        return together(outputs, targets)
    return torch.stack(
        [kind.score(outputs, place, target) for place, (kind, target) in enumerate(zip(kinds, targets, strict=True))]
    )


def resolve(outputs: Outputs, targets: Sequence[Target]) -> list[FixedTarget]:
    """Fix targets that depend on what the model says of the image: ranks, nearest classes, masks, boxes.

    Args:
        outputs: of B images, one for each target.
        targets: B of them.

    Raises:
        FailedPrecondition: the model sees nothing of what is to be explained in this image.
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
    """Return a target as it is in a view of the image: its part or its box is elsewhere there.

    Args:
        target: fixed.
        views: of the image, the second of the first and so on.
        size: height and width of the model's input.
    """
    if in_view := kind_of(target).in_view:
        for view in views:
            target = in_view(target, view, size)
    return target
