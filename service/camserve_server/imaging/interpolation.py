"""Interpolation of maps at the pixels of a picture, in bands."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from camserve_server.core.arrays import Map
from camserve_server.imaging.opencv import cv2
from camserve_server.imaging.values import Box

# Bands of this many pixels stay in the processor's cache, and make the memory needed independent of the photo's size.
# As float32 a band is below the 128 KiB from which glibc, by default, maps fresh pages for each allocation: drawing
# 500 x 375 pixels took 1.5 to 1.8 times as long with bands twice as large.
_BAND = 32_000


@dataclass(frozen=True, slots=True)
class _Span:
    """Pixels of one axis of a picture that a map covers, and the two cells on either side of each.

    Attributes:
        start: first covered pixel.
        low: per pixel, the cell before its centre.
        high: per pixel, the cell after its centre; the same cell at the map's edges.
        weight: per pixel, the weight of `high`.
    """

    start: int
    low: NDArray[np.intp]
    high: NDArray[np.intp]
    weight: NDArray[np.float32]


@functools.lru_cache(64)  # all explanations of a photo have the same size, and often all photos of a camera
def _span(first: float, last: float, pixels: int, cells: int) -> _Span:
    start, stop = _covered_pixels(first, last, pixels)
    centres = np.arange(start, stop) + 0.5
    at = ((centres - first) / (last - first) * cells - 0.5).clip(0, cells - 1)
    low = at.astype(np.intp)
    return _Span(start, low, np.minimum(low + 1, cells - 1), (at - low).astype(np.float32))


def _covered_pixels(first: float, last: float, pixels: int) -> tuple[int, int]:
    """Return the range of pixels with their centres between two edges, or one pixel if no centre is."""
    start = min(max(0, math.ceil(first - 0.5)), pixels - 1)
    return start, max(start + 1, min(pixels, math.ceil(last - 0.5)))


@dataclass(frozen=True, slots=True)
class Interpolated:
    """A map between the columns of a picture, to be interpolated between its rows.

    Attributes:
        columns: the columns of the picture that the map covers.
        rows: the rows that it covers.
        cells: the map's rows of cells at those columns, float32 [h, columns].
        steps: the difference to the next row of cells, likewise.
    """

    columns: slice
    rows: _Span
    cells: Map
    steps: Map

    def bands(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the last row of each band, counted from the first covered row."""
        count, height = len(self.rows.low), max(1, _BAND // self.cells.shape[1])
        for first in range(0, count, height):
            yield first, min(first + height, count)

    def place(self, first: int, last: int) -> tuple[slice, slice]:
        """Return the place of a band in the picture."""
        return slice(self.rows.start + first, self.rows.start + last), self.columns

    def values(self, first: int, last: int) -> Map:
        """Return the interpolated values of a band, float32 [last - first, columns]."""
        low = self.rows.low[first:last]
        band: Map = self.steps.take(low, 0)
        band *= self.rows.weight[first:last, None]
        band += self.cells.take(low, 0)
        return band


def interpolate(values: Map, box: Box, size: tuple[int, int]) -> Interpolated:
    """Interpolate a map bilinearly between the centres of its cells, at the pixels whose centres lie in a box.

    Args:
        values: float32 [h, w].
        box: the part of the picture that the map covers; it may reach beyond the picture.
        size: height and width of the picture.
    """
    values = _coarsen(values, box)
    rows = _span(box.top, box.bottom, size[0], values.shape[0])
    columns = _span(box.left, box.right, size[1], values.shape[1])
    widened = np.ascontiguousarray(_interpolate(values.T, columns).T)
    steps = np.diff(widened, axis=0, append=widened[-1:])
    return Interpolated(slice(columns.start, columns.start + len(columns.low)), rows, widened, steps)


def _coarsen(values: Map, box: Box) -> Map:
    """Average a map with more cells than its box has pixels, so that no cell is skipped; the strongest value stays."""
    width = min(values.shape[1], max(1, round(box.right - box.left)))
    height = min(values.shape[0], max(1, round(box.bottom - box.top)))
    if (height, width) == values.shape:
        return values
    coarse: Map = cv2.resize(values, (width, height), interpolation=cv2.INTER_AREA).astype(np.float32)
    if not (strongest := np.abs(coarse).max()) > 0:
        return coarse
    coarse /= strongest
    coarse *= np.abs(values).max()
    return coarse


def _interpolate(values: Map, span: _Span) -> Map:
    """Interpolate values along the first axis at a span's pixels."""
    low, blend = values.take(span.low, 0), values.take(span.high, 0)  # half the time of an index array
    blend -= low
    blend *= span.weight[:, None]
    blend += low
    return blend
