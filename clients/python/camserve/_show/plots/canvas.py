"""Canvas with the shapes that plots consist of, and the dashes and axis ticks of line charts."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from collections.abc import Sequence

Point: TypeAlias = "tuple[float, float]"
Rectangle: TypeAlias = "tuple[float, float, float, float]"

# The palette of Okabe and Ito, which people with red-green colour blindness can tell apart. Its yellow is left out: it
# is too light for lines.
COLORS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555", "#8B5A2B")
TEXT_COLOR, MUTED_COLOR, GRID_COLOR, BACKGROUND_COLOR = "#222222", "#767676", "#E4E4E4", "#FFFFFF"

MARKER_SIZE: Final = 10
MAX_LABEL_CHARACTERS: Final = 200
_SUPERSAMPLING: Final = 2  # drawn pixels for each pixel of the result, so that lines are smooth
_DASH_LENGTH: Final = 5.0


@dataclass(frozen=True, slots=True)
class Canvas:
    """Image that is drawn at a higher resolution and then reduced. All coordinates are pixels of the result."""

    drawing: Image.Image
    pen: ImageDraw.ImageDraw

    @staticmethod
    def blank(width: int, height: int) -> Canvas:
        """Return an empty canvas."""
        image = Image.new("RGB", (width * _SUPERSAMPLING, height * _SUPERSAMPLING), BACKGROUND_COLOR)
        return Canvas(image, ImageDraw.Draw(image))

    def result(self) -> Image.Image:
        """Return the drawing in its final size."""
        return self.drawing.reduce(_SUPERSAMPLING)

    def paste(self, image: Image.Image, position: Point, width: int, height: int) -> None:
        """Draw an image in another size."""
        left, top = position
        self.drawing.paste(resized(image, width, height), (round(left * _SUPERSAMPLING), round(top * _SUPERSAMPLING)))

    def marker(self, color: str, position: Point) -> None:
        """Draw a small square, as in a legend."""
        left, top = position
        self.rectangle((left, top, left + MARKER_SIZE, top + MARKER_SIZE), fill=color)

    def text(
        self,
        text: str,
        position: Point,
        *,
        color: str = TEXT_COLOR,
        size: int = 13,
        anchor: str = "la",
        max_width: float = math.inf,
    ) -> None:
        """Draw a line of text, truncated to a width. The anchor is that of Pillow."""
        font = ImageFont.load_default(size * _SUPERSAMPLING)
        text = text[:MAX_LABEL_CHARACTERS]  # the server chose the length, and the loop removes one character at a time
        while len(text) > 1 and self.pen.textlength(text, font) > max_width * _SUPERSAMPLING:
            text = f"{text.rstrip('…')[:-1]}…"
        self.pen.text((position[0] * _SUPERSAMPLING, position[1] * _SUPERSAMPLING), text, color, font, anchor=anchor)

    def line(self, points: Sequence[Point], color: str, width: int) -> None:
        """Draw a line through points."""
        scaled = [(x * _SUPERSAMPLING, y * _SUPERSAMPLING) for x, y in points]
        self.pen.line(scaled, color, width * _SUPERSAMPLING, joint="curve")

    def dashed_line(self, points: Sequence[Point], color: str, width: int) -> None:
        """Draw a dashed line through points."""
        for dash in dashes(points):
            self.line(dash, color, width)

    def rectangle(self, edges: Rectangle, *, fill: str | None = None, outline: str | None = None) -> None:
        """Draw a rectangle, given its left, upper, right and lower edges."""
        self.pen.rectangle([edge * _SUPERSAMPLING for edge in edges], fill, outline, _SUPERSAMPLING)


def resized(image: Image.Image, width: int, height: int) -> Image.Image:
    """Return an image in another size of the result, at the resolution in which a canvas is drawn."""
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    return rgb.resize((width * _SUPERSAMPLING, height * _SUPERSAMPLING), Image.Resampling.LANCZOS)


def axis_ticks(low: float, high: float) -> list[float]:
    """Return two to six round numbers, from at most the lowest to at least the highest value."""
    rough_step = (high - low or 1.0) / 4
    power = 10.0 ** math.floor(math.log10(rough_step))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough_step)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


def dashes(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Cut a line into dashes; return the two ends of each."""
    ends: list[tuple[Point, Point]] = []
    drawn = 0.0  # length of the line so far, with the gaps
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        length = math.hypot(x1 - x0, y1 - y0)
        start = 0.0
        while start < length:
            step = min(_DASH_LENGTH - drawn % _DASH_LENGTH, length - start)
            if drawn // _DASH_LENGTH % 2 == 0:
                first, second = (
                    (x0 + (x1 - x0) * distance / length, y0 + (y1 - y0) * distance / length)
                    for distance in (start, start + step)
                )
                ends.append((first, second))
            start, drawn = start + step, drawn + step
    return ends
