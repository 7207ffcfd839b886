"""The checks of a report as HTML: for each a sentence, a chart, and a row of a table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from camserve._show import html
from camserve.diff.view.elements import Html, count, element, join, number, numbers, percent, percents, scrolling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from camserve.diff.values import Check, Interval, Report

_HELP = (
    "Each photo has a rank correlation: how alike both maps order the places of the photo. 1 is the same order, 0 is "
    "no relation. Two measurements say what a number means. The baseline is compared with itself with a little noise "
    "on the photos: this is how much a map changes although nothing important did. And it is compared with itself with "
    "random weights: this is a model that has learned nothing. A photo looks elsewhere if it is nearer to the second "
    "than to the first. “Towards randomised weights” says where a case lies between them: 0 % is the median of the "
    "first, 100 % that of the second."
)
_HEADINGS = (
    "Method", "Layer", "Comparisons", "Median rank correlation", "Baseline against itself", "Lower end of this band",
    "Randomised weights", "Look elsewhere", "Outcome",
)  # fmt: skip


def checks_of(report: Report) -> Iterator[Html]:
    """Yield the elements of the section about the checks."""
    yield element("h2", "Checks", id="checks")
    yield element("details", element("summary", "How to read this"), element("p", _HELP))
    yield _legend()
    start = _axis_start(report.checks)
    yield element("ul", *(_check(check, start, report.max_changed) for check in report.checks), class_="cards")
    rows = [_row(check) for check in report.checks]
    table = Html(html.table(_HEADINGS, rows, "Checks by method and layer"))
    region = scrolling(table, "Table of the checks")
    yield element("details", element("summary", "The checks as a table"), region)


def _legend() -> Html:
    kinds = {
        "dot": f"candidate against baseline: median with its {percent(0.95)} interval",
        "band": "baseline against itself, median and band",
        "ceiling": "baseline against randomised weights",
        "allowed": "share that may change",
    }
    samples = (element("li", element("i", class_=f"sample {kind}"), f" {text}") for kind, text in kinds.items())
    return element("ul", *samples, class_="legend", aria_label="Legend of the charts")


def _axis_start(checks: Sequence[Check]) -> float:
    """Return the start of the axis of rank correlations, which ends at 1: 0 or the tenth below the least number."""
    values = [value for check in checks for value in (check.ceiling, check.floor_limit, check.median.low)]
    least = min((value for value in values if math.isfinite(value)), default=0)
    return min(0, math.floor(10 * least) / 10)


def _check(check: Check, start: float, allowed: float) -> Html:
    name = f"{check.method} on {check.layer}" if check.layer else check.method
    outcome = element("span", _outcome(check), class_=f"badge {'changed' if check.changed else 'same'}")
    return element(
        "li",
        element("h3", name, " ", outcome),
        *(element("p", reason, class_="reason") for reason in check.reasons),
        element("p", "Rank correlation of the maps", class_="name", aria_hidden="true"),
        _correlation_chart(check, start),
        element("p", "Photos that look elsewhere", class_="name", aria_hidden="true"),
        _share_chart(check.elsewhere, allowed),
        element("p", _sentence(check), class_="hint"),
    )


def _outcome(check: Check) -> str:
    if check.changed:
        return "changed"
    return "within the calibration" if check.cases else "nothing to compare"


def _sentence(check: Check) -> str:
    """Return the text alternative of the charts."""
    return (
        f"{count(check.cases, 'comparison')}. The median rank correlation is {numbers(check.median)}. The baseline "
        f"reaches {number(check.floor)} against itself, with a band from {number(check.floor_limit)}, and "
        f"{number(check.ceiling)} against randomised weights. {percents(check.elsewhere)} look elsewhere."
    )


def _correlation_chart(check: Check, start: float) -> Html:
    def place(value: float) -> float:
        return (value - start) / (1 - start)

    marks = (
        _mark("band", place(check.floor_limit), 1),
        _mark("floor", place(check.floor)),
        _mark("ceiling", place(check.ceiling)),
        *_with_interval(check.median, place),
    )
    return _drawn(marks, (number(start), "1.00"))


def _share_chart(share: Interval, allowed: float) -> Html:
    marks = (_mark("bar", 0, share.value), _mark("allowed", allowed), *_with_interval(share, float))
    return _drawn(marks, ("0 %", "100 %"))


def _with_interval(interval: Interval, place: Callable[[float], float]) -> tuple[Html, Html]:
    return _mark("whisker", place(interval.low), place(interval.high)), _mark("dot", place(interval.value))


def _mark(kind: str, start: float, end: float | None = None) -> Html:
    """Return a mark at a share of the axis, or from one share to another; nothing if it has no place."""
    if not math.isfinite(start) or (end is not None and not math.isfinite(end)):
        return Html()
    left = min(max(start, 0), 1)
    width = "" if end is None else f";width:{100 * (min(max(end, left), 1) - left):.2f}%"
    return element("i", class_=kind, style=f"left:{100 * left:.2f}%{width}")


def _drawn(marks: Sequence[Html], ends: tuple[str, str]) -> Html:
    low, high = ends
    ticks = element("span", element("span", low), element("span", high), class_="ticks")
    # The sentence below says the same to those who cannot see it.
    return element("div", element("div", join(marks), class_="axis"), ticks, class_="chart", aria_hidden="true")


def _row(check: Check) -> tuple[str, ...]:
    values = (numbers(check.median), number(check.floor), number(check.floor_limit), number(check.ceiling))
    outcome = _outcome(check)
    return (check.method, check.layer or "–", f"{check.cases:,}", *values, percents(check.elsewhere), outcome)
