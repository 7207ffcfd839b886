"""Report of a diff as one HTML file, which fetches nothing: it can be opened from a disk, or sent by mail."""

from __future__ import annotations

import functools
import math
from base64 import b64encode
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from camserve._core.files import replacing
from camserve._show import bundle, html
from camserve._values import map_numbers
from camserve.diff.values import Change
from camserve.diff.view.elements import element
from camserve.diff.view.summary import headline, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from camserve._values.picture import Photo
    from camserve.diff.values import Answer, Case, Report

MOST_CELLS = 64
"""Most rows and columns of a stored map; maps with more are averaged."""

_POLICY = "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_MODULES = (
    *(f"page/lib/{name}.js" for name in ("maps", "colormaps", "draw", "words", "compare")),
    "page/dom.js",
    *(f"diff/view/{name}.js" for name in ("data", "pictures", "card", "list", "findings", "report")),
)
_TOP = 127  # the integer that stands for the largest absolute value of a map
_NOT_FINITE = -128  # the integer that stands for NaN and infinite values
_NUMBERS = ("spearman", "iou", "shift", "ssim", "pearson", "kl", "score_change", "probability_change")


@dataclass(frozen=True, slots=True)
class Pictures:
    """The photo and the maps of a case.

    Attributes:
        thumbnail: A JPEG of the photo, up to 256 pixels; or nothing.
        photos: Geometry of the photo for the baseline's and for the candidate's map.
        heatmaps: The baseline's and the candidate's map, float32 [h, w].
    """

    thumbnail: bytes
    photos: tuple[Photo, Photo]
    heatmaps: tuple[NDArray[np.float32], NDArray[np.float32]]


def write(path: Path, report: Report, pictures: Callable[[Case], Pictures]) -> None:
    """Write a report as one HTML file.

    The pictures of one case are in memory at a time. The file appears at its path when it is complete.

    Args:
        path: Path of the file.
        report: The report.
        pictures: Function that returns the pictures of a case. It is called once for each case, in their order.

    Raises:
        OSError: The file cannot be written.
    """
    with replacing(path) as file:
        for part in _parts(report, pictures):
            file.write(part.encode("utf-8", "replace"))  # a name of a file may contain lone surrogates


def _parts(report: Report, pictures: Callable[[Case], Pictures]) -> Iterator[str]:
    photos = {name: index for index, name in enumerate(dict.fromkeys(case.image for case in report.cases))}
    yield _head(report)
    yield summary(report)
    yield _CASES
    yield from _photos_and_maps(report, pictures, photos)
    yield from _index(report, photos)
    yield _block("report", _plain_report(report))
    yield f"<script>{bundle.script(*_MODULES)}.show();</script>\n</body>\n</html>\n"


def _head(report: Report) -> str:
    title = element("title", headline(report))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{title}\n'
        f"<style>{bundle.text('diff/view/report.css')}</style>\n</head>\n<body>\n<main>\n"
    )


_CASES = (
    '\n<section aria-labelledby="cases-title"><h2 id="cases-title" tabindex="-1">Cases</h2>'
    "<noscript><p>The photos with their maps, and the search in them, need JavaScript.</p></noscript>"
    '<div id="cases"></div></section>\n</main>\n'
)


def _photos_and_maps(report: Report, pictures: Callable[[Case], Pictures], photos: dict[str, int]) -> Iterator[str]:
    stored: set[str] = set()
    for index, case in enumerate(report.cases):
        # No variable refers to the pictures of a case while those of the next one are loaded.
        yield from _case_blocks(index, case, pictures(case), photos, stored)


def _case_blocks(index: int, case: Case, shown: Pictures, photos: dict[str, int], stored: set[str]) -> Iterator[str]:
    if shown.thumbnail and case.image not in stored:
        stored.add(case.image)
        yield _block(f"photo-{photos[case.image]}", b64encode(shown.thumbnail).decode())
    yield _block(f"case-{index}", _plain_case(case, shown))


def _block(name: str, data: object) -> str:
    return f'<script type="application/json" id="{name}">{html.script_json(data)}</script>\n'


def _index(report: Report, photos: dict[str, int]) -> Iterator[str]:
    """Yield the element with all that the list is sorted and filtered by."""
    yield '<script type="application/json" id="index">['
    for index, case in enumerate(report.cases):
        yield ("," if index else "") + html.script_json(_plain_entry(case, photos[case.image]))
    yield "]</script>\n"


def _plain_entry(case: Case, photo: int) -> dict[str, Any]:
    numbers = {name: _short(getattr(case.comparison, name)) for name in _NUMBERS}
    box = case.comparison.box_energy
    numbers |= {"position": _short(case.position), "box_change": _short(box[1] - box[0]) if box else None}
    return {
        "image": case.image,
        "photo": photo,
        "method": case.method,
        "layer": case.layer,
        "target": case.target,
        "predictions": [answer.prediction and answer.prediction.name for answer in (case.baseline, case.candidate)],
        "change": case.change.value,
        "numbers": numbers,
    }


def _plain_case(case: Case, shown: Pictures) -> dict[str, Any]:
    box = case.comparison.box_energy
    return {
        "answers": [_plain_answer(case.baseline), _plain_answer(case.candidate)],
        "box_energy": box and [_short(share) for share in box],
        "same_target": case.comparison.same_target,
        "photos": [asdict(photo) for photo in shown.photos],
        "maps": [_plain_map(heatmap) for heatmap in shown.heatmaps],
    }


def _plain_answer(answer: Answer) -> dict[str, Any]:
    first = answer.prediction
    return {
        "prediction": first and [first.name, _short(first.probability)],
        "score": _short(answer.score),
        "probability": _short(answer.probability),
        "verdict": answer.verdict.value,
    }


def _plain_report(report: Report) -> dict[str, Any]:
    return {
        "sources": [report.baseline.name, report.candidate.name],
        "changes": [change.value for change in Change],
        "groups": [{"title": group.title, "cases": group.cases} for group in report.groups],
    }


def _plain_map(heatmap: NDArray[np.float32]) -> dict[str, Any]:
    """Return a map in at most 64 × 64 cells, as integers from -127 to 127 and the value of 127."""
    values = _averaged(heatmap)
    isfinite = np.isfinite(values)
    scale = float(np.abs(values[isfinite]).max(initial=0))
    cells = np.where(isfinite, values, 0) / (scale or 1) * _TOP
    integers = np.where(isfinite, np.rint(cells), _NOT_FINITE).astype(np.int8)
    height, width = integers.shape
    return {"height": height, "width": width, "scale": scale, "data": b64encode(integers.tobytes()).decode()}


def _averaged(heatmap: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return a map in fewer cells; a cell is NaN if a value in it is not finite."""
    heatmap = map_numbers.bounded(heatmap)
    down, across = (_averaging(side) for side in heatmap.shape)
    isfinite = np.isfinite(heatmap)
    means = down @ np.where(isfinite, heatmap, 0) @ across.T
    if isfinite.all():
        return means
    return np.where(down @ ~isfinite @ across.T > 0, np.nan, means)


@functools.lru_cache(maxsize=16)
def _averaging(cells: int) -> NDArray[np.float64]:
    """Return the matrix that averages the cells along an axis, each by its overlap with a new one."""
    count = min(cells, MOST_CELLS)
    edges = np.linspace(0, cells, count + 1)[:, None]
    starts = np.arange(cells)
    overlaps = np.minimum(edges[1:], starts + 1) - np.maximum(edges[:-1], starts)
    return overlaps.clip(min=0) * count / cells


def _short(value: float) -> float | None:
    """Return a number with five digits; None for one that JSON does not have."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
