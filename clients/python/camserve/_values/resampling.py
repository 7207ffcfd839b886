"""Resample a raw map, or a map of classes, to the pixels of the photo."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from camserve._values.picture import Photo


def onto_photo(heatmap: NDArray[np.float32], photo: Photo) -> NDArray[np.float32]:
    """Resample a raw map to the pixels of the photo: the inverse of the model's resize and crop.

    The interpolation is bilinear between the centres of the map's cells, as in PyTorch and OpenCV. Beyond
    the outermost centres, the values of the outermost cells are repeated.

    Args:
        heatmap: float32 [h, w], which covers ``photo.seen``.
        photo: Geometry of the photo.

    Returns:
        float32 [photo.height, photo.width], with NaN outside of ``photo.seen``.
    """
    seen = photo.seen
    y = _sample_axis(heatmap.shape[0], photo.height, seen.top, seen.bottom)
    x = _sample_axis(heatmap.shape[1], photo.width, seen.left, seen.right)
    resampled = np.full((photo.height, photo.width), np.nan, np.float32)
    # The axis that grows comes last: between the two, a map of one long row would have billions of values otherwise.
    columns_first = heatmap.shape[1] > photo.width and photo.height > heatmap.shape[0]
    with np.errstate(invalid="ignore"):  # infinities in a map give NaN around them
        if columns_first:
            values = _interpolate(_interpolate(heatmap.T, x).T, y)
        else:
            values = _interpolate(_interpolate(heatmap, y).T, x).T
    resampled[y.pixels, x.pixels] = values
    return resampled


def classes_onto_photo(classes: NDArray[np.uint16], photo: Photo) -> NDArray[np.int32]:
    """Return the class of each pixel of the photo: that of the cell that its centre lies in.

    Args:
        classes: uint16 [h, w], which covers ``photo.seen``.
        photo: Geometry of the photo.

    Returns:
        int32 [photo.height, photo.width], with -1 outside of ``photo.seen``.
    """
    seen = photo.seen
    rows, y = _nearest_cells(classes.shape[0], photo.height, seen.top, seen.bottom)
    columns, x = _nearest_cells(classes.shape[1], photo.width, seen.left, seen.right)
    resampled = np.full((photo.height, photo.width), -1, np.int32)
    resampled[rows, columns] = classes[np.ix_(y, x)]
    return resampled


def _nearest_cells(cells: int, pixels: int, start: float, end: float) -> tuple[slice, NDArray[np.intp]]:
    """Return the pixels that the model sees along one axis, and the index of the cell of each."""
    seen, centres = _seen_pixels(pixels, start, end)
    positions = (centres - start) / (end - start) * cells
    return seen, np.clip(np.floor(positions), 0, cells - 1).astype(np.intp)


@dataclass(frozen=True, slots=True)
class _AxisSamples:
    """Interpolation weights along one axis, for each pixel that the model sees.

    Attributes:
        pixels: The pixels that the model sees.
        low: Index of the cell before each pixel's centre.
        high: Index of the cell after it.
        share: Weight of the cell after it, 0 to 1.
    """

    pixels: slice
    low: NDArray[np.intp]
    high: NDArray[np.intp]
    share: NDArray[np.float32]


def _sample_axis(cells: int, pixels: int, start: float, end: float) -> _AxisSamples:
    seen, centres = _seen_pixels(pixels, start, end)
    positions = np.clip((centres - start) / (end - start) * cells - 0.5, 0, cells - 1)
    low = np.floor(positions).astype(np.intp)
    share = (positions - low).astype(np.float32)
    return _AxisSamples(seen, low, np.minimum(low + 1, cells - 1), share)


def _seen_pixels(pixels: int, start: float, end: float) -> tuple[slice, NDArray[np.float64]]:
    """Return the pixels along one axis whose centres the model sees, and these centres."""
    first, last = (min(max(0, math.ceil(edge - 0.5)), pixels) for edge in (start, end))
    return slice(first, max(first, last)), np.arange(first, last, dtype=np.float64) + 0.5


def _interpolate(cells: NDArray[np.float32], samples: _AxisSamples) -> NDArray[np.float32]:
    low, high = cells[samples.low], cells[samples.high]
    return (low + (high - low) * samples.share[:, None]).astype(np.float32, copy=False)
