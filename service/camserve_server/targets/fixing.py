"""Resolving targets that depend on the prediction for the unchanged image: ranks, nearest classes, masks, boxes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Flag, auto

import numpy as np
import torch

from camserve_server.core.arrays import Map
from camserve_server.core.devices import fetched, to_numpy
from camserve_server.core.errors import FailedPrecondition
from camserve_server.imaging.values import Box
from camserve_server.models.outputs import Outputs
from camserve_server.models.values import ModelInfo, Task
from camserve_server.targets.geometry import inside, overlaps, whole
from camserve_server.targets.summaries import covered, objects_of, order_of_areas
from camserve_server.targets.values import (
    ClassTarget,
    DetectionTarget,
    FinerTarget,
    FixedTarget,
    RankTarget,
    SegmentTarget,
    SimilarityTarget,
    Target,
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


class Reads(Flag):
    """The outputs that resolving a target needs, beside the values: read from the device in one step for a batch.

    Attributes:
        AREAS: of a segmentation, the share, probability and logit of each class.
        WINNERS: of a segmentation, the class of each pixel.
        EMBEDDING: of the image.
    """

    NOTHING = 0
    AREAS = auto()
    WINNERS = auto()
    EMBEDDING = auto()


@dataclass(frozen=True, slots=True)
class HostOutputs:
    """The outputs of a model that are needed to resolve targets.

    Attributes:
        outputs: of the model; in the host's memory, unless they are of every pixel.
        areas: of the images whose target is the rank of an area, by place: share, probability and logit of each class.
        winners: of the images in which a class is to be found, by place: the class of each pixel [h,w].
    """

    outputs: Outputs
    areas: dict[int, Map] = field(default_factory=dict)
    winners: dict[int, Map] = field(default_factory=dict)


def read(outputs: Outputs, reads: Sequence[Reads]) -> HostOutputs:
    """Copy to the host what is needed to resolve targets, in one step; `reads` says what each image's target needs."""
    values = outputs.values.detach()
    if outputs.info.task == "segment":  # whose values are too many to be read
        ranked, found = (
            [place for place, one in enumerate(reads) if wanted in one] for wanted in (Reads.AREAS, Reads.WINNERS)
        )
        arrays = fetched([*(covered(values[place]) for place in ranked), *(values[place].argmax(0) for place in found)])
        areas, winners = arrays[: len(ranked)], arrays[len(ranked) :]
        return HostOutputs(outputs, dict(zip(ranked, areas, strict=True)), dict(zip(found, winners, strict=True)))
    similar = any(Reads.EMBEDDING in one for one in reads) and outputs.info.task != "embed"
    host, *embeddings = map(torch.from_numpy, fetched([values, *([outputs.embeddings()] if similar else [])]))
    return HostOutputs(replace(outputs, values=host, embedding=embeddings[0] if embeddings else None))


def reads_of_rank(_target: RankTarget) -> Reads:
    """Return what a rank needs: the areas of the classes, and where the class of that rank is."""
    return Reads.AREAS | Reads.WINNERS


def rank(host: HostOutputs, place: int, target: RankTarget) -> FixedTarget:
    """Return the class, part or object of that rank."""
    return _RANKS.get(host.outputs.info.task, _ranked_class)(host, place, target.rank)


def _ranked_class(host: HostOutputs, place: int, rank: int) -> FixedTarget:
    # Of equal logits the first, as in the list of predictions; NaN last. Not sorted: that takes eight times as long.
    falling = -host.outputs.values[place].numpy()
    found = np.partition(falling, rank)[rank]
    if np.isnan(found):
        return ClassTarget(int(falling.argsort(kind="stable")[rank]))
    return ClassTarget(int(np.flatnonzero(falling == found)[rank - np.count_nonzero(falling < found)]))


def _ranked_area(host: HostOutputs, place: int, rank: int) -> FixedTarget:
    info = host.outputs.info
    found = order_of_areas(host.areas[place], info)
    if rank >= len(found):
        raise FailedPrecondition(f"{info.name} sees only {_named(info, found)} in this image", field="top_k")
    return segment(host, place, SegmentTarget(found[rank]))


