"""Resolution of targets that depend on the prediction for the unchanged image: ranks, nearest classes, masks, boxes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Flag, auto

import numpy as np
import torch

from camserve_server.core.arrays import Map
from camserve_server.core.devices import fetch_arrays, to_numpy
from camserve_server.core.errors import FailedPrecondition
from camserve_server.imaging.values import Box
from camserve_server.models.outputs import OBJECT_COLUMNS, Outputs
from camserve_server.models.values import ModelInfo, Task
from camserve_server.targets.geometry import cells_of, inside, overlaps, whole
from camserve_server.targets.summaries import covered, objects_of, order_of_areas
from camserve_server.targets.values import (
    ClassTarget,
    DetectionTarget,
    FinerTarget,
    FixedTarget,
    MaskTarget,
    RankTarget,
    SegmentTarget,
    SimilarityTarget,
    Target,
    TextTarget,
)

NEAREST_CLASSES = 3
"""Default number of classes that one is explained against: Zhang et al. 2025."""

MAX_LISTED = 8  # the largest number of classes that an error message lists


def anything(info: ModelInfo) -> Target:
    """Return a target that exists for every image, whatever the model predicts."""
    input_box = whole(info.preprocess.size)
    by_task: Mapping[Task, Target] = {
        "segment": SegmentTarget(0, input_box),
        "detect": DetectionTarget(0, input_box, found=True),
        "embed": SimilarityTarget(),
    }
    return by_task.get(info.task, RankTarget(0))


class Reads(Flag):
    """Outputs besides the values that resolving a target needs; they are copied from the device once per batch.

    Attributes:
        AREAS: share, probability and logit of each class of a segmentation.
        WINNERS: class of each pixel of a segmentation.
        EMBEDDING: the image's embedding.
    """

    NOTHING = 0
    AREAS = auto()
    WINNERS = auto()
    EMBEDDING = auto()


@dataclass(frozen=True, slots=True)
class HostOutputs:
    """Outputs of a model in the host's memory, for resolving targets.

    Attributes:
        outputs: the model's outputs; those of a segmentation stay on the device.
        areas: by place in the batch, share, probability and logit of each class, for targets that are ranks.
        winners: by place in the batch, the class of each pixel [h,w], for targets that need the area of a class.
    """

    outputs: Outputs
    areas: dict[int, Map] = field(default_factory=dict)
    winners: dict[int, Map] = field(default_factory=dict)


def read(outputs: Outputs, reads: Sequence[Reads]) -> HostOutputs:
    """Copy the outputs that targets need to the host, in one step.

    Args:
        outputs: outputs for a batch of images.
        reads: the needs of each image's target.
    """
    values = outputs.values.detach()
    if outputs.info.task == "segment":  # its values are too large to copy
        area_places, winner_places = (
            [place for place, needs in enumerate(reads) if kind in needs] for kind in (Reads.AREAS, Reads.WINNERS)
        )
        arrays = fetch_arrays(
            [
                *(covered(values[place]) for place in area_places),
                *(values[place].argmax(0) for place in winner_places),
            ]
        )
        areas = dict(zip(area_places, arrays[: len(area_places)], strict=True))
        winners = dict(zip(winner_places, arrays[len(area_places) :], strict=True))
        return HostOutputs(outputs, areas, winners)
    needs_embedding = any(Reads.EMBEDDING in needs for needs in reads) and outputs.info.task != "embed"
    host, *embeddings = map(
        torch.from_numpy, fetch_arrays([values, *([outputs.embeddings()] if needs_embedding else [])])
    )
    return HostOutputs(replace(outputs, values=host, embedding=embeddings[0] if embeddings else None))


def reads_of_rank(_target: RankTarget) -> Reads:
    """Return the needs of a rank: the areas of the classes, and the class of each pixel."""
    return Reads.AREAS | Reads.WINNERS


def rank(host: HostOutputs, place: int, target: RankTarget) -> FixedTarget:
    """Return the class, segment or object of a rank."""
    return _RANKS.get(host.outputs.info.task, _ranked_class)(host, place, target.rank)


def _ranked_class(host: HostOutputs, place: int, rank: int) -> FixedTarget:
    # Equal logits are ranked by index, as in the list of predictions, and NaN last. The logits are not sorted, because
    # that takes eight times as long.
    negated = -host.outputs.values[place].numpy()
    value = np.partition(negated, rank)[rank]
    if np.isnan(value):
        return ClassTarget(int(negated.argsort(kind="stable")[rank]))
    return ClassTarget(int(np.flatnonzero(negated == value)[rank - np.count_nonzero(negated < value)]))


def _ranked_area(host: HostOutputs, place: int, rank: int) -> FixedTarget:
    info = host.outputs.info
    classes = order_of_areas(host.areas[place], info)
    if rank >= len(classes):
        raise FailedPrecondition(f"{info.name} sees only {_list_classes(info, classes)} in this image", field="top_k")
    return segment(host, place, SegmentTarget(classes[rank]))


def _ranked_object(host: HostOutputs, place: int, rank: int) -> FixedTarget:
    info = host.outputs.info
    objects = objects_of(to_numpy(host.outputs.values[place]))
    if rank >= len(objects):
        count = f"only {len(objects)} objects" if len(objects) else "no object"
        raise FailedPrecondition(f"{info.name} finds {count} in this image", field="top_k")
    return _found(objects, rank)


def _found(objects: Map, rank: int) -> DetectionTarget:
    """Return the target of an object in the unchanged image."""
    index, _, left, top, right, bottom = objects[rank, :OBJECT_COLUMNS].tolist()
    return DetectionTarget(int(index), Box(left, top, right, bottom), found=True, rank=rank)


_RANKS: Mapping[Task, Callable[[HostOutputs, int, int], FixedTarget]] = {
    "segment": _ranked_area,
    "detect": _ranked_object,
}


def finer(host: HostOutputs, place: int, target: FinerTarget) -> FixedTarget:
    """Return the target with the classes that have the nearest logits, if it names none."""
    if target.against:
        return target
    logits = host.outputs.values[place]
    order = (logits - logits[target.why]).abs().argsort(stable=True).tolist()
    others = [index for index in order if index != target.why]
    return FinerTarget(target.why, tuple(others[:NEAREST_CLASSES]), target.weight)


def reads_of_similarity(_target: SimilarityTarget) -> Reads:
    """Return the needs of a similarity: the embedding."""
    return Reads.EMBEDDING


def comparison(target: SimilarityTarget) -> SimilarityTarget | None:
    """Return the target while the embedding of its other image is unknown, and None afterwards."""
    return target if target.reference is None else None


def unread_text(target: TextTarget) -> TextTarget | None:
    """Return the target while the embedding of its text is unknown, and None afterwards."""
    return target if target.embedding is None else None


def similarity(host: HostOutputs, place: int, target: SimilarityTarget) -> FixedTarget:
    """Return the target with the embedding of the image itself, if it names no other image."""
    if target.reference is not None:
        return target
    return SimilarityTarget(reference=to_numpy(host.outputs.embeddings()[place]))


def reads_of_segment(target: SegmentTarget) -> Reads:
    """Return the needs of a segment: the class of each pixel, if it has neither a mask nor a box."""
    return Reads.WINNERS if target.mask is None and target.box is None else Reads.NOTHING


def segment(host: HostOutputs, place: int, target: SegmentTarget) -> FixedTarget:
    """Return the target with the mask of its box, or of the pixels for which the model predicts its class."""
    if target.mask is not None:
        return target
    info, values = host.outputs.info, host.outputs.values[place]
    if target.box is not None:
        return replace(target, mask=inside(target.box, values.shape[1:], info.preprocess.size))
    mask = host.winners[place] == target.index
    if not mask.any():
        classes = _list_classes(info, order_of_areas(to_numpy(covered(values)), info))
        missing = _list_classes(info, [target.index])
        raise FailedPrecondition(
            f"{info.name} sees no {missing} in this image, but {classes}: name the part to explain as a region",
            field="targets",
        )
    return replace(target, mask=mask)


def mask(host: HostOutputs, _place: int, target: MaskTarget) -> FixedTarget:
    """Return the target with its part on the grid of the model's output."""
    if target.part is None:
        return target
    grid = host.outputs.values.shape[2:]
    cells = cells_of(target.part, grid, host.outputs.info.preprocess.size)
    if not cells.any():
        raise FailedPrecondition(
            f"the mask is thinner than the cells of {host.outputs.info.name}'s output, {grid[1]} x {grid[0]} over what "
            "it sees: paint a wider part",
            field="targets",
        )
    return MaskTarget(target.index, mask=cells)


