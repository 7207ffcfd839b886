"""Marks on pictures of maps: contour lines, outlines of regions, and the colour bar.

Lines are white with a dark edge, so that they contrast with any background.
"""

import functools
import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from camserve_server.core.arrays import Map, Pixels
from camserve_server.imaging.opencv import cv2

_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)
_LINE_SHARE = 1 / 700  # thickness of a line, as a share of the picture's longer side
_EDGE_OPACITY = 0.55  # of the dark edge of a contour line
_FLAT = 1e-6  # slope, in intensities per pixel, below which a map has no contour lines
_SHIFT = 4  # bits of the fraction in OpenCV's coordinates

_FONT_SHARE, _MIN_FONT, _MAX_FONT = 1 / 40, 11, 48  # of the picture's longer side; pixels
_LABELS_PER_HEIGHT = 2  # labels that the smallest picture must have room for
_TINY_FONT = 6  # pixels; below that a bar has no labels
_PAPER, _INK = 255, 20  # grey of a bar's background and labels


def thickness(height: int, width: int) -> float:
    """Return the thickness of lines on a picture, in pixels."""
    return max(1.0, _LINE_SHARE * max(height, width))


def cover_lines(heat: Map, count: int, width: float) -> tuple[Map, Map]:
    """Return how much of each pixel contour lines cover: their white cores, and with their dark edges.

    The lines are at the intensities k / (count + 1), for k from 1 to `count`, and at their negatives. The distance of a
    pixel to a line is that to first order: the difference of the intensities, divided by the slope.

    Args:
        heat: intensities at the pixels, float32 [height, width].
        count: the number of lines above 0.
        width: width of a core, in pixels.

    Returns:
        Two maps, float32 [height, width], 0 to 1.
    """
    levels = heat * (count + 1)
    nearest = np.rint(levels).clip(-count, count)
    nearest[nearest == 0] = np.copysign(1, levels[nearest == 0])
    slope = np.hypot(*(_slope(levels, axis) for axis in (0, 1)))
    distance = np.full(heat.shape, np.inf, np.float32)
    np.divide(np.abs(levels - nearest), slope, out=distance, where=slope > _FLAT)
    core, edge = ((width / 2 + extra - distance + 0.5).clip(0, 1) for extra in (0.0, width))
    return core, edge


def _slope(values: Map, axis: int) -> Map:
    return np.gradient(values, axis=axis) if values.shape[axis] > 1 else np.zeros_like(values)


def draw_lines(picture: Pixels, core: Map, edge: Map) -> None:
    """Draw covered pixels on a picture: first the dark edges, then the white cores."""
    rows, columns = np.nonzero(edge)
    pixels = picture[rows, columns].astype(np.float32)
    pixels *= 1 - _EDGE_OPACITY * edge[rows, columns, None]
    pixels += core[rows, columns, None] * (255 - pixels)
    picture[rows, columns] = np.rint(pixels)


def draw_outline(picture: Pixels, corners: NDArray[np.float64]) -> None:
    """Draw a closed outline on a picture.

    Args:
        picture: BGR, uint8 [height, width, 3].
        corners: x and y of each corner, in pixels from the upper left corner of the picture.
    """
    # OpenCV measures from the centre of the first pixel.
    points = ((corners - 0.5) * (1 << _SHIFT)).round().astype(np.int32)[:, None]
    core = max(1, round(thickness(*picture.shape[:2])))
    for colour, width in ((_BLACK, core + math.ceil(core / 2)), (_WHITE, core)):
        cv2.polylines(
            picture, [points], isClosed=True, color=colour, thickness=width, lineType=cv2.LINE_AA, shift=_SHIFT
        )


def bar_width(height: int, width: int) -> int:
    """Return the width of the colour bar of a picture, with its labels and margins, in pixels."""
    return math.ceil(7 * _font_size(height, width))


def _font_size(height: int, width: int) -> int:
    wanted = min(max(_FONT_SHARE * max(height, width), _MIN_FONT), _MAX_FONT)
    return max(_TINY_FONT, int(min(wanted, height / _LABELS_PER_HEIGHT)))


def draw_bar(strip: Pixels, column: Pixels, labels: tuple[float, float]) -> None:
    """Draw a colour bar with numbers at its ends and in its middle.

    Args:
        strip: part of a picture, as wide as `bar_width`; everything in it is overwritten.
        column: the colours, the largest value first, uint8 [n, 1, 3].
        labels: the values at the top and at the bottom.
    """
    height, size = strip.shape[0], round(strip.shape[1] / 7)
    strip[:] = _PAPER
    margin = min(size // 2, (height - 1) // 2)  # half of a label
    left, right = round(0.5 * size), round(1.4 * size)
    length = height - 2 * margin
    strip[margin : margin + length, left:right] = cv2.resize(column, (right - left, length))
    if height < 2 * size:
        return
    places = {0.0: labels[0], 1.0: labels[1]}
    if height >= 6 * size:
        places[0.5] = sum(labels) / 2
    for place, value in places.items():
        text = _text(f"{value:.3g}", size)[:height, : strip.shape[1] - right - size // 3]
        top = round(margin + place * length - text.shape[0] / 2)
        top = min(max(0, top), height - text.shape[0])
        part = strip[top : top + text.shape[0], right + size // 3 :][:, : text.shape[1]]
        part[:] = (_PAPER - (_PAPER - _INK) * text[..., None]).round()


def _text(text: str, size: int) -> Map:
    """Return the coverage of the pixels of a label, 0 to 1, float32 [size, width]."""
    font = _font(size)
    picture = Image.new("L", (math.ceil(font.getlength(text)), size))
    ImageDraw.Draw(picture).text((0, size / 2), text, 255, font, anchor="lm")
    return np.asarray(picture, np.float32) / np.float32(255)


@functools.cache  # at most _MAX_FONT sizes
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
