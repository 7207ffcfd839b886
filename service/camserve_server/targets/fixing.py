"""Targets that depend on what the model says of the image as it is: ranks, nearest classes, masks, boxes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch

from camserve_server.devices import fetched, to_numpy
from camserve_server.errors import FailedPrecondition
from camserve_server.outputs import Outputs
from camserve_server.targets.geometry import inside, overlaps, whole
from camserve_server.targets.summaries import covered, objects_of, order_of_areas
from camserve_server.types import (
    Box,
    ClassTarget,
    DetectionTarget,
    FinerTarget,
    FixedTarget,
    Map,
    ModelInfo,
    RankTarget,
    SegmentTarget,
    SimilarityTarget,
    Target,
    Task,
)

NEAREST = 3
"""Classes that one is explained against: Zhang et al. 2025."""

SHOWN = 8  # classes that an error lists


def anything(info: ModelInfo) -> Target:
    """Return a target that every image has, whatever the model sees in it."""
    all_of_it = whole(info.preprocess.size)
    others: Mapping[Task, Target] = {
        "segment": SegmentTarget(0, all_of_it),
        "detect": DetectionTarget(0, all_of_it, found=True),
        "embed": SimilarityTarget(),
    }
    return others.get(info.task, RankTarget(0))


def resolve(said: Outputs, targets: Sequence[Target]) -> list[FixedTarget]:
    """Fix targets that depend on what the model says of the image: ranks, nearest classes, masks, boxes.

    Args:
        said: of B images, one for each target.
        targets: B of them.

    Raises:
        FailedPrecondition: the model sees nothing of what is to be explained in this image.
    """
    if all(type(target) is ClassTarget for target in targets):
        return cast("list[FixedTarget]", list(targets))
    seen = _seen(said, targets)
    return [_resolve(seen, place, target) for place, target in enumerate(targets)]


@dataclass(frozen=True, slots=True)
class _Seen:
    """The values of a model's answer that are needed to fix targets.

    Attributes:
        said: what the model answered; in the host's memory, unless it is of every pixel.
        areas: of the images whose target is the rank of an area, by place: share, probability and logit of each class.
        winners: of the images in which a class is to be found, by place: the class of each pixel [h,w].
    """

    said: Outputs
    areas: dict[int, Map] = field(default_factory=dict)
    winners: dict[int, Map] = field(default_factory=dict)


def _seen(said: Outputs, targets: Sequence[Target]) -> _Seen:
    """Read what is needed to fix some targets, by one copy from the device."""
    values = said.values.detach()
    if said.info.task == "segment":  # whose values are too many to be read
        ranked = [place for place, target in enumerate(targets) if isinstance(target, RankTarget)]
        found = [place for place, target in enumerate(targets) if place in ranked or _is_to_be_found(target)]
        read = fetched([*(covered(values[place]) for place in ranked), *(values[place].argmax(0) for place in found)])
        areas, winners = read[: len(ranked)], read[len(ranked) :]
        return _Seen(said, dict(zip(ranked, areas, strict=True)), dict(zip(found, winners, strict=True)))
    similar = any(isinstance(target, SimilarityTarget) for target in targets) and said.info.task != "embed"
    host, *embeddings = map(torch.from_numpy, fetched([values, *([said.embeddings()] if similar else [])]))
    return _Seen(replace(said, values=host, embedding=embeddings[0] if embeddings else None))


def _is_to_be_found(target: Target) -> bool:
    return isinstance(target, SegmentTarget) and target.mask is None and target.box is None


def _resolve(seen: _Seen, place: int, target: Target) -> FixedTarget:
    named = _ranked(seen, place, target.rank) if isinstance(target, RankTarget) else target
    fix = _FIXES.get(type(named))
    return fix(seen, place, named) if fix else named


def _ranked(seen: _Seen, place: int, rank: int) -> FixedTarget:
    return _RANKS.get(seen.said.info.task, _ranked_class)(seen, place, rank)


def _ranked_class(seen: _Seen, place: int, rank: int) -> FixedTarget:
    # Of equal logits the first, as in the list of predictions; NaN last. Not sorted: that takes eight times as long.
    falling = -seen.said.values[place].numpy()
    found = np.partition(falling, rank)[rank]
    if np.isnan(found):
        return ClassTarget(int(falling.argsort(kind="stable")[rank]))
    return ClassTarget(int(np.flatnonzero(falling == found)[rank - np.count_nonzero(falling < found)]))


def _ranked_area(seen: _Seen, place: int, rank: int) -> FixedTarget:
    said = seen.said
    found = order_of_areas(seen.areas[place], said.info)
    if rank >= len(found):
        raise FailedPrecondition(f"{said.info.name} sees only {_named(said.info, found)} in this image", field="top_k")
    return SegmentTarget(found[rank])


def _ranked_object(seen: _Seen, place: int, rank: int) -> FixedTarget:
    said = seen.said
    objects = objects_of(to_numpy(said.values[place]))
    if rank >= len(objects):
        shown = f"only {len(objects)} objects" if len(objects) else "no object"
        raise FailedPrecondition(f"{said.info.name} finds {shown} in this image", field="top_k")
    return DetectionTarget(int(objects[rank, 0]), Box(*objects[rank, 2:].tolist()), found=True)


_RANKS: Mapping[Task, Callable[[_Seen, int, int], FixedTarget]] = {"segment": _ranked_area, "detect": _ranked_object}


def _fix_finer(seen: _Seen, place: int, target: FinerTarget) -> FixedTarget:
    if target.against:
        return target
    logits = seen.said.values[place]
    order = (logits - logits[target.why]).abs().argsort(stable=True).tolist()
    others = [index for index in order if index != target.why]
    return FinerTarget(target.why, tuple(others[:NEAREST]), target.weight)


def _fix_similarity(seen: _Seen, place: int, target: SimilarityTarget) -> FixedTarget:
    if target.reference is not None:
        return target
    return SimilarityTarget(reference=to_numpy(seen.said.embeddings()[place]))


def _fix_segment(seen: _Seen, place: int, target: SegmentTarget) -> FixedTarget:
    if target.mask is not None:
        return target
    said = seen.said
    values = said.values[place]
    if target.box is not None:
        return SegmentTarget(target.index, target.box, inside(target.box, values.shape[1:], said.info.preprocess.size))
    mask = seen.winners[place] == target.index
    if not mask.any():
        found = order_of_areas(to_numpy(covered(values)), said.info)
        shown = f"no {_named(said.info, [target.index])} in this image, but {_named(said.info, found)}"
        raise FailedPrecondition(
            f"{said.info.name} sees {shown}: name the part to explain as a region",
            field="targets",
        )
    return SegmentTarget(target.index, None, mask)


def _fix_detection(seen: _Seen, place: int, target: DetectionTarget) -> FixedTarget:
    if target.found:
        return target
    said = seen.said
    objects = objects_of(to_numpy(said.values[place]))
    mine = objects[objects[:, 0] == target.index]
    wanted = _named(said.info, [target.index])
    if not len(mine):
        found = _named(said.info, list(dict.fromkeys(objects[:, 0].astype(int).tolist()))) or "no object at all"
        raise FailedPrecondition(f"{said.info.name} finds no {wanted} in this image, but {found}", field="targets")
    shares = np.ones(len(mine)) if target.box is None else overlaps(mine[:, 2:], target.box)
    if not shares.any():
        raise FailedPrecondition(f"{said.info.name} finds no {wanted} that meets the box", field="targets")
    return DetectionTarget(target.index, Box(*mine[shares.argmax(), 2:].tolist()), found=True)


def _named(info: ModelInfo, indices: Sequence[int]) -> str:
    names = [f'"{info.label(index)}"' if info.label(index) else f"class {index}" for index in indices[:SHOWN]]
    return ", ".join(names) + (f" and {len(indices) - SHOWN} more" if len(indices) > SHOWN else "")


_FIXES: Mapping[type, Callable[[_Seen, int, Any], FixedTarget]] = {
    FinerTarget: _fix_finer,
    SimilarityTarget: _fix_similarity,
    SegmentTarget: _fix_segment,
    DetectionTarget: _fix_detection,
}