def detection(host: HostOutputs, place: int, target: DetectionTarget) -> FixedTarget:
    """Return the target with the box of the object that best matches it."""
    if target.found:
        return target
    info = host.outputs.info
    objects = objects_of(to_numpy(host.outputs.values[place]))
    ranks = np.flatnonzero(objects[:, 0] == target.index)
    label = _list_classes(info, [target.index])
    if not len(ranks):
        classes = list(dict.fromkeys(objects[:, 0].astype(int).tolist()))
        others = _list_classes(info, classes) or "no object at all"
        raise FailedPrecondition(f"{info.name} finds no {label} in this image, but {others}", field="targets")
    overlap = np.ones(len(ranks)) if target.box is None else overlaps(objects[ranks], target.box)
    if not overlap.any():
        raise FailedPrecondition(f"{info.name} finds no {label} that overlaps the box", field="targets")
    return replace(_found(objects, int(ranks[overlap.argmax()])), against=target.against)


def _list_classes(info: ModelInfo, indices: Sequence[int]) -> str:
    names = [f'"{info.label(index)}"' if info.label(index) else f"class {index}" for index in indices[:MAX_LISTED]]
    return ", ".join(names) + (f" and {len(indices) - MAX_LISTED} more" if len(indices) > MAX_LISTED else "")
