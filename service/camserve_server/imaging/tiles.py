"""A picture of feature maps: a tile for each channel, labelled with its number and its value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from camserve_server.core.arrays import Map, Pixels
from camserve_server.imaging.opencv import cv2
from camserve_server.imaging.values import Picture

SIDE = 160  # of a tile, at most, in pixels
GAP = 10
LABEL = 22  # height of the line under a tile
TITLE = 22  # height of a line above all tiles
COLUMNS = 3  # at least, so that a title has room

_FONT, _SCALE, _QUALITY = cv2.FONT_HERSHEY_SIMPLEX, 0.42, 95
_GROUND, _PLAIN, _DIM = (32, 26, 24), (235, 232, 230), (160, 152, 148)  # BGR, as all colours here
_FOR, _AGAINST = (110, 200, 250), (250, 170, 110)


@dataclass(frozen=True, slots=True)
class Tile:
    """What one tile shows.

    Attributes:
        name: written under it.
        value: written beside the name.
        map: float32 [h,w].
    """

    name: str
    value: float
    map: Map


def draw(
    image: Pixels, tiles: Sequence[Tile], titles: Sequence[str], colours: Pixels, kind: Literal["jpeg", "png", "webp"]
) -> Picture:
    """Draw tiles in rank, after one of the image.

    Each tile is coloured from its own least value to its own greatest; what is not finite is grey. A cell stays a
    square: nothing is interpolated but where a map has more cells than its tile has pixels.

    Args:
        image: what the model saw, uint8 [H,W,3].
        tiles: at least one, their maps all of one size.
        titles: lines above all.
        colours: RGB of the intensities 0 to 255, uint8 [256,3].
        kind: encoding of the picture.
    """
    height, width = _tile_size(tiles[0].map)
    columns = max(COLUMNS, math.ceil(math.sqrt(len(tiles) + 1)))
    rows = math.ceil((len(tiles) + 1) / columns)
    top = GAP + TITLE * len(titles)
    down, across = height + LABEL + GAP, width + GAP
    canvas = np.full((top + rows * down + GAP, columns * across + GAP, 3), _GROUND, np.uint8)
    for line, title in enumerate(titles):
        _write(canvas, title, (GAP, GAP + TITLE * line + 18), _DIM if line else _PLAIN, canvas.shape[1] - 2 * GAP)
    places = [(top + GAP + row * down, GAP + column * across) for row in range(rows) for column in range(columns)]
    photo = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA).astype(np.uint8, copy=False)
    _place(canvas, photo[..., ::-1], places[0])
    _write(canvas, "input", (places[0][1], places[0][0] + height + 15), _DIM, width)
    for tile, (above, left) in zip(tiles, places[1:], strict=False):
        _place(canvas, painted(tile.map, (height, width), colours), (above, left))
        _write(canvas, _note(tile.map), (left + 5, above + 14), _DIM, width - 10)
        _label(canvas, tile, (left, above + height + 15), width)
    return _packed(canvas, kind)


def _tile_size(heatmap: Map) -> tuple[int, int]:
    """Return the height and width of a tile: whole multiples of the map's, where it is smaller than a tile."""
    height, width = heatmap.shape
    scale = SIDE / max(height, width)
    scale = math.floor(scale) if scale >= 1 else scale
    return max(1, round(height * scale)), max(1, round(width * scale))


def painted(heatmap: Map, size: tuple[int, int], colours: Pixels) -> Pixels:
    """Colour a map [h,w] from its least value to its greatest: BGR, uint8 of a size."""
    finite = np.isfinite(heatmap)
    low, high = (heatmap[finite].min(), heatmap[finite].max()) if finite.any() else (0.0, 0.0)
    levels = (np.where(finite, heatmap, low) - low) / (high - low) if high > low else np.zeros_like(heatmap)
    drawn = colours[np.rint(levels * 255).astype(np.uint8)][..., ::-1].copy()
    drawn[~finite] = (128, 128, 128)
    way = cv2.INTER_NEAREST if size[0] >= heatmap.shape[0] else cv2.INTER_AREA
    return cv2.resize(drawn, (size[1], size[0]), interpolation=way).astype(np.uint8, copy=False)


def _note(heatmap: Map) -> str:
    """Say of a tile of one colour what it is."""
    if not np.isfinite(heatmap).any():
        return "not finite"
    return f"all {heatmap.flat[0]:.3g}" if heatmap.min() == heatmap.max() else ""


def _place(canvas: Pixels, tile: Pixels, place: tuple[int, int]) -> None:
    top, left = place
    canvas[top : top + tile.shape[0], left : left + tile.shape[1]] = tile


def _label(canvas: Pixels, tile: Tile, at: tuple[int, int], width: int) -> None:
    value = f"{tile.value:+.3g}"
    (long, _), _ = cv2.getTextSize(value, _FONT, _SCALE, 1)
    _write(canvas, tile.name, at, _PLAIN, width - long - GAP)
    _write(canvas, value, (at[0] + width - long, at[1]), _FOR if tile.value > 0 else _AGAINST, width)


def _write(canvas: Pixels, text: str, at: tuple[int, int], colour: tuple[int, int, int], width: int) -> None:
    """Write a line from a place on its baseline, cut where it would be wider than it may be."""
    while text and cv2.getTextSize(text, _FONT, _SCALE, 1)[0][0] > width:
        text = text[:-2].rstrip() + "…" if len(text) > 2 else ""  # noqa: PLR2004 -- a letter and the dots
    cv2.putText(canvas, text, at, _FONT, _SCALE, colour, 1, cv2.LINE_AA)


def _packed(canvas: Pixels, kind: Literal["jpeg", "png", "webp"]) -> Picture:
    qualities = {"jpeg": (cv2.IMWRITE_JPEG_QUALITY, _QUALITY), "png": (), "webp": (cv2.IMWRITE_WEBP_QUALITY, _QUALITY)}
    _, data = cv2.imencode(f".{kind}", canvas, qualities[kind])
    return Picture(kind, data.tobytes(), canvas.shape[1], canvas.shape[0])
