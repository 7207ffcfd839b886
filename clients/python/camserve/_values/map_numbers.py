"""Numbers that compare two maps of one photo."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from camserve._values.picture import Box, Photo
from camserve._values.resampling import onto_photo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Values = NDArray[np.float64]


SHARES: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Shares of the hottest cells that are compared."""

RANKED_CELLS: Final = 16
"""Most cells along an axis of the grid on which ranks are compared: single pixels of a gradient are mostly noise."""

MOST_CELLS: Final = 2048
"""Most cells along an axis of a map that is compared: a map of 1 x 23,000 and one of 23,000 x 1 would take 4 GiB."""

UNDEFINED: Final[dict[str, Any]] = {
    **dict.fromkeys(("spearman", "shift", "ssim", "pearson", "kl"), math.nan),
    "iou_curve": (math.nan,) * len(SHARES),
}
"""The numbers of maps that cannot be compared."""

_WHOLE = Photo(1, 1, Box(0.0, 0.0, 1.0, 1.0))
_KL_EPSILON = 1e-7  # limits the divergence to 16 nats, where the candidate has no evidence
_SSIM_SIDE, _SSIM_SIGMA = 11, 1.5  # window, in cells
_SSIM_CONSTANTS = ((0.01 * 2) ** 2, (0.03 * 2) ** 2)  # for values from -1 to 1


def compare(heatmaps: Sequence[NDArray[np.float32]], photos: Sequence[Photo], common: Box) -> dict[str, Any]:
    """Return the numbers of two maps by their names in ``Comparison``.

    Args:
        heatmaps: The baseline's map and the candidate's, float32 [h, w] each.
        photos: Geometry of the photo for each map.
        common: The part of the photo that both maps cover.
    """
    if not all(np.isfinite(heatmap).all() for heatmap in heatmaps):
        return UNDEFINED
    coarse, fine = _aligned([bounded(heatmap) for heatmap in heatmaps], photos, common)
    centres = [_centre_of_mass(values, common) for values in fine]
    diagonal = math.hypot(photos[0].width, photos[0].height)
    ranks = [_ranks(values) for values in coarse]
    return {
        "spearman": _correlation(*ranks),
        "iou_curve": tuple(_iou(*(_hottest(values, share) for values in coarse)) for share in SHARES),
        "shift": 100 * math.dist(*centres) / diagonal,
        "ssim": _mean_ssim(*fine),
        "pearson": _correlation(*fine),
        "kl": _divergence(*fine),
    }