def _ranked_object(host: HostOutputs, place: int, rank: int) -> FixedTarget:
    info = host.outputs.info
    objects = objects_of(to_numpy(host.outputs.values[place]))
    if rank >= len(objects):
        shown = f"only {len(objects)} objects" if len(objects) else "no object"
        raise FailedPrecondition(f"{info.name} finds {shown} in this image", field="top_k")
    return DetectionTarget(int(objects[rank, 0]), Box(*objects[rank, 2:].tolist()), found=True)


_RANKS: Mapping[Task, Callable[[HostOutputs, int, int], FixedTarget]] = {
    "segment": _ranked_area,
    "detect": _ranked_object,
}


def finer(host: HostOutputs, place: int, target: FinerTarget) -> FixedTarget:
    """Return the target with the classes whose logits are nearest, where none are given."""
    if target.against:
        return target
    logits = host.outputs.values[place]
    order = (logits - logits[target.why]).abs().argsort(stable=True).tolist()
    others = [index for index in order if index != target.why]
    return FinerTarget(target.why, tuple(others[:NEAREST]), target.weight)


def reads_of_similarity(_target: SimilarityTarget) -> Reads:
    """Return what a similarity needs: the embedding."""
    return Reads.EMBEDDING


def comparison(target: SimilarityTarget) -> SimilarityTarget | None:
    """Return the target while the embedding of the other image is unknown, and None then."""
    return target if target.reference is None else None


def similarity(host: HostOutputs, place: int, target: SimilarityTarget) -> FixedTarget:
    """Return the target with the embedding of the image itself, where it compares with no other one."""
    if target.reference is not None:
        return target
    return SimilarityTarget(reference=to_numpy(host.outputs.embeddings()[place]))


def reads_of_segment(target: SegmentTarget) -> Reads:
    """Return what a segment needs: where its class is, if neither its mask nor its box says so."""
    return Reads.WINNERS if target.mask is None and target.box is None else Reads.NOTHING


def segment(host: HostOutputs, place: int, target: SegmentTarget) -> FixedTarget:
    """Return the target with the mask of its box, or of where the model sees the class."""
    if target.mask is not None:
        return target
    info, values = host.outputs.info, host.outputs.values[place]
    if target.box is not None:
        return SegmentTarget(target.index, target.box, inside(target.box, values.shape[1:], info.preprocess.size))
    mask = host.winners[place] == target.index
    if not mask.any():
        found = order_of_areas(to_numpy(covered(values)), info)
        shown = f"no {_named(info, [target.index])} in this image, but {_named(info, found)}"
        raise FailedPrecondition(
            f"{info.name} sees {shown}: name the part to explain as a region",
            field="targets",
        )
    return SegmentTarget(target.index, None, mask)


def detection(host: HostOutputs, place: int, target: DetectionTarget) -> FixedTarget:
    """Return the target with the box of the object that best matches it."""
    if target.found:
        return target
    info = host.outputs.info
    objects = objects_of(to_numpy(host.outputs.values[place]))
    mine = objects[objects[:, 0] == target.index]
    wanted = _named(info, [target.index])
    if not len(mine):
        found = _named(info, list(dict.fromkeys(objects[:, 0].astype(int).tolist()))) or "no object at all"
        raise FailedPrecondition(f"{info.name} finds no {wanted} in this image, but {found}", field="targets")
    shares = np.ones(len(mine)) if target.box is None else overlaps(mine[:, 2:], target.box)
    if not shares.any():
        raise FailedPrecondition(f"{info.name} finds no {wanted} that meets the box", field="targets")
    return DetectionTarget(target.index, Box(*mine[shares.argmax(), 2:].tolist()), found=True)


def _named(info: ModelInfo, indices: Sequence[int]) -> str:
    names = [f'"{info.label(index)}"' if info.label(index) else f"class {index}" for index in indices[:SHOWN]]
    return ", ".join(names) + (f" and {len(indices) - SHOWN} more" if len(indices) > SHOWN else "")
