"""Targets that depend on what the model says of the image as it is: ranks, nearest classes, masks, boxes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from camserve_server.errors import FailedPrecondition
from camserve_server.outputs import Outputs
from camserve_server.targets.geometry import inside, overlaps, whole
from camserve_server.targets.summaries import covered, objects_of, order_of_areas, to_numpy
from camserve_server.types import (
    Box,
    ClassTarget,
    DetectionTarget,
    FinerTarget,
    FixedTarget,
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
    if said.info.task != "segment":  # whose values are many; others are looked at here, and not one by one over there
        said = replace(said, values=said.values.detach().cpu())
    return [_resolve(said, place, target) for place, target in enumerate(targets)]


def _resolve(said: Outputs, place: int, target: Target) -> FixedTarget:
    named = _ranked(said, place, target.rank) if isinstance(target, RankTarget) else target
    fix = _FIXES.get(type(named))
    return fix(said, place, named) if fix else named


def _ranked(said: Outputs, place: int, rank: int) -> FixedTarget:
    return _RANKS.get(said.info.task, _ranked_class)(said, place, rank)


def _ranked_class(said: Outputs, place: int, rank: int) -> FixedTarget:
    # Of equal logits the first, as in the list of predictions; NaN last. Not sorted: that takes eight times as long.
    falling = -said.values[place].numpy()
    found = np.partition(falling, rank)[rank]
    if np.isnan(found):
        return ClassTarget(int(falling.argsort(kind="stable")[rank]))
    return ClassTarget(int(np.flatnonzero(falling == found)[rank - np.count_nonzero(falling < found)]))


def _ranked_area(said: Outputs, place: int, rank: int) -> FixedTarget:
    found = order_of_areas(to_numpy(covered(said.values[place])), said.info)
    if rank >= len(found):
        raise FailedPrecondition(f"{said.info.name} sees only {_named(said.info, found)} in this image", field="top_k")
    return SegmentTarget(found[rank])


def _ranked_object(said: Outputs, place: int, rank: int) -> FixedTarget:
    objects = objects_of(to_numpy(said.values[place]))
    if rank >= len(objects):
        seen = f"only {len(objects)} objects" if len(objects) else "no object"
        raise FailedPrecondition(f"{said.info.name} finds {seen} in this image", field="top_k")
    return DetectionTarget(int(objects[rank, 0]), Box(*objects[rank, 2:].tolist()), found=True)


_RANKS: Mapping[Task, Callable[[Outputs, int, int], FixedTarget]] = {"segment": _ranked_area, "detect": _ranked_object}


def _fix_finer(said: Outputs, place: int, target: FinerTarget) -> FixedTarget:
    if target.against:
        return target
    logits = said.values[place]
    order = (logits - logits[target.why]).abs().argsort(stable=True).tolist()
    others = [index for index in order if index != target.why]
    return FinerTarget(target.why, tuple(others[:NEAREST]), target.weight)


def _fix_similarity(said: Outputs, place: int, target: SimilarityTarget) -> FixedTarget:
    if target.reference is not None:
        return target
    return SimilarityTarget(reference=to_numpy(said.embeddings()[place]))


def _fix_segment(said: Outputs, place: int, target: SegmentTarget) -> FixedTarget:
    if target.mask is not None:
        return target
    values = said.values[place]
    if target.box is not None:
        return SegmentTarget(target.index, target.box, inside(target.box, values.shape[1:], said.info.preprocess.size))
    mask = values.argmax(0) == target.index
    if not mask.any():
        found = order_of_areas(to_numpy(covered(values)), said.info)
        seen = f"no {_named(said.info, [target.index])} in this image, but {_named(said.info, found)}"
        raise FailedPrecondition(
            f"{said.info.name} sees {seen}: name the part to explain as a region",
            field="targets",
        )
    return SegmentTarget(target.index, None, mask.cpu().numpy())


def _fix_detection(said: Outputs, place: int, target: DetectionTarget) -> FixedTarget:
    if target.found:
        return target
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


_FIXES: Mapping[type, Callable[[Outputs, int, Any], FixedTarget]] = {
    FinerTarget: _fix_finer,
    SimilarityTarget: _fix_similarity,
    SegmentTarget: _fix_segment,
    DetectionTarget: _fix_detection,
}
