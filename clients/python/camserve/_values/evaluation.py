"""Evaluations of explanations by metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from camserve._core.errors import InvalidArgument
from camserve._core.files import write_file
from camserve._core.text import aligned
from camserve._values import display
from camserve._values.picture import FORMATS, encode_picture

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from PIL import Image

    from camserve._values.methods import ParameterInfo
    from camserve._values.result import Explanation, Result


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric and its parameters. Omitted parameters have the server's defaults.

    Attributes:
        name: Name of the metric.
        parameters: Values of the parameters by name.

    Example:
        >>> metric = camserve.Metric("deletion", {"steps": 4})
        >>> reading = client.evaluate("cat.jpg", metrics=[metric]).readings[0]
        >>> reading.metric, reading.parameters
        ('deletion', {'steps': 4.0})
    """

    name: str
    parameters: Mapping[str, float | str] = field(default_factory=dict[str, float | str])


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """Description of one of the server's metrics.

    Attributes:
        name: Name of the metric in requests.
        summary: The measured property, in a sentence.
        formula: The formula in words and symbols.
        paper: The paper that defines it.
        parameters: The parameters that a request can set.
        rows: The number of rows (copies of the image through the model) that the evaluation of one map
            costs with the default parameters. If ``repeats`` is set, multiply it by the method's rows.
        higher_is_better: True if higher values are better, False if lower values are.
        needs_box: True if it needs the position of the object.
        repeats: True if it computes the explanation again.

    Example:
        >>> metrics = {metric.name: metric for metric in client.metrics()}
        >>> metrics["deletion"].rows, metrics["deletion"].higher_is_better
        (20, False)
        >>> print(metrics["deletion"].summary)
        Measure how fast the probability falls when pixels are removed, the greatest first
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
    """Curve of a metric: y at each x.

    Attributes:
        name: Name of the curve, such as "hottest first".
        x: The share of the pixels that were changed, or of the model that was randomised, 0 to 1.
        y: The target's probability at x, or the similarity of the maps.

    Example:
        >>> metric = ("insertion", {"steps": 4})
        >>> curve = client.evaluate("cat.jpg", metrics=[metric]).readings[0].curves[0]
        >>> curve.name, curve.x
        ('insertion', (0.0, 0.25, 0.5, 0.75, 1.0))
        >>> [round(probability, 1) for probability in curve.y]  # from a blurred photo to the photo itself
        [0.4, 0.6, 0.7, 0.5, 0.4]
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """Value of one metric for one explanation.

    Attributes:
        explanation: The evaluated explanation.
        metric: Name of the metric.
        value: The value; NaN if the map cannot be evaluated, and ``message`` gives the reason.
        higher_is_better: True if higher values are better, False if lower values are.
        message: A remark on the value; may be empty.
        curves: The curves that the value summarises.
        parameters: All parameters of the metric, including defaults.

    Example:
        >>> for reading in client.evaluate("cat.jpg", metrics=["sparseness", "complexity"]).readings:
        ...     print(reading.metric, round(reading.value, 1), reading.higher_is_better)
        sparseness 0.3 True
        complexity 10.7 False
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
        """Sort key: lower for better maps, infinite if the map cannot be evaluated.

        Example:
            >>> evaluation = client.evaluate("cat.jpg", methods=["gradcam", "layercam"], metrics=["sparseness"])
            >>> min(evaluation.readings, key=lambda reading: reading.rank).explanation.method
            'gradcam'
        """
        if math.isnan(self.value):
            return math.inf
        return -self.value if self.higher_is_better else self.value


@dataclass(frozen=True, eq=False, slots=True)
class Evaluation:
    """Explanations of one image, and their values by several metrics.

    Attributes:
        explained: The explanations, as returned by ``Client.explain``.
        readings: The readings of the first explanation by every metric, then those of the second, and so on.

    Example:
        >>> methods = ["gradcam", "layercam"]
        >>> evaluation = client.evaluate("cat.jpg", methods=methods, metrics=["sparseness", "complexity"])
        >>> print(evaluation.table())
                  sparseness ↑  complexity ↓
        gradcam   0.266 *       10.707 *
        layercam  0.256         10.715
        >>> [reading.metric for reading in evaluation.rows[0]], evaluation.labels
        (['sparseness', 'complexity'], ('gradcam', 'layercam'))
        >>> sorted(evaluation.best)  # rows and columns that the table marks
        [(0, 0), (0, 1)]
    """

    explained: Result
    readings: tuple[Reading, ...]

    @property
    def rows(self) -> tuple[tuple[Reading, ...], ...]:
        """The readings of each explanation."""
        count = len(self.explained.explanations)
        metrics = len(self.readings) // max(1, count)
        return tuple(self.readings[row * metrics : (row + 1) * metrics] for row in range(count))

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the explanations: the method, and the layer and the target if they differ."""
        explanations = self.explained.explanations
        labels = [explanation.how for explanation in explanations]
        layers = [explanation.layer for explanation in explanations]
        targets = [explanation.title for explanation in explanations]
        for parts in (layers, targets):
            if len({part for part in parts if part}) > 1:
                labels = [f"{label} · {part}" if part else label for label, part in zip(labels, parts, strict=True)]
        return tuple(labels)

    @property
    def best(self) -> frozenset[tuple[int, int]]:
        """Rows and columns of the best reading of each metric among the explanations of one target."""
        best: set[tuple[int, int]] = set()
        rows_of: dict[str, list[int]] = {}
        for row, explanation in enumerate(self.explained.explanations):
            rows_of.setdefault(explanation.title, []).append(row)
        for column, readings in enumerate(zip(*self.rows, strict=True)):
            for rows in rows_of.values():
                lowest = min(readings[row].rank for row in rows)
                if len(rows) > 1 and math.isfinite(lowest):
                    best |= {(row, column) for row in rows if readings[row].rank == lowest}
        return frozenset(best)

    def cells(self) -> tuple[tuple[str, ...], ...]:
        """Return the cells of the table: a line of headings, then a line with a label for each explanation.

        Example:
            >>> client.evaluate("cat.jpg", methods=["gradcam", "layercam"], metrics=["sparseness"]).cells()
            (('', 'sparseness ↑'), ('gradcam', '0.266'), ('layercam', '0.256'))
        """
        first_row = self.rows[0] if self.rows else ()
        headings = ("", *(f"{reading.metric} {'↑' if reading.higher_is_better else '↓'}" for reading in first_row))
        lines = (
            (label, *(format_value(reading.value) for reading in row))
            for label, row in zip(self.labels, self.rows, strict=True)
        )
        return (headings, *lines)

    def table(self) -> str:
        """Return the table as text; ↑ means that higher is better, * marks the best of each column.

        Very long labels are shortened.

        Example:
            >>> evaluation = client.evaluate("cat.jpg", methods=["gradcam", "layercam"], metrics=["sparseness"])
            >>> print(evaluation.table())
                      sparseness ↑
            gradcam   0.266 *
            layercam  0.256
        """
        cells = list(map(list, self.cells()))
        for row, column in self.best:
            cells[row + 1][column + 1] += " *"
        return aligned(cells, "  ")

    def remarks(self) -> tuple[tuple[str, str], ...]:
        """Return the messages of readings, each with the label of its explanation and its metric.

        Example:
            >>> silenced = [camserve.silence("bn2")]  # all features are zero
            >>> client.evaluate("cat.jpg", metrics=["sparseness"], interventions=silenced).remarks()
            (('gradcam, sparseness', 'the map has the same value everywhere'),)
        """
        return tuple(
            (f"{label}, {reading.metric}", reading.message)
            for label, row in zip(self.labels, self.rows, strict=True)
            for reading in row
            if reading.message
        )

    def plain(self) -> list[dict[str, object]]:
        """Return the readings as plain values for JSON; a value that is NaN becomes None.

        Example:
            >>> plain = client.evaluate("cat.jpg", metrics=["sparseness"]).plain()
            >>> plain[0]["method"], plain[0]["metric"], round(plain[0]["value"], 2)
            ('gradcam', 'sparseness', 0.27)
        """
        return [
            {
                "method": reading.explanation.method,
                "layer": reading.explanation.layer,
                "target": reading.explanation.title,
                "metric": reading.metric,
                "value": None if math.isnan(reading.value) else reading.value,
                "higher_is_better": reading.higher_is_better,
                "message": reading.message,
                "parameters": dict(reading.parameters),
                "curves": [{"name": curve.name, "x": list(curve.x), "y": list(curve.y)} for curve in reading.curves],
            }
            for reading in self.readings
        ]

    def plot(self) -> Image.Image:
        """Draw the overlays side by side, and below them a chart of each metric.

        A plot has the first 100 explanations; the table has all of them.

        Raises:
            Internal: An overlay cannot be decoded, or they have more than 2^30 pixels in all.

        Example:
            >>> evaluation = client.evaluate("cat.jpg", methods=["gradcam", "layercam"], metrics=["sparseness"])
            >>> evaluation.plot().size
            (540, 320)
        """
        return display.plot(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save the plot as a picture (.png, .jpg, .webp).

        Returns:
            The path.

        Raises:
            InvalidArgument: The suffix is not one of these.
            OSError: The file cannot be written.

        Example:
            >>> evaluation = client.evaluate("cat.jpg", methods=["gradcam", "layercam"], metrics=["sparseness"])
            >>> evaluation.save("metrics.png").name
            'metrics.png'
        """
        file = Path(path)
        if file.suffix.lower() not in FORMATS:
            raise InvalidArgument(f"cannot save as {file.suffix or file.name!r}; the formats are {', '.join(FORMATS)}")
        write_file(file, encode_picture(self.plot(), FORMATS[file.suffix.lower()]))
        return file

    def _repr_png_(self) -> bytes:
        return encode_picture(self.plot(), "png")

    def _repr_html_(self) -> str:
        return display.html(self)


def format_value(value: float) -> str:
    """Format a reading with three decimals, and NaN as "-"."""
    return "-" if math.isnan(value) else f"{value:.3f}"


MetricLike: TypeAlias = "str | Metric | tuple[str, Mapping[str, float | str]]"
