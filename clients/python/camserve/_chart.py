"""A chart of norms over depth, drawn with pillow alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from camserve._inspection import LayerReading

WIDTH = 1000
TALLEST = 3000  # pixels that the rows of all layers take at most
ROW = 17

_GAP, _NAMES, _HEAD, _FOOT = 16, 260, 92, 30
_GROUND, _INK, _DIM, _LINE = "#ffffff", "#1f2933", "#6b7785", "#e4e8ec"
_TROUBLE, _SHADE = "#d64545", "#fdecec"
_COLOURS = {"activation norm": "#2f7ebc", "gradient norm": "#e08a1e"}
_WORDS = 11  # least height of a row that has room for words
_TICKS = 7
_LONGEST = 200  # letters of a name


@dataclass(frozen=True, slots=True)
class _Scale:
    """A logarithmic axis: whole decades between two pixels."""

    first: int
    last: int
    left: float
    right: float

    def at(self, value: float) -> float:
        """Return the pixel of a value above zero."""
        return self.left + (math.log10(value) - self.first) / (self.last - self.first) * (self.right - self.left)

    def decades(self) -> range:
        """Return the decades to label, few enough to read."""
        return range(self.first, self.last + 1, max(1, math.ceil((self.last - self.first) / _TICKS)))


def chart(title: str, layers: Sequence[LayerReading]) -> Image.Image:
    """Draw the norm of each layer's activation and gradient, the first layer on top.

    Args:
        title: Above all.
        layers: At least one.
    """
    step = min(float(ROW), TALLEST / len(layers))
    bottom = round(_HEAD + step * len(layers))
    image = Image.new("RGB", (WIDTH, bottom + _FOOT), _GROUND)
    pen = ImageDraw.Draw(image)
    pen.text((_GAP, 12), title[:_LONGEST], _INK, _font(17))
    pen.text(
        (_GAP, 38),
        f"{len(layers)} layers, the first on top; logarithmic scales; red: something is wrong",
        _DIM,
        _font(12),
    )
    _rows(pen, layers, step)
    norms = ([each.activation.norm for each in layers], [each.gradient.norm for each in layers])
    half = (WIDTH - _NAMES - _GAP) / 2
    for place, (name, values) in enumerate(zip(_COLOURS, norms, strict=True)):
        left = _NAMES + place * half
        scale = _scale(values, left, left + half - 2 * _GAP)
        _axis(pen, scale, name, bottom)
        _bars(pen, scale, values, name, layers)
    return image


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _scale(values: Iterable[float], left: float, right: float) -> _Scale:
    found = [math.log10(each) for each in values if 0 < each < math.inf] or [0.0]
    first, last = math.floor(min(found)), math.ceil(max(found))
    return _Scale(first if first < last else first - 1, last, left, right)


def _top(index: int, count: int) -> float:
    return _HEAD + index * min(float(ROW), TALLEST / count)


def _rows(pen: ImageDraw.ImageDraw, layers: Sequence[LayerReading], step: float) -> None:
    """Name the layers, or as many as there is room for; shade those that something is wrong with."""
    every = max(1, math.ceil(_WORDS / step))
    for index, layer in enumerate(layers):
        top = _top(index, len(layers))
        if layer.trouble:
            pen.rectangle((_GAP, top, WIDTH - _GAP, top + max(step - 1, 1)), _SHADE)
        if index % every == 0 or (layer.trouble and step >= _WORDS):
            name = _fitted(layer.name, _NAMES - 2 * _GAP)
            pen.text((_NAMES - 10, top + step / 2), name, _TROUBLE if layer.trouble else _INK, _font(11), anchor="rm")


def _fitted(name: str, width: float) -> str:
    """Shorten a name from its beginning, since layers differ in their ends."""
    font = _font(11)
    name = name[-_LONGEST:]  # the server chose its length, and the loop below takes off one letter at a time
    while font.getbbox(name)[2] > width:
        name = "…" + name[2:]
    return name


def _axis(pen: ImageDraw.ImageDraw, scale: _Scale, name: str, bottom: int) -> None:
    pen.text((scale.left, _HEAD - 10), name, _COLOURS[name], _font(12), anchor="ls")
    for decade in scale.decades():
        at = scale.at(10.0**decade)
        pen.line((at, _HEAD, at, bottom), _LINE)
        pen.text((at, bottom + 6), f"1e{decade}" if decade else "1", _DIM, _font(11), anchor="mt")


def _bars(
    pen: ImageDraw.ImageDraw, scale: _Scale, values: Sequence[float], name: str, layers: Sequence[LayerReading]
) -> None:
    step = min(float(ROW), TALLEST / len(layers))
    inset = step / 4
    for index, (value, layer) in enumerate(zip(values, layers, strict=True)):
        top = _top(index, len(layers))
        colour = _TROUBLE if layer.trouble else _COLOURS[name]
        end = max(scale.at(value), scale.left + 2) if 0 < value < math.inf else scale.left
        if end > scale.left:
            pen.rectangle((scale.left, top + inset, end, max(top + step - inset, top + inset)), colour)
        if layer.trouble and step >= _WORDS:
            pen.text((end + 5, top + step / 2), layer.trouble, colour, _font(10), anchor="lm")
