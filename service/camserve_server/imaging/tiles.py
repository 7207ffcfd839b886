"""Picture of feature maps: a tile for each channel, labelled with its number and its value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from camserve_server.core.arrays import Map, Pixels
from camserve_server.imaging.opencv import cv2
from camserve_server.imaging.values import Picture

SIDE = 160  # largest side of a tile, in pixels as all lengths here
GAP = 10  # between tiles
LABEL = 22  # height of the line below a tile
TITLE = 22  # height of a line above all tiles
MIN_COLUMNS = 3  # room for a title

_FONT, _SCALE, _QUALITY = cv2.FONT_HERSHEY_SIMPLEX, 0.42, 95
_BACKGROUND, _TEXT, _DIM_TEXT = (32, 26, 24), (235, 232, 230), (160, 152, 148)  # BGR, as all colours here
_POSITIVE, _NEGATIVE = (110, 200, 250), (250, 170, 110)


@dataclass(frozen=True, slots=True)
class Tile:
    """Content of one tile.

    Attributes:
        name: text below the tile.
        value: number beside the name, or a text.
        map: float32 [h,w].
        picture: picture that is drawn instead of the map, RGB; None for the map.
    """

    name: str
    value: float | str
    map: Map
    picture: Pixels | None = None


def draw(
    image: Pixels,
    tiles: Sequence[Tile],
    titles: Sequence[str],
    colours: Pixels,
    kind: Literal["jpeg", "png", "webp"],
    side: int = SIDE,
) -> Picture:
    """Draw tiles in the order given, after a tile of the image.

    Each tile is coloured from its own minimum to its own maximum; values that are not finite are grey. Cells stay
    squares: a map is only interpolated if it has more cells than its tile has pixels.

    Args:
        image: the model's input as a picture, uint8 [H,W,3].
        tiles: at least one tile, with maps of the same size.
        titles: lines of text above all tiles.
        colours: RGB of the intensities 0 to 255, uint8 [256,3].
        kind: encoding of the picture.
        side: largest side of a tile.
    """
    height, width = _tile_size(tiles[0].map, side)
    columns = max(MIN_COLUMNS, math.ceil(math.sqrt(len(tiles) + 1)))
    rows = math.ceil((len(tiles) + 1) / columns)
    top = GAP + TITLE * len(titles)
    down, across = height + LABEL + GAP, width + GAP
    canvas = np.full((top + rows * down + GAP, columns * across + GAP, 3), _BACKGROUND, np.uint8)
    for line, title in enumerate(titles):
        _write(canvas, title, (GAP, GAP + TITLE * line + 18), _DIM_TEXT if line else _TEXT, canvas.shape[1] - 2 * GAP)
    places = [(top + GAP + row * down, GAP + column * across) for row in range(rows) for column in range(columns)]
    photo = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA).astype(np.uint8, copy=False)
    _place(canvas, photo[..., ::-1], places[0])
    _write(canvas, "input", (places[0][1], places[0][0] + height + 15), _DIM_TEXT, width)
    for tile, (above, left) in zip(tiles, places[1:], strict=False):
        _place(canvas, _content(tile, (height, width), colours), (above, left))
        _write(canvas, _note(tile.map), (left + 5, above + 14), _DIM_TEXT, width - 10)
        _label(canvas, tile, (left, above + height + 15), width)
    return encode(canvas, kind)


def _content(tile: Tile, size: tuple[int, int], colours: Pixels) -> Pixels:
    """Return what a tile shows, BGR: its picture, or its map."""
    if tile.picture is None:
        return colour_map(tile.map, size, colours)
    return cv2.resize(tile.picture, size[::-1], interpolation=cv2.INTER_AREA).astype(np.uint8, copy=False)[..., ::-1]


def _tile_size(heatmap: Map, side: int = SIDE) -> tuple[int, int]:
    """Return the height and width of a tile: whole multiples of the map's, if the map is smaller than a tile."""
    height, width = heatmap.shape
    scale = side / max(height, width)
    scale = math.floor(scale) if scale >= 1 else scale
    return max(1, round(height * scale)), max(1, round(width * scale))


def colour_map(heatmap: Map, size: tuple[int, int], colours: Pixels) -> Pixels:
    """Colour a map [h,w] from its minimum to its maximum; return BGR, uint8 [*size,3]."""
    finite = np.isfinite(heatmap)
    low, high = (heatmap[finite].min(), heatmap[finite].max()) if finite.any() else (0.0, 0.0)
    levels = (np.where(finite, heatmap, low) - low) / (high - low) if high > low else np.zeros_like(heatmap)
    coloured = colours[np.rint(levels * 255).astype(np.uint8)][..., ::-1].copy()
    coloured[~finite] = (128, 128, 128)
    interpolation = cv2.INTER_NEAREST if size[0] >= heatmap.shape[0] else cv2.INTER_AREA
    return cv2.resize(coloured, (size[1], size[0]), interpolation=interpolation).astype(np.uint8, copy=False)


def _note(heatmap: Map) -> str:
    """Return a note on a map that has one colour, or is not finite; else nothing."""
    if not np.isfinite(heatmap).any():
        return "not finite"
    return f"all {heatmap.flat[0]:.3g}" if heatmap.min() == heatmap.max() else ""


def _place(canvas: Pixels, tile: Pixels, place: tuple[int, int]) -> None:
    top, left = place
    canvas[top : top + tile.shape[0], left : left + tile.shape[1]] = tile


def _label(canvas: Pixels, tile: Tile, at: tuple[int, int], width: int) -> None:
    value, colour = str(tile.value), _DIM_TEXT
    if not isinstance(tile.value, str):
        value, colour = f"{tile.value:+.3g}", _POSITIVE if tile.value > 0 else _NEGATIVE
    (value_width, _), _ = cv2.getTextSize(value, _FONT, _SCALE, 1)
    _write(canvas, tile.name, at, _TEXT, width - value_width - GAP)
    _write(canvas, value, (at[0] + width - value_width, at[1]), colour, width)


def _write(canvas: Pixels, text: str, at: tuple[int, int], colour: tuple[int, int, int], width: int) -> None:
    """Write a line of text from a point on its baseline, truncated to a width."""
    while text and cv2.getTextSize(text, _FONT, _SCALE, 1)[0][0] > width:
        text = text[:-2].rstrip() + "…" if len(text) > 2 else ""  # noqa: PLR2004 -- a letter and the dots
    cv2.putText(canvas, text, at, _FONT, _SCALE, colour, 1, cv2.LINE_AA)


def encode(canvas: Pixels, kind: Literal["jpeg", "png", "webp"]) -> Picture:
    """Encode a picture, BGR."""
    qualities = {"jpeg": (cv2.IMWRITE_JPEG_QUALITY, _QUALITY), "png": (), "webp": (cv2.IMWRITE_WEBP_QUALITY, _QUALITY)}
    _, data = cv2.imencode(f".{kind}", canvas, qualities[kind])
    return Picture(kind, data.tobytes(), canvas.shape[1], canvas.shape[0])
