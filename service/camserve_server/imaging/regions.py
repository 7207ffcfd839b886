"""Regions of maps: connected parts whose values reach a threshold, in the photo's pixels."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from camserve_server.core.arrays import Map, Mask
from camserve_server.imaging import run_lengths, scales
from camserve_server.imaging.opencv import cv2
from camserve_server.imaging.run_lengths import Edges
from camserve_server.imaging.values import Box, Region, RegionOptions

Labels = NDArray[np.int32]
"""Number of the region of each pixel, int32 [h, w]; 0 for pixels of no region."""


def find(values: Map, seen: Box, size: tuple[int, int], options: RegionOptions) -> tuple[Region, ...]:
    """Return the regions of a map, the one with the largest sum first.

    A pixel of the map belongs to a region if its absolute value reaches the threshold and is above 0. Pixels are
    connected to their eight neighbours of the same sign. A region without a pixel of the photo is left out: it lies
    beyond the photo, or between the pixels of a photo with fewer pixels than the map.

    Args:
        values: the shown raw values on the pixels of the model's input, float32 [h, w].
        seen: the part of the photo that the map covers, in the photo's pixels.
        size: height and width of the photo.
        options: the threshold, and the number of regions.
    """
    strengths = np.abs(values)
    least = scales.threshold_of(strengths, options.threshold)
    labels, boxes = _label(values, (strengths >= least) & (strengths > 0))
    sums = np.bincount(labels.ravel(), strengths.ravel())
    grid = _Grid.of(values.shape, seen, size)
    areas = np.bincount(labels.ravel(), grid.areas.ravel(), len(sums)).astype(np.int64)
    order = np.argsort(-sums, kind="stable")
    order = order[(order > 0) & (areas[order] > 0)][: options.most]
    total = strengths.sum(dtype=np.float64)
    found = _Labelled(values, labels, boxes, grid)
    return tuple(
        found.region(label, int(areas[label]), float(sums[label] / total), masks=options.masks)
        for label in order.tolist()
    )


def _label(values: Map, selected: Mask) -> tuple[Labels, NDArray[np.int32]]:
    """Number the connected parts of the positive pixels, and then those of the negative ones.

    Returns the numbers, and the box of each number: left, top, width and height, int32 [n + 1, 4].
    """
    labels, boxes = np.zeros(values.shape, np.int32), [np.zeros((1, 4), np.int32)]
    for part in (selected & (values > 0), selected & (values < 0)):
        count, numbers, statistics, _ = cv2.connectedComponentsWithStats(part.astype(np.uint8), connectivity=8)
        before = sum(map(len, boxes)) - 1
        labels[part] = numbers[part] + before
        boxes.append(statistics[1:count, :4].astype(np.int32))
    return labels, np.concatenate(boxes)


@dataclass(frozen=True, slots=True)
class _Grid:
    """The pixels of a map on the pixels of a photo. A pixel of the photo belongs to the one that contains its centre.

    Attributes:
        seen: the part of the photo that the map covers.
        shape: height and width of the map.
        size: height and width of the photo.
        rows: edges of the map's rows in the photo: [h + 1]. Rows without the centre of a pixel have equal edges.
        columns: likewise: [w + 1].
    """

    seen: Box
    shape: tuple[int, int]
    size: tuple[int, int]
    rows: Edges
    columns: Edges

    @classmethod
    def of(cls, shape: tuple[int, int], seen: Box, size: tuple[int, int]) -> "_Grid":
        """Return the grid of a map of a shape."""
        rows = _edges(seen.top, seen.bottom, shape[0], size[0])
        return cls(seen, shape, size, rows, _edges(seen.left, seen.right, shape[1], size[1]))

    @property
    def areas(self) -> NDArray[np.int32]:
        """The number of the photo's pixels in each pixel of the map."""
        return np.outer(np.diff(self.rows), np.diff(self.columns))

    def centre(self, row: int, column: int) -> tuple[float, float]:
        """Return x and y of the centre of a pixel of the map, in the photo."""
        across = (self.seen.right - self.seen.left) / self.shape[1]
        down = (self.seen.bottom - self.seen.top) / self.shape[0]
        return self.seen.left + (column + 0.5) * across, self.seen.top + (row + 0.5) * down


