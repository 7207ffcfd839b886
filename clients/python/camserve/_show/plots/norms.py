"""Bar charts of the norms of activations and gradients, over the depth of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from PIL import Image, ImageDraw, ImageFont

from camserve._show.plots.canvas import MAX_LABEL_CHARACTERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from camserve._values.inspection import LayerReading

# Sizes in pixels.
WIDTH, HEADER_HEIGHT, FOOTER_HEIGHT = 1000, 92, 30
MAX_ROW_HEIGHT = 17
MAX_ROWS_HEIGHT = 3000  # of the rows of all layers together
_MIN_TEXT_ROW_HEIGHT = 11  # lower rows have no text
_GAP, _NAMES_WIDTH = 16, 260

PROBLEM_COLOR: Final = "#d64545"
SERIES_COLORS: Final = {"activation norm": "#2f7ebc", "gradient norm": "#e08a1e"}
_BACKGROUND, _TEXT, _MUTED, _GRID, _PROBLEM_BACKGROUND = "#ffffff", "#1f2933", "#6b7785", "#e4e8ec", "#fdecec"

_MAX_TICKS = 7


@dataclass(frozen=True, slots=True)
class _LogScale:
    """Logarithmic axis: whole decades between two pixels."""

    first: int
    last: int
    left: float
    right: float

    def to_pixel(self, value: float) -> float:
        """Return the pixel of a value above zero."""
        return self.left + (math.log10(value) - self.first) / (self.last - self.first) * (self.right - self.left)

    def ticks(self) -> range:
        """Return the exponents of the decades to label, few enough to read."""
        return range(self.first, self.last + 1, max(1, math.ceil((self.last - self.first) / _MAX_TICKS)))


def plot_norms(title: str, layers: Sequence[LayerReading]) -> Image.Image:
    """Plot the norm of each layer's activation and gradient, with the first layer on top.

    Args:
        title: Title of the plot.
        layers: The layers, at least one.
    """
    row_height = min(float(MAX_ROW_HEIGHT), MAX_ROWS_HEIGHT / len(layers))
    bottom = round(HEADER_HEIGHT + row_height * len(layers))
    image = Image.new("RGB", (WIDTH, bottom + FOOTER_HEIGHT), _BACKGROUND)
    pen = ImageDraw.Draw(image)
    note = f"{len(layers)} layers, from first to last; logarithmic scales; red: problem"
    pen.text((_GAP, 12), title[:MAX_LABEL_CHARACTERS], _TEXT, _font(17))
    pen.text((_GAP, 38), note, _MUTED, _font(12))
    _draw_names(pen, layers, row_height)
    series = ([layer.activation.norm for layer in layers], [layer.gradient.norm for layer in layers])
    chart_width = (WIDTH - _NAMES_WIDTH - _GAP) / 2
    for index, (name, values) in enumerate(zip(SERIES_COLORS, series, strict=True)):
        left = _NAMES_WIDTH + index * chart_width
        scale = _fit_scale(values, left, left + chart_width - 2 * _GAP)
        _draw_axis(pen, scale, name, bottom)
        _draw_bars(pen, scale, values, name, layers)
    return image


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _fit_scale(values: Iterable[float], left: float, right: float) -> _LogScale:
    exponents = [math.log10(value) for value in values if 0 < value < math.inf] or [0.0]
    first, last = math.floor(min(exponents)), math.ceil(max(exponents))
    return _LogScale(first if first < last else first - 1, last, left, right)


def _row_top(index: int, count: int) -> float:
    return HEADER_HEIGHT + index * min(float(MAX_ROW_HEIGHT), MAX_ROWS_HEIGHT / count)


def _draw_names(pen: ImageDraw.ImageDraw, layers: Sequence[LayerReading], row_height: float) -> None:
    """Draw the names of as many layers as there is room for, and a background for layers with a problem."""
    interval = max(1, math.ceil(_MIN_TEXT_ROW_HEIGHT / row_height))
    for index, layer in enumerate(layers):
        top = _row_top(index, len(layers))
        if layer.trouble:
            pen.rectangle((_GAP, top, WIDTH - _GAP, top + max(row_height - 1, 1)), _PROBLEM_BACKGROUND)
        if index % interval == 0 or (layer.trouble and row_height >= _MIN_TEXT_ROW_HEIGHT):
            name = _truncate_start(layer.name, _NAMES_WIDTH - 2 * _GAP)
            color = PROBLEM_COLOR if layer.trouble else _TEXT
            pen.text((_NAMES_WIDTH - 10, top + row_height / 2), name, color, _font(11), anchor="rm")


def _truncate_start(name: str, width: float) -> str:
    """Truncate a name at its start, because the names of layers differ at their ends."""
    font = _font(11)
    name = name[-MAX_LABEL_CHARACTERS:]  # the server chose the length, and the loop removes one character at a time
    while font.getbbox(name)[2] > width:
        name = "…" + name[2:]
    return name


def _draw_axis(pen: ImageDraw.ImageDraw, scale: _LogScale, name: str, bottom: int) -> None:
    pen.text((scale.left, HEADER_HEIGHT - 10), name, SERIES_COLORS[name], _font(12), anchor="ls")
    for exponent in scale.ticks():
        x = scale.to_pixel(10.0**exponent)
        pen.line((x, HEADER_HEIGHT, x, bottom), _GRID)
        pen.text((x, bottom + 6), f"1e{exponent}" if exponent else "1", _MUTED, _font(11), anchor="mt")


def _draw_bars(
    pen: ImageDraw.ImageDraw,
    scale: _LogScale,
    values: Sequence[float],
    name: str,
    layers: Sequence[LayerReading],
) -> None:
    row_height = min(float(MAX_ROW_HEIGHT), MAX_ROWS_HEIGHT / len(layers))
    inset = row_height / 4
    for index, (value, layer) in enumerate(zip(values, layers, strict=True)):
        top = _row_top(index, len(layers))
        color = PROBLEM_COLOR if layer.trouble else SERIES_COLORS[name]
        end = max(scale.to_pixel(value), scale.left + 2) if 0 < value < math.inf else scale.left
        if end > scale.left:
            pen.rectangle((scale.left, top + inset, end, max(top + row_height - inset, top + inset)), color)
        if layer.trouble and row_height >= _MIN_TEXT_ROW_HEIGHT:
            pen.text((end + 5, top + row_height / 2), layer.trouble, color, _font(10), anchor="lm")
