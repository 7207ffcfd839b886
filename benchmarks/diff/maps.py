"""Maps and predictions of one model for many photos, and their rank correlations with those of another."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from camserve import ImageWithOptions, Verdict
from camserve._values import map_numbers
from camserve_server import Explainer

Values = NDArray[np.float64]
Map = NDArray[np.float32]
Photos = Sequence[NDArray[np.uint8]]

RANDOM_WEIGHTS = ("randomisation", {"stages": 2, "seed": 0})
"""The metric of the ceiling; its last value is that of random weights in the whole network."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Maps and predictions of one model for all photos.

    Attributes:
        maps: Maps by method, one for each photo.
        verdicts: Verdicts on the maps.
        predictions: Index of the class that is predicted first, [photos].
    """

    maps: dict[str, list[Map]]
    verdicts: dict[str, list[Verdict]]
    predictions: NDArray[np.int64]

    def correlations(self, method: str, others: "Answers") -> Values:
        """Return the rank correlations with the maps of another model, [photos]."""
        return np.array(list(map(map_numbers.rank_correlation, self.maps[method], others.maps[method])))

    def verdict_changes(self, method: str, others: "Answers") -> NDArray[np.bool_]:
        """Return whether another model's map has another verdict, [photos]."""
        pairs = zip(self.verdicts[method], others.verdicts[method], strict=True)
        return np.array([one != other for one, other in pairs])


def explain(explainer: Explainer, photos: Photos, classes: NDArray[np.int64] | None, methods: Sequence[str]) -> Answers:
    """Explain a class of each photo; the predicted ones if none are given."""
    items: list[ImageWithOptions] = [{"image": photo} for photo in photos]
    for item, index in zip(items, [] if classes is None else classes.tolist(), strict=classes is not None):
        item["targets"] = [index]
    results = list(explainer.explain_many(items, methods=methods, heatmap=True, overlay=None, max_predictions=1))
    by_method = dict(zip(methods, zip(*(result.explanations for result in results), strict=True), strict=True))
    return Answers(
        {name: [_map(one.heatmap) for one in column] for name, column in by_method.items()},
        {name: [one.verdict for one in column] for name, column in by_method.items()},
        np.array([result.predictions[0].class_index for result in results]),
    )


def _map(heatmap: Map | None) -> Map:
    if heatmap is None:
        raise ValueError("no map")
    return heatmap


def with_random_weights(
    explainer: Explainer, photos: Photos, classes: NDArray[np.int64], methods: Sequence[str]
) -> dict[str, Values]:
    """Return the rank correlations of the maps with those of random weights, by method."""

    def last(photo: NDArray[np.uint8], index: int) -> list[float]:
        found = explainer.evaluate(
            photo, metrics=[RANDOM_WEIGHTS], methods=methods, targets=[index], overlay=None, heatmap=False
        )
        curves = [reading.curves[0].y if reading.curves else () for reading in found.readings]
        return [curve[-1] if curve else math.nan for curve in curves]

    with ThreadPoolExecutor(2) as pool:
        rows = np.array(list(pool.map(last, photos, classes.tolist())))
    return dict(zip(methods, rows.T, strict=True))


def noisy(photos: Photos, level: float, seed: int) -> Photos:
    """Return the photos with normal noise, whose standard deviation is a share of the range of pixels."""
    rng = np.random.default_rng(seed)
    noise = (level * 255 * rng.standard_normal(photo.shape) for photo in photos)
    return [np.rint(photo + one).clip(0, 255).astype(np.uint8) for photo, one in zip(photos, noise, strict=True)]