def _edges(first: float, last: float, cells: int, pixels: int) -> Edges:
    """Return the first pixel with its centre in each cell, and the first after the last cell: [cells + 1]."""
    edges = first + np.arange(cells + 1) * ((last - first) / cells)
    pixel_edges: Edges = np.ceil(edges - 0.5).clip(0, pixels).astype(np.int32)
    return pixel_edges


@dataclass(frozen=True, slots=True)
class _Labelled:
    """A map whose regions are numbered.

    Attributes:
        values: the shown raw values, float32 [h, w].
        labels: number of the region of each pixel.
        boxes: box of each region: left, top, width and height in pixels of the map.
        grid: the pixels on those of the photo.
    """

    values: Map
    labels: Labels
    boxes: NDArray[np.int32]
    grid: _Grid

    def region(self, label: int, area: int, share: float, *, masks: bool) -> Region:
        """Return the region of a number, which has pixels in the photo."""
        left, top, width, height = self.boxes[label].tolist()
        here = slice(top, top + height), slice(left, left + width)
        mask = self.labels[here] == label
        row, column = divmod(int(np.where(mask, np.abs(self.values[here]), -1).argmax()), width)
        mask, rows, columns = _drop_empty(
            mask, self.grid.rows[top:][: height + 1], self.grid.columns[left:][: width + 1]
        )
        return Region(
            box=Box(*map(float, (columns[0], rows[0], columns[-1], rows[-1]))),
            area=area,
            contour=_outline(mask, rows, columns),
            peak=self.grid.centre(top + row, left + column),
            peak_value=float(self.values[top + row, left + column]),
            share=share,
            mask=run_lengths.encode(mask, rows, columns, self.grid.size) if masks else None,
        )


def _drop_empty(mask: Mask, rows: Edges, columns: Edges) -> tuple[Mask, Edges, Edges]:
    """Drop the rows and columns that have no pixel of the photo, and then those at the sides with no pixel of the mask.

    Returns the mask, and the edges of its rows and of its columns.
    """
    mask = mask[np.ix_(np.flatnonzero(np.diff(rows)), np.flatnonzero(np.diff(columns)))]
    rows, columns = np.unique(rows), np.unique(columns)
    full_rows, full_columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    down, across = (slice(full[0], full[-1] + 1) for full in (full_rows, full_columns))
    return mask[down, across], rows[down.start : down.stop + 1], columns[across.start : across.stop + 1]


def _outline(mask: Mask, rows: Edges, columns: Edges) -> NDArray[np.int32]:
    """Return the corners of the outline of a mask, x and y of each, in pixels of the photo.

    The mask may have several parts, if the photo has fewer pixels than the map. Their outlines are then joined at their
    first corners, by lines that are passed in both directions and so enclose nothing.
    """
    parts = list(_corners(mask))
    if len(parts) > 1:
        parts = [np.concatenate((part, part[:1])) for part in parts]
    x, y = np.concatenate(parts).T
    return np.stack((columns[x], rows[y]), axis=1)


def _corners(mask: Mask) -> Iterator[NDArray[np.int32]]:
    """Yield the outline of each part of a mask: x and y of its corners, as indices of the edges between cells.

    OpenCV follows the centres of the outermost pixels. Each cell becomes four pixels, each of which lies at one corner
    of its cell. The corners of those on the way are the outline.
    """
    fine = np.repeat(np.repeat(mask.astype(np.uint8), 2, axis=0), 2, axis=1)
    for path in cv2.findContours(fine, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)[0]:
        corners = (path[:, 0].astype(np.int32, copy=False) + 1) // 2
        corners = corners[(corners != np.roll(corners, 1, axis=0)).any(axis=1)]
        before, after = corners - np.roll(corners, 1, axis=0), np.roll(corners, -1, axis=0) - corners
        yield corners[(before != after).any(axis=1)]  # without those on a straight line
