"""What metrics say of explanations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from camserve import _board, _local
from camserve._errors import InvalidArgument
from camserve._picture import FORMATS, encode
from camserve.terminal import printable

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from PIL import Image

    from camserve._result import Explanation, Result
    from camserve._values import ParameterInfo


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric and its parameters; those left out have the server's defaults.

    >>> Metric("deletion", {"steps": 50})
    Metric(name='deletion', parameters={'steps': 50})
    """

    name: str
    parameters: Mapping[str, float | str] = field(default_factory=dict[str, float | str])


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """A metric that the server knows.

    Attributes:
        name: Its name in requests.
        summary: What it measures, in a sentence.
        formula: In words and symbols.
        paper: The paper that defines it.
        parameters: What can be set.
        rows: Image copies that judging one map costs with the default parameters; where ``repeats``
            is set, times those of the method.
        higher_is_better: Whether more of it is better; if not, less is.
        needs_box: Whether it needs to be told where the object is.
        repeats: Whether it has the explanation computed again.
    """

    name: str
    summary: str
    formula: str
    paper: str
    parameters: tuple[ParameterInfo, ...]
    rows: int
    higher_is_better: bool
    needs_box: bool
    repeats: bool


@dataclass(frozen=True, slots=True)
class Curve:
    """How something changes: y at each x.

    Attributes:
        name: What it is, such as "hottest first".
        x: The share, 0 to 1, of the pixels that were changed, or of the model that was randomised.
        y: The target's probability there, or the likeness of the maps.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """What one metric says of one explanation.

    Attributes:
        explanation: That it judges.
        metric: Its name.
        value: The number; NaN where the map cannot be judged, and ``message`` says why.
        higher_is_better: Whether more of it is better; if not, less is.
        message: What the number does not say; may be empty.
        curves: That the number sums up.
        parameters: What the metric ran with, defaults included.
    """

    explanation: Explanation
    metric: str
    value: float
    higher_is_better: bool
    message: str
    curves: tuple[Curve, ...]
    parameters: Mapping[str, float | str]

    @property
    def rank(self) -> float:
        """The better the map is, the lower; last of all where it cannot be judged."""
        if math.isnan(self.value):
            return math.inf
        return -self.value if self.higher_is_better else self.value


@dataclass(frozen=True, eq=False, slots=True)
class Evaluation:
    """The explanations of one image, and what metrics say of them.

    Attributes:
        explained: The explanations, as ``Client.explain`` gives them.
        readings: Of each explanation, in their order, one of each metric, in theirs.
    """

    explained: Result
    readings: tuple[Reading, ...]

    @property
    def rows(self) -> tuple[tuple[Reading, ...], ...]:
        """The readings of each explanation."""
        each = len(self.readings) // max(1, len(self.explained.explanations))
        return tuple(self.readings[start : start + each] for start in range(0, len(self.readings), each or 1))

    @property
    def labels(self) -> tuple[str, ...]:
        """What tells the explanations apart: the method, and layer and target where they differ."""
        given = self.explained.explanations
        names = [each.how for each in given]
        for part in ([each.layer for each in given], [each.title for each in given]):
            if len({name for name in part if name}) > 1:
                names = [f"{name} · {more}" if more else name for name, more in zip(names, part, strict=True)]
        return tuple(names)

    @property
    def best(self) -> frozenset[tuple[int, int]]:
        """Row and column of the best reading of each metric among the explanations of one target."""
        found: set[tuple[int, int]] = set()
        titles = [each.title for each in self.explained.explanations]
        for column in range(len(self.rows[0]) if self.rows else 0):
            for title in dict.fromkeys(titles):
                rows = [row for row, its in enumerate(titles) if its == title]
                ranks = {row: self.rows[row][column].rank for row in rows}
                least = min(ranks.values())
                if len(rows) > 1 and math.isfinite(least):
                    found |= {(row, column) for row, rank in ranks.items() if rank == least}
        return frozenset(found)

    def cells(self) -> tuple[tuple[str, ...], ...]:
        """Write the table: headings first, then one line for each explanation, its label first."""
        first = self.rows[0] if self.rows else ()
        heads = ("", *(f"{each.metric} {'↑' if each.higher_is_better else '↓'}" for each in first))
        lines = (
            (label, *(written(each.value) for each in row)) for label, row in zip(self.labels, self.rows, strict=True)
        )
        return (heads, *lines)

    def table(self) -> str:
        """Write the table as text; ↑ is better for higher numbers, * marks the best of each column."""
        cells = [list(map(printable, line)) for line in self.cells()]
        for row, column in self.best:
            cells[row + 1][column + 1] += " *"
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
        return "\n".join(line.rstrip() for line in lines)

    def remarks(self) -> tuple[tuple[str, str], ...]:
        """What numbers do not say: label and metric of a reading, and its words."""
        return tuple(
            (f"{label}, {each.metric}", each.message)
            for label, row in zip(self.labels, self.rows, strict=True)
            for each in row
            if each.message
        )

    def plain(self) -> list[dict[str, object]]:
        """The readings as plain values, ready for JSON; None for what cannot be judged."""
        return [
            {
                "method": each.explanation.method,
                "layer": each.explanation.layer,
                "target": each.explanation.title,
                "metric": each.metric,
                "value": None if math.isnan(each.value) else each.value,
                "higher_is_better": each.higher_is_better,
                "message": each.message,
                "parameters": dict(each.parameters),
                "curves": [{"name": curve.name, "x": list(curve.x), "y": list(curve.y)} for curve in each.curves],
            }
            for each in self.readings
        ]

    def plot(self) -> Image.Image:
        """Draw the overlays side by side, and below a chart of each metric."""
        tiles = [
            _board.Tile(label, each.overlay_picture.open() if each.overlay_picture else None)
            for label, each in zip(self.labels, self.explained.explanations, strict=True)
        ]
        return _board.draw(tiles, [_panel(column) for column in zip(*self.rows, strict=True)])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plot (.png, .jpg, .webp).

        Returns:
            The path.

        Raises:
            InvalidArgument: The suffix is none of these.
            OSError: The file cannot be written.
        """
        to = Path(path)
        if to.suffix.lower() not in FORMATS:
            raise InvalidArgument(f"cannot save as {to.suffix or to.name!r}; there are {', '.join(FORMATS)}")
        _local.write(to, encode(self.plot(), FORMATS[to.suffix.lower()]))
        return to

    def _repr_png_(self) -> bytes:
        return encode(self.plot(), "png")


def written(value: float) -> str:
    """Write a reading shortly."""
    return "-" if math.isnan(value) else f"{value:.3f}"


def _panel(column: tuple[Reading, ...]) -> _board.Panel:
    first = column[0]
    return _board.Panel(
        title=first.metric.replace("_", " "),
        note="higher is better" if first.higher_is_better else "lower is better",
        bars=[_board.Bar(each.value, written(each.value)) for each in column],
        lines=[[_board.Line(curve.x, curve.y) for curve in each.curves] for each in column],
        names=[curve.name for curve in first.curves],
    )
