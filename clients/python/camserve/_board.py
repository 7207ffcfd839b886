"""Pictures of readings: photos side by side, and charts of lines and bars below; drawn with Pillow alone."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

Point: TypeAlias = "tuple[float, float]"
Rectangle: TypeAlias = "tuple[float, float, float, float]"

# Okabe and Ito's colours, which people who cannot tell red from green can tell apart; yellow is too light for lines.
COLORS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555", "#8B5A2B")
INK, FAINT, GRID, PAPER = "#222222", "#767676", "#E4E4E4", "#FFFFFF"

FINE: Final = 2  # pixels of the drawing for one of the result, so that lines are smooth
_LONGEST: Final = 200  # letters of a label
TILE, PANEL, CHART, GAP, LINE, SWATCH = 240, 300, 190, 20, 20, 10
COLUMNS, DASH = 5, 5.0


@dataclass(frozen=True, slots=True)
class Tile:
    """A picture and its label; without a picture, an empty frame."""

    label: str
    image: Image.Image | None


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points; those that are NaN are passed over."""

    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Bar:
    """A value, and how it is written."""

    value: float
    words: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart: of the lines where there are any, else of the bars.

    Attributes:
        title: What is measured.
        note: How to read it.
        bars: A value for each tile.
        lines: For each tile its lines, the second and later ones of which are dashed.
        names: Of the lines.
    """

    title: str
    note: str
    bars: Sequence[Bar]
    lines: Sequence[Sequence[Line]]
    names: Sequence[str]

    @property
    def height(self) -> int:
        """Rows of pixels that it takes, with the gap below it."""
        if any(self.lines):
            return LINE + CHART + LINE * (len(self.names) > 1) + LINE * len(self.bars) + GAP
        return LINE + 8 + (LINE + 6) * len(self.bars) + GAP


def draw(tiles: Sequence[Tile], panels: Sequence[Panel]) -> Image.Image:
    """Draw tiles in rows, each with a colour, and below them the panels in which the colours return."""
    columns = max(1, min(COLUMNS, len(tiles)))
    width = max(columns * (TILE + GAP), min(len(panels), 2) * (PANEL + GAP)) + GAP
    tall = max((_height(tile) for tile in tiles), default=0)
    beside = max(1, (width - GAP) // (PANEL + GAP))
    tile_rows = list(_rows(tiles, columns))
    panel_rows = list(_rows(panels, beside))
    deep = [max(panel.height for panel in row) for row in panel_rows]
    sheet = _Sheet.blank(width, GAP + len(tile_rows) * (tall + LINE + GAP) + sum(deep))
    top = GAP
    for start, row in zip(range(0, len(tiles), columns), tile_rows, strict=True):
        for place, tile in enumerate(row):
            sheet.tile(tile, _color(start + place), (GAP + place * (TILE + GAP), top), tall)
        top += tall + LINE + GAP
    wide = (width - GAP) // beside - GAP
    for line, below in zip(panel_rows, deep, strict=True):
        for place, panel in enumerate(line):
            sheet.panel(panel, [tile.label for tile in tiles], (GAP + place * (wide + GAP), top), wide)
        top += below
    return sheet.image.reduce(FINE)


def _rows(things: Sequence[T], columns: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(things), columns):
        yield things[start : start + columns]


def _height(tile: Tile) -> int:
    return TILE if tile.image is None else max(1, round(TILE * tile.image.height / tile.image.width))


def _color(place: int) -> str:
    return COLORS[place % len(COLORS)]


@dataclass(frozen=True, slots=True)
class _Sheet:
    """A picture under construction, in pixels of the result."""

    image: Image.Image
    pen: ImageDraw.ImageDraw

    @staticmethod
    def blank(width: int, height: int) -> _Sheet:
        image = Image.new("RGB", (width * FINE, height * FINE), PAPER)
        return _Sheet(image, ImageDraw.Draw(image))

    def tile(self, tile: Tile, color: str, at: Point, tall: int) -> None:
        left, top = at
        self.mark(color, (left, top + 4))
        self.words(tile.label, (left + SWATCH + 6, top), most=TILE - SWATCH - 6)
        top += LINE
        if tile.image is None:
            self.box((left, top, left + TILE, top + tall), outline=GRID)
            return
        small = tile.image.convert("RGB").resize((TILE * FINE, _height(tile) * FINE), Image.Resampling.LANCZOS)
        self.image.paste(small, (round(left * FINE), round(top * FINE)))

    def panel(self, panel: Panel, labels: Sequence[str], at: Point, wide: int) -> None:
        left, top = at
        self.words(panel.title, at, size=14)
        self.words(panel.note, (left + wide, top + 2), color=FAINT, anchor="ra")
        if any(panel.lines):
            self.lines(panel, (left + 34, top + LINE + 8, left + wide, top + LINE + CHART - 24))
            self.legend(panel, labels, (left, top + LINE + CHART), wide)
        else:
            self.bars(panel, labels, (left, top + LINE + 8), wide)

    def lines(self, panel: Panel, area: Rectangle) -> None:
        values = [y for lines in panel.lines for line in lines for y in line.y if math.isfinite(y)]
        low, high = min(0.0, *values), max(values, default=1.0)
        ticks = _ticks(low, high)
        low, high = min(low, ticks[0]), max(high, ticks[-1])
        left, top, right, bottom = area

        def place(x: float, y: float) -> Point:
            return left + x * (right - left), bottom - (y - low) / (high - low) * (bottom - top)

        for tick in ticks:
            level = place(0, tick)[1]
            self.line([(left, level), (right, level)], FAINT if tick == 0 else GRID, 1)
            self.words(f"{tick:g}", (left - 6, level), color=FAINT, anchor="rm", size=11)
        for share, anchor in ((0.0, "la"), (0.5, "ma"), (1.0, "ra")):
            self.words(f"{share:.0%}", (place(share, low)[0], bottom + 5), color=FAINT, anchor=anchor, size=11)
        for number, lines in enumerate(panel.lines):
            for order, line in enumerate(lines):
                points = [place(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
                self.line(_dashed(points) if order else points, _color(number), 2, pairs=bool(order))

    def legend(self, panel: Panel, labels: Sequence[str], at: Point, wide: int) -> None:
        left, top = at
        if len(panel.names) > 1:
            solid, *dashed = panel.names
            self.words(f"solid: {solid}; dashed: {', '.join(dashed)}", at, color=FAINT, size=11)
            top += LINE
        for place, (label, bar) in enumerate(zip(labels, panel.bars, strict=True)):
            self.mark(_color(place), (left + 2, top + 4))
            self.words(label, (left + SWATCH + 10, top), most=wide - 80)
            self.words(bar.words, (left + wide, top), anchor="ra")
            top += LINE

    def bars(self, panel: Panel, labels: Sequence[str], at: Point, wide: int) -> None:
        left, top = at
        most = max((abs(bar.value) for bar in panel.bars if math.isfinite(bar.value)), default=0.0) or 1.0
        start, room = left + 110, wide - 110 - 52
        for place, (label, bar) in enumerate(zip(labels, panel.bars, strict=True)):
            self.words(label, (left, top + 3), most=104)
            share = abs(bar.value) / most if math.isfinite(bar.value) else 0.0
            self.box((start, top + 2, start + room, top + 18), fill="#F4F4F4")
            if share:
                self.box((start, top + 2, start + max(1.0, share * room), top + 18), fill=_color(place))
            self.words(bar.words, (left + wide, top + 3), anchor="ra")
            top += LINE + 6

    def mark(self, color: str, at: Point) -> None:
        self.box((at[0], at[1], at[0] + SWATCH, at[1] + SWATCH), fill=color)

    def words(
        self, text: str, at: Point, *, color: str = INK, size: int = 13, anchor: str = "la", most: float = math.inf
    ) -> None:
        font = ImageFont.load_default(size * FINE)
        text = text[:_LONGEST]  # the server chose its length, and the loop below takes off one letter at a time
        while len(text) > 1 and self.pen.textlength(text, font) > most * FINE:
            text = f"{text.rstrip('…')[:-1]}…"
        self.pen.text((at[0] * FINE, at[1] * FINE), text, color, font, anchor=anchor)

    def line(self, points: Sequence[Point], color: str, width: int, *, pairs: bool = False) -> None:
        scaled = [(x * FINE, y * FINE) for x, y in points]
        parts = zip(scaled[::2], scaled[1::2], strict=False) if pairs else (scaled,)
        for part in parts:
            self.pen.line(list(part), color, width * FINE, joint="curve")

    def box(self, where: Rectangle, *, fill: str | None = None, outline: str | None = None) -> None:
        self.pen.rectangle([edge * FINE for edge in where], fill, outline, FINE)


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers from below the lowest to above the highest, three to six of them."""
    rough = (high - low or 1.0) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(times * unit for times in (1, 2, 2.5, 5, 10) if times * unit >= rough)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


def _dashed(points: Sequence[Point]) -> list[Point]:
    """Cut a line into dashes: the first and second point of each, one after another."""
    ends: list[Point] = []
    walked = 0.0
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        length = math.hypot(x1 - x0, y1 - y0)
        at = 0.0
        while at < length:
            step = min(DASH - walked % DASH, length - at)
            if walked // DASH % 2 == 0:
                ends += [(x0 + (x1 - x0) * t / length, y0 + (y1 - y0) * t / length) for t in (at, at + step)]
            at, walked = at + step, walked + step
    return ends
