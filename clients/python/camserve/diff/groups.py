"""Group findings that are alike, so that a thousand photos read as a few findings."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from camserve.diff.values import Change, Group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from camserve._values.picture import Photo
    from camserve.diff.values import Case

MOST: Final = 4
"""Most groups of one class of findings; the smaller ones are put together."""

_ROWS = ("upper", "", "lower")
_COLUMNS = ("left", "", "right")
_MIDDLES = {"": "centre", "upper": "top", "lower": "bottom"}


def place_of(heatmap: NDArray[np.float32], photo: Photo) -> str:
    """Return the ninth of the photo that has the largest value of a map: "upper left", "top", ..., "lower right"."""
    height, width = heatmap.shape
    row, column = divmod(int(heatmap.argmax()), width)
    seen = photo.seen
    y = seen.top + (row + 0.5) / height * (seen.bottom - seen.top)
    x = seen.left + (column + 0.5) / width * (seen.right - seen.left)
    vertical, horizontal = _ROWS[_third(y, photo.height)], _COLUMNS[_third(x, photo.width)]
    return f"{vertical} {horizontal}".strip() if horizontal else _MIDDLES[vertical]


def _third(position: float, size: int) -> int:
    """Return the third of a side that a position is in, 0, 1 or 2; outside of the photo, the nearest one."""
    return (3 * position >= size) + (3 * position >= 2 * size)


def group(cases: Sequence[Case]) -> tuple[Group, ...]:
    """Group the findings among cases: the most important class first, and in it the largest group.

    Args:
        cases: All cases, worst first.
    """
    found: dict[tuple[Change, str], list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        if case.change is not Change.NONE:
            found[case.change, _TITLES[case.change](case)].append(index)
    groups: list[Group] = []
    for change in _TITLES:
        titles = {title: indices for (kind, title), indices in found.items() if kind is change}
        groups += _largest(change, titles, cases)
    return tuple(groups)


def _largest(change: Change, titles: Mapping[str, list[int]], cases: Sequence[Case]) -> list[Group]:
    def make(title: str, indices: list[int]) -> Group:
        return Group(change, title, tuple(sorted(indices)), len({cases[index].image for index in indices}))

    groups = sorted((make(*each) for each in titles.items()), key=lambda each: -each.photos)
    if len(groups) <= MOST:
        return groups
    rest = [index for each in groups[MOST - 1 :] for index in each.cases]
    return [*groups[: MOST - 1], make(f"{len(groups) - MOST + 1} smaller groups", rest)]


def _title_elsewhere(case: Case) -> str:
    return f"looks at the {case.places[1]}"


def _title_prediction(case: Case) -> str:
    before, after = (side.prediction.name if side.prediction else "nothing" for side in (case.baseline, case.candidate))
    return f"{before} becomes {after}"


def _title_verdict(case: Case) -> str:
    return f"{case.baseline.verdict} becomes {case.candidate.verdict}"


_TITLES: Mapping[Change, Callable[[Case], str]] = {
    Change.ELSEWHERE: _title_elsewhere,
    Change.PREDICTION: _title_prediction,
    Change.VERDICT: _title_verdict,
}
