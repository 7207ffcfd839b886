"""Plot that compares explanations: their overlays side by side, and below them a chart of each metric."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from camserve._show.plots.canvas import (
    COLORS,
    GRID_COLOR,
    MARKER_SIZE,
    MUTED_COLOR,
    Canvas,
    Point,
    Rectangle,
    axis_ticks,
    resized,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from PIL import Image

    from camserve._values.picture import Picture

T = TypeVar("T")

# Sizes in pixels.
TILE_WIDTH, MIN_PANEL_WIDTH, CHART_HEIGHT, GAP, LINE_HEIGHT = 240, 300, 190, 20, 20
MAX_TILE_HEIGHT: Final = 720  # a higher picture is narrower than its tile
BAR_HEIGHT: Final = 16
BAR_PITCH: Final = 26  # from one bar to the next
BAR_LABEL_WIDTH, BAR_VALUE_WIDTH = 110, 52
BAR_BACKGROUND: Final = "#F4F4F4"

MAX_TILE_COLUMNS: Final = 5
MAX_PANEL_COLUMNS: Final = 2  # the plot is wide enough for them even if there are few tiles


@dataclass(frozen=True, slots=True)
class Tile:
    """A picture and its label; an empty frame if there is no picture."""

    label: str
    image: Image.Image | None


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points; points whose y is not finite are left out."""

    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Bar:
    """A value and its label."""

    value: float
    words: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Chart of one metric: a line chart if there are lines, else a bar chart.

    Attributes:
        title: Name of the metric.
        note: Hint on how to read it.
        bars: A value for each tile.
        lines: The lines of each tile; its second and further lines are dashed.
        names: Names of a tile's lines.
    """

    title: str
    note: str
    bars: Sequence[Bar]
    lines: Sequence[Sequence[Line]]
    names: Sequence[str]

    @property
    def height(self) -> int:
        """Height in pixels, with the gap below the panel."""
        if any(self.lines):
            return LINE_HEIGHT + CHART_HEIGHT + LINE_HEIGHT * (len(self.names) > 1) + LINE_HEIGHT * len(self.bars) + GAP
        return LINE_HEIGHT + 8 + BAR_PITCH * len(self.bars) + GAP


def tile(label: str, picture: Picture | None) -> Tile:
    """Return a tile with a picture, reduced to its size: so only one picture at a time has all its pixels in memory."""
    if picture is None:
        return Tile(label, None)
    image = picture.open()
    return Tile(label, resized(image, *_size_in_tile(image)))


def draw(tiles: Sequence[Tile], panels: Sequence[Panel], note: str = "") -> Image.Image:
    """Draw tiles in rows, and the panels below them. Each tile has a colour, which its lines and bars share.

    Args:
        tiles: The tiles.
        panels: The panels.
        note: A line at the lower end.
    """
    tile_columns = max(1, min(MAX_TILE_COLUMNS, len(tiles)))
    panels_width = min(len(panels), MAX_PANEL_COLUMNS) * (MIN_PANEL_WIDTH + GAP)
    width = max(tile_columns * (TILE_WIDTH + GAP), panels_width) + GAP
    tile_height = max((_image_height(tile) for tile in tiles), default=0)
    panel_columns = max(1, (width - GAP) // (MIN_PANEL_WIDTH + GAP))
    panel_width = (width - GAP) // panel_columns - GAP
    tile_rows, panel_rows = list(_split(tiles, tile_columns)), list(_split(panels, panel_columns))
    panel_heights = [max(panel.height for panel in row) for row in panel_rows]
    tile_pitch = tile_height + LINE_HEIGHT + GAP
    height = GAP + len(tile_rows) * tile_pitch + sum(panel_heights) + LINE_HEIGHT * bool(note)
    canvas = Canvas.blank(width, height)

    top = GAP
    for first, row in zip(range(0, len(tiles), tile_columns), tile_rows, strict=True):
        for column, tile in enumerate(row):
            _draw_tile(canvas, tile, _color(first + column), (GAP + column * (TILE_WIDTH + GAP), top), tile_height)
        top += tile_pitch
    labels = [tile.label for tile in tiles]
    for panel_row, panel_height in zip(panel_rows, panel_heights, strict=True):
        for column, panel in enumerate(panel_row):
            _draw_panel(canvas, panel, labels, (GAP + column * (panel_width + GAP), top), panel_width)
        top += panel_height
    canvas.text(note, (GAP, height - LINE_HEIGHT), color=MUTED_COLOR)
    return canvas.result()


def _split(items: Sequence[T], columns: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), columns):
        yield items[start : start + columns]


def _image_height(tile: Tile) -> int:
    return TILE_WIDTH if tile.image is None else _size_in_tile(tile.image)[1]


def _size_in_tile(image: Image.Image) -> tuple[int, int]:
    height = TILE_WIDTH * image.height / image.width
    if height <= MAX_TILE_HEIGHT:
        return TILE_WIDTH, max(1, round(height))
    return max(1, round(MAX_TILE_HEIGHT * image.width / image.height)), MAX_TILE_HEIGHT


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _draw_tile(canvas: Canvas, tile: Tile, color: str, position: Point, frame_height: int) -> None:
    left, top = position
    canvas.marker(color, (left, top + 4))
    canvas.text(tile.label, (left + MARKER_SIZE + 6, top), max_width=TILE_WIDTH - MARKER_SIZE - 6)
    top += LINE_HEIGHT
    if tile.image is None:
        canvas.rectangle((left, top, left + TILE_WIDTH, top + frame_height), outline=GRID_COLOR)
    else:
        width, height = _size_in_tile(tile.image)
        canvas.paste(tile.image, (left + (TILE_WIDTH - width) // 2, top), width, height)


def _draw_panel(canvas: Canvas, panel: Panel, labels: Sequence[str], position: Point, width: int) -> None:
    left, top = position
    canvas.text(panel.title, position, size=14)
    canvas.text(panel.note, (left + width, top + 2), color=MUTED_COLOR, anchor="ra")
    if any(panel.lines):
        _draw_lines(
            canvas, panel, (left + 34, top + LINE_HEIGHT + 8, left + width, top + LINE_HEIGHT + CHART_HEIGHT - 24)
        )
        _draw_legend(canvas, panel, labels, (left, top + LINE_HEIGHT + CHART_HEIGHT), width)
    else:
        _draw_bars(canvas, panel, labels, (left, top + LINE_HEIGHT + 8), width)


def _draw_lines(canvas: Canvas, panel: Panel, area: Rectangle) -> None:
    values = [y for lines in panel.lines for line in lines for y in line.y if math.isfinite(y)]
    low, high = min(0.0, *values), max(values, default=1.0)
    ticks = axis_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    left, top, right, bottom = area

    def to_pixels(x: float, y: float) -> Point:
        return left + x * (right - left), bottom - (y - low) / (high - low) * (bottom - top)

    for tick in ticks:
        tick_y = to_pixels(0, tick)[1]
        canvas.line([(left, tick_y), (right, tick_y)], MUTED_COLOR if tick == 0 else GRID_COLOR, 1)
        canvas.text(f"{tick:g}", (left - 6, tick_y), color=MUTED_COLOR, anchor="rm", size=11)
    for share, anchor in ((0.0, "la"), (0.5, "ma"), (1.0, "ra")):
        canvas.text(
            f"{share:.0%}",
            (to_pixels(share, low)[0], bottom + 5),
            color=MUTED_COLOR,
            anchor=anchor,
            size=11,
        )
    for tile_index, lines in enumerate(panel.lines):
        for line_index, line in enumerate(lines):
            points = [to_pixels(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
            draw_line = canvas.dashed_line if line_index else canvas.line
            draw_line(points, _color(tile_index), 2)


def _draw_legend(canvas: Canvas, panel: Panel, labels: Sequence[str], position: Point, width: int) -> None:
    left, top = position
    if len(panel.names) > 1:
        solid, *dashed = panel.names
        canvas.text(f"solid: {solid}; dashed: {', '.join(dashed)}", position, color=MUTED_COLOR, size=11)
        top += LINE_HEIGHT
    for index, (label, bar) in enumerate(zip(labels, panel.bars, strict=True)):
        canvas.marker(_color(index), (left + 2, top + 4))
        canvas.text(label, (left + MARKER_SIZE + 10, top), max_width=width - 80)
        canvas.text(bar.words, (left + width, top), anchor="ra")
        top += LINE_HEIGHT


def _draw_bars(canvas: Canvas, panel: Panel, labels: Sequence[str], position: Point, width: int) -> None:
    left, top = position
    maximum = max((abs(bar.value) for bar in panel.bars if math.isfinite(bar.value)), default=0.0) or 1.0
    start, length = left + BAR_LABEL_WIDTH, width - BAR_LABEL_WIDTH - BAR_VALUE_WIDTH
    for index, (label, bar) in enumerate(zip(labels, panel.bars, strict=True)):
        canvas.text(label, (left, top + 3), max_width=BAR_LABEL_WIDTH - 6)
        share = abs(bar.value) / maximum if math.isfinite(bar.value) else 0.0
        canvas.rectangle((start, top + 2, start + length, top + 2 + BAR_HEIGHT), fill=BAR_BACKGROUND)
        if share:
            end = start + max(1.0, share * length)
            canvas.rectangle((start, top + 2, end, top + 2 + BAR_HEIGHT), fill=_color(index))
        canvas.text(bar.words, (left + width, top + 3), anchor="ra")
        top += BAR_PITCH
