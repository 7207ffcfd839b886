"""Coordinates of boxes and masks: in a model's output, and in a view of the image."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from camserve_server.core.arrays import Map, Mask
from camserve_server.imaging.values import Box, Part, View
from camserve_server.targets.values import DetectionTarget, MaskTarget, SegmentTarget

Segment = TypeVar("Segment", SegmentTarget, MaskTarget)


def segment_in_view(target: Segment, view: View, size: tuple[int, int]) -> Segment:
    """Return a segment with its mask at its place in a view of an input of this height and width."""
    return target if target.mask is None else replace(target, mask=_mask_in(target.mask, view, size))


def detection_in_view(target: DetectionTarget, view: View, size: tuple[int, int]) -> DetectionTarget:
    """Return a detection with its box at its place in a view of an input of this height and width."""
    return target if target.box is None else replace(target, box=_box_in(target.box, view, size))


def inside(box: Box, grid: Sequence[int], size: tuple[int, int]) -> Mask:
    """Return the mask of a box on a grid over the input: the cells with their centre in the box.

    The cell at the box's own centre is always included.
    """
    (rows, columns), (height, width) = grid, size
    ys, xs = (np.arange(rows) + 0.5) * height / rows, (np.arange(columns) + 0.5) * width / columns
    mask = ((ys >= box.top) & (ys < box.bottom))[:, None] & ((xs >= box.left) & (xs < box.right))
    y, x = (box.top + box.bottom) / 2, (box.left + box.right) / 2
    mask[np.abs(ys - y).argmin(), np.abs(xs - x).argmin()] = True
    return mask


def cells_of(part: Part, grid: Sequence[int], size: tuple[int, int]) -> Mask:
    """Return the mask of a part of a photo on a grid over the input: the cells with their centre's pixel in the part.

    The coordinates are computed as those of boxes are, so that a rectangle has exactly the cells of `inside`. If the
    part has no cell's centre, its cell is the one at the centre of the box around it, if that point is in the part.

    Returns:
        bool [*grid]; all False if the part is thinner than the cells.
    """
    seen, (rows, columns), (height, width) = part.seen, grid, size
    lines = (np.arange(len(part.bits) + 1) - seen.top) * (height / (seen.bottom - seen.top))
    posts = (np.arange(part.width + 1) - seen.left) * (width / (seen.right - seen.left))
    ys, xs = (np.arange(rows) + 0.5) * height / rows, (np.arange(columns) + 0.5) * width / columns
    mask = _pixels_at(part, np.searchsorted(lines, ys, "right") - 1, np.searchsorted(posts, xs, "right") - 1)
    if mask.any():
        return mask
    box = _box_around(part)
    y, x = (lines[int(box.top)] + lines[int(box.bottom)]) / 2, (posts[int(box.left)] + posts[int(box.right)]) / 2
    centre = int(box.top + box.bottom) // 2, int(box.left + box.right) // 2
    mask[np.abs(ys - y).argmin(), np.abs(xs - x).argmin()] = _pixels_at(part, *map(np.atleast_1d, centre))[0, 0]
    return mask


def _box_around(part: Part) -> Box:
    """Return the smallest box around a part, which has at least one pixel, in the photo's pixels."""
    rows = np.flatnonzero(part.bits.any(1))
    columns = np.flatnonzero(np.unpackbits(np.bitwise_or.reduce(part.bits, 0), count=part.width))
    return Box(float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1))


def _pixels_at(part: Part, ys: NDArray[np.intp], xs: NDArray[np.intp]) -> Mask:
    """Return whether the pixels in these rows and columns are in a part; pixels beyond the photo are not."""
    height = len(part.bits)
    pixels = np.unpackbits(part.bits[ys.clip(0, height - 1)], axis=1, count=part.width)[:, xs.clip(0, part.width - 1)]
    exist = ((ys >= 0) & (ys < height))[:, None] & ((xs >= 0) & (xs < part.width))
    mask: Mask = pixels.astype(bool) & exist
    return mask


def overlaps(objects: Map, box: Box) -> Map:
    """Return the intersection over union of each object's box with a box; the objects are as in `Outputs.values`."""
    left, top, right, bottom = objects[:, 2:6].T
    width = np.minimum(right, box.right) - np.maximum(left, box.left)
    height = np.minimum(bottom, box.bottom) - np.maximum(top, box.top)
    intersection = width.clip(0) * height.clip(0)
    areas = (right - left) * (bottom - top) + (box.right - box.left) * (box.bottom - box.top)
    overlap: Map = (intersection / (areas - intersection)).astype(np.float32)
    return overlap


def _mask_in(mask: Mask, view: View, size: tuple[int, int]) -> Mask:
    """Return a mask over the input at its place in a view of the input."""
    rows, columns = mask.shape
    if view.scale != 1:
        ys = (view.top + (np.arange(rows) + 0.5) * size[0] / rows) / view.scale * rows / size[0]
        xs = (view.left + (np.arange(columns) + 0.5) * size[1] / columns) / view.scale * columns / size[1]
        mask = mask[ys.astype(int).clip(0, rows - 1)][:, xs.astype(int).clip(0, columns - 1)]
    return np.ascontiguousarray(mask[:, ::-1]) if view.mirrored else mask


def _box_in(box: Box, view: View, size: tuple[int, int]) -> Box:
    """Return a box over the input at its place in a view of the input."""
    if view.scale != 1:
        xs = [x * view.scale - view.left for x in (box.left, box.right)]
        ys = [y * view.scale - view.top for y in (box.top, box.bottom)]
        box = Box(xs[0], ys[0], xs[1], ys[1])
    return Box(size[1] - box.right, box.top, size[1] - box.left, box.bottom) if view.mirrored else box


def carried(box: Box, source: Box, onto: Box) -> Box:
    """Map a box from one rectangle to another that shows the same content.

    Args:
        box: the box, in the coordinates of `source`.
        source: the rectangle to map from.
        onto: the rectangle to map to, in its own coordinates.
    """
    scale_x = (onto.right - onto.left) / (source.right - source.left)
    scale_y = (onto.bottom - onto.top) / (source.bottom - source.top)
    return Box(
        onto.left + (box.left - source.left) * scale_x,
        onto.top + (box.top - source.top) * scale_y,
        onto.left + (box.right - source.left) * scale_x,
        onto.top + (box.bottom - source.top) * scale_y,
    )


def whole(size: tuple[int, int]) -> Box:
    """Return the rectangle of a model's input, given its height and width."""
    return Box(0.0, 0.0, float(size[1]), float(size[0]))
