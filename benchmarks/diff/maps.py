"""Maps of many photos, and the numbers that compare the maps of two models."""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from camserve import Method
from camserve._map_numbers import compare
from camserve._picture import Box, Photo
from camserve_server import Explainer

Values = NDArray[np.float64]
Image = NDArray[np.uint8]
Photos = Sequence[Image]
Numbers = dict[str, Values]
"""Numbers that compare the maps of two sides, [photos], by name."""

CELLS = 16
"""Side of the grid that maps are compared on: the maps of a single pixel's gradients are mostly noise."""
IOU = 2  # index of the hottest fifth in the curve
STATISTICS = ("spearman", "iou", "ssim", "pearson", "shift")


@dataclass(frozen=True, slots=True)
class Answers:
    """Maps and predictions of one model for all photos.

    Attributes:
        maps: Maps [photos,h,w] by method.
        predictions: Index of the class that is predicted first, [photos].
    """

    maps: dict[str, NDArray[np.float32]]
    predictions: NDArray[np.int64]

    def mirrored(self) -> "Answers":
        """Return the same with all maps mirrored."""
        return Answers(
            {name: np.ascontiguousarray(maps[..., ::-1]) for name, maps in self.maps.items()}, self.predictions
        )


def explain(
    explainer: Explainer, photos: Photos, classes: NDArray[np.int64] | None, methods: Sequence[str | Method]
) -> Answers:
    """Explain a class of each photo; the predicted ones if none are given."""
    maps: list[list[NDArray[np.float32]]] = [[] for _ in photos]
    predictions = np.zeros(len(photos), np.int64)
    groups = {None: range(len(photos))} if classes is None else _by_class(classes)
    for target, places in groups.items():
        wanted = None if target is None else [target]
        some = (photos[place] for place in places)
        found = explainer.explain_many(some, methods=list(methods), targets=wanted, overlay=None, max_predictions=1)
        for place, result in zip(places, found, strict=True):
            maps[place] = [_map(one.heatmap) for one in result.explanations]
            predictions[place] = result.predictions[0].class_index
    names = [one if isinstance(one, str) else one.name for one in methods]
    return Answers(
        {name: np.stack(some) for name, some in zip(names, zip(*maps, strict=True), strict=True)}, predictions
    )


def _by_class(classes: NDArray[np.int64]) -> dict[int | None, Sequence[int]]:
    return {int(one): np.flatnonzero(classes == one).tolist() for one in np.unique(classes)}


def _map(heatmap: NDArray[np.float32] | None) -> NDArray[np.float32]:
    if heatmap is None:
        raise ValueError("no map")
    return heatmap


def numbers(baseline: NDArray[np.float32], candidate: NDArray[np.float32], cells: int = CELLS) -> Numbers:
    """Compare maps [photos,h,w] photo by photo, on a grid with at most that number of cells along each side."""
    baseline, candidate = coarse(baseline, cells), coarse(candidate, cells)
    height, width = baseline.shape[1:]
    whole = Box(0, 0, width, height)
    photo = Photo(width, height, whole)
    rows = [compare(pair, (photo, photo), whole) for pair in zip(baseline, candidate, strict=True)]
    found = [{**row, "iou": row["iou_curve"][IOU]} for row in rows]
    return {name: np.array([row[name] for row in found]) for name in STATISTICS}


def coarse(maps: NDArray[np.float32], cells: int) -> NDArray[np.float32]:
    """Return the mean values on a grid with at most that number of cells along each side."""
    height, width = (min(side, cells) for side in maps.shape[1:])
    return np.stack([cv2.resize(one, (width, height), interpolation=cv2.INTER_AREA) for one in maps])


def noisy(photos: Photos, level: float, seed: int) -> Photos:
    """Return the photos with normal noise, whose standard deviation is a share of the range of pixels."""
    rng = np.random.default_rng(seed)
    noise = (level * 255 * rng.standard_normal(photo.shape) for photo in photos)
    return [np.rint(photo + one).clip(0, 255).astype(np.uint8) for photo, one in zip(photos, noise, strict=True)]


def mirrored(photos: Photos) -> Photos:
    """Return the photos, mirrored."""
    return [np.ascontiguousarray(photo[:, ::-1]) for photo in photos]
