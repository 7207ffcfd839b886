"""Plot and HTML of an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from camserve._show import html
from camserve._values import display
from camserve._values.evaluation import Evaluation, Reading, format_value
from camserve._values.picture import Picture, check_total, encode_picture

if TYPE_CHECKING:
    from PIL import Image

    from camserve._show.plots.comparison import Panel

MAX_PLOTTED = 100
"""Most explanations in a plot."""


@display.plot.register(Evaluation)
def plot_evaluation(evaluation: Evaluation) -> Image.Image:
    """Draw the overlays side by side, and below them a chart of each metric."""
    from camserve._show.plots import comparison  # noqa: PLC0415 -- the fonts are only loaded for a plot

    explanations = evaluation.explained.explanations
    pictures = [explanation.overlay_picture for explanation in explanations[:MAX_PLOTTED]]
    check_total(pictures)
    tiles = list(map(comparison.tile, evaluation.labels, pictures))
    panels = [_panel(column) for column in zip(*evaluation.rows[:MAX_PLOTTED], strict=True)]
    is_cut = len(explanations) > MAX_PLOTTED
    note = f"the first {MAX_PLOTTED} of {len(explanations):,} explanations" if is_cut else ""
    return comparison.draw(tiles, panels, note)


@display.html.register(Evaluation)
def evaluation_html(evaluation: Evaluation) -> str:
    """Return the table and the plot as HTML; * marks the best reading of each metric."""
    headings, *lines = evaluation.cells()
    best = evaluation.best
    marked = [
        (label, *(f"{cell} *" if (row, column) in best else cell for column, cell in enumerate(values)))
        for row, (label, *values) in enumerate(lines)
    ]
    plot = evaluation.plot()
    picture = Picture("png", encode_picture(plot, "png"), *plot.size)
    table = html.table(headings, marked, evaluation.explained.model)
    return table + html.figure(picture, "Metrics", "", width="none")


def _panel(column: tuple[Reading, ...]) -> Panel:
    from camserve._show.plots import comparison  # noqa: PLC0415 -- as above

    first = column[0]
    return comparison.Panel(
        title=first.metric.replace("_", " "),
        note="higher is better" if first.higher_is_better else "lower is better",
        bars=[comparison.Bar(reading.value, format_value(reading.value)) for reading in column],
        lines=[[comparison.Line(curve.x, curve.y) for curve in reading.curves] for reading in column],
        names=[curve.name for curve in first.curves],
    )