def bounded(heatmap: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a map, or the means of its neighbouring cells if it has more than ``MOST_CELLS`` along an axis."""
    for axis, cells in enumerate(heatmap.shape):
        if cells > MOST_CELLS:
            starts = np.arange(MOST_CELLS) * cells // MOST_CELLS
            sizes = np.expand_dims(np.diff(starts, append=cells), 1 - axis)
            with np.errstate(invalid="ignore"):  # infinities
                heatmap = (np.add.reduceat(heatmap, starts, axis, np.float64) / sizes).astype(np.float32)
    return heatmap


def _aligned(
    heatmaps: Sequence[NDArray[np.float32]], photos: Sequence[Photo], common: Box
) -> tuple[tuple[Values, ...], tuple[Values, ...]]:
    """Return both maps over the common part: on the coarser and on the finer of their grids, along each axis."""
    maps = tuple(heatmap.astype(np.float64) for heatmap in heatmaps)
    on_one_grid = maps[0].shape == maps[1].shape and photos[0].seen == photos[1].seen
    if on_one_grid and max(maps[0].shape) <= RANKED_CELLS:
        return maps, maps
    boxes = [photo.seen for photo in photos]
    rows = [(heatmap.shape[0], box.top, box.bottom) for heatmap, box in zip(maps, boxes, strict=True)]
    columns = [(heatmap.shape[1], box.left, box.right) for heatmap, box in zip(maps, boxes, strict=True)]
    heights = [_cells_between(common.top, common.bottom, *axis) for axis in rows]
    widths = [_cells_between(common.left, common.right, *axis) for axis in columns]

    def resample(height: int, width: int, weigh: Callable[..., Values]) -> tuple[Values, ...]:
        y = [weigh(np.linspace(common.top, common.bottom, height + 1), *axis) for axis in rows]
        x = [weigh(np.linspace(common.left, common.right, width + 1), *axis) for axis in columns]
        # Rounded, so that equal values stay equal, whatever the last bits of their sums.
        return tuple(
            (down @ values @ across.T).astype(np.float32).astype(np.float64)
            for down, values, across in zip(y, maps, x, strict=True)
        )

    coarse = resample(min(*heights, RANKED_CELLS), min(*widths, RANKED_CELLS), _area_weights)
    return coarse, maps if on_one_grid else resample(max(heights), max(widths), _bilinear_weights)


def _cells_between(low: float, high: float, cells: int, start: float, end: float) -> int:
    """Return the number of a map's cells between two positions: the map has ``cells`` from ``start`` to ``end``."""
    return max(1, round(cells * (high - low) / (end - start)))


def _area_weights(edges: Values, cells: int, start: float, end: float) -> Values:
    """Return the matrix that averages a map's cells over the intervals between these edges."""
    bounds = np.linspace(start, end, cells + 1)
    low = np.maximum(edges[:-1, None], bounds[None, :-1])
    high = np.minimum(edges[1:, None], bounds[None, 1:])
    overlap = (high - low).clip(min=0)
    weights: Values = overlap / overlap.sum(axis=1, keepdims=True)
    return weights


def _bilinear_weights(edges: Values, cells: int, start: float, end: float) -> Values:
    """Return the matrix that interpolates a map at the middles of the intervals between these edges."""
    middles = (edges[:-1] + edges[1:]) / 2
    positions = np.clip((middles - start) / (end - start) * cells - 0.5, 0, cells - 1)
    weights: Values = (1 - np.abs(positions[:, None] - np.arange(cells))).clip(min=0)
    return weights


def rank_correlation(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """Return Spearman's rank correlation of two maps of the same part of a photo; NaN as for ``compare``."""
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        return math.nan
    coarse, _ = _aligned((bounded(first), bounded(second)), (_WHOLE, _WHOLE), _WHOLE.seen)
    return _correlation(*map(_ranks, coarse))


def _ranks(values: Values) -> Values:
    """Return the ranks of all values; equal values have the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Values = (np.cumsum(counts) - (counts - 1) / 2)[place.ravel()]
    return ranks


def _correlation(first: Values, second: Values) -> float:
    one, other = (values.ravel() - values.mean() for values in (first, second))
    norm = math.sqrt(float(one @ one) * float(other @ other))
    return min(max(float(one @ other) / norm, -1.0), 1.0) if norm else math.nan


def _hottest(values: Values, share: float) -> NDArray[np.bool_]:
    """Return the cells with the largest values, and all that are equal to the least of these.

    The smallest value of the map is never hot: many maps are 0 in most cells.
    """
    flat = values.ravel()
    count = max(1, round(share * flat.size))
    least = np.partition(flat, flat.size - count)[flat.size - count]
    hot: NDArray[np.bool_] = (flat >= least) & (flat > flat.min())
    return hot


def _iou(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> float:
    union = np.count_nonzero(first | second)
    return float(np.count_nonzero(first & second) / union) if union else math.nan


def _centre_of_mass(values: Values, box: Box) -> tuple[float, float]:
    """Return x and y of the centre of the positive values of a map that covers a box; NaN if it has none."""
    positive = values.clip(min=0)
    if not positive.any():
        return math.nan, math.nan
    x, y = (_mean_position(positive.sum(axis=axis)) for axis in (0, 1))
    return box.left + x * (box.right - box.left), box.top + y * (box.bottom - box.top)


def _mean_position(masses: Values) -> float:
    """Return the mean position of masses in equal steps, from 0 to 1."""
    positions: Values = np.arange(masses.size, dtype=np.float64) + 0.5
    return float(np.average(positions, weights=masses)) / masses.size


def _mean_ssim(first: Values, second: Values) -> float:
    peaks = [np.abs(values).max() for values in (first, second)]
    if not all(peaks):
        return math.nan
    one, other = first / peaks[0], second / peaks[1]
    down, across = (_gaussian_windows(side) for side in first.shape)

    def mean(values: Values) -> Values:
        return down @ values @ across.T

    mean_one, mean_other = mean(one), mean(other)
    variances = mean(one * one) - mean_one**2 + mean(other * other) - mean_other**2
    covariance = mean(one * other) - mean_one * mean_other
    c1, c2 = _SSIM_CONSTANTS
    luminance = (2 * mean_one * mean_other + c1) / (mean_one**2 + mean_other**2 + c1)
    return float((luminance * (2 * covariance + c2) / (variances + c2)).mean())


def _gaussian_windows(side: int) -> Values:
    """Return the matrix of the means over every window along an axis; a small map has one window."""
    size = min(side, _SSIM_SIDE)
    window = np.exp(-((np.arange(size) - (size - 1) / 2) ** 2) / (2 * _SSIM_SIGMA**2))
    window /= window.sum()
    matrix = np.zeros((side - size + 1, side))
    for row in range(len(matrix)):
        matrix[row, row : row + size] = window
    return matrix


def _divergence(baseline: Values, candidate: Values) -> float:
    positive = [values.clip(min=0) for values in (baseline, candidate)]
    totals = [values.sum() for values in positive]
    if not all(totals):
        return math.nan
    p, q = (values / total for values, total in zip(positive, totals, strict=True))
    return max(float((p * np.log(_KL_EPSILON + p / (q + _KL_EPSILON))).sum()), 0.0)


def share_in_box(heatmap: NDArray[np.float32], photo: Photo, box: Box) -> float:
    """Return the share of a map's positive values in a box, on the photo's pixels whose centre is in the box."""
    positive = np.nan_to_num(onto_photo(heatmap, photo), nan=0.0, posinf=0.0).clip(min=0)
    rows, columns = np.arange(photo.height) + 0.5, np.arange(photo.width) + 0.5
    inside = np.ix_((box.top <= rows) & (rows <= box.bottom), (box.left <= columns) & (columns <= box.right))
    total = positive.sum(dtype=np.float64)
    return float(positive[inside].sum(dtype=np.float64) / total) if total and np.isfinite(heatmap).all() else math.nan
