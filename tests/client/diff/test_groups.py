"""Findings that are alike are one group, so that a thousand photos read as a few findings."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from camserve import Box, Photo, Prediction, Verdict
from camserve.diff import groups
from camserve.diff.values import Answer, Change
from client.diff.reports import TABBY, case_of

PLACES = ("upper left", "top", "upper right", "left", "centre", "right", "lower left", "bottom", "lower right")
SAME = Answer(TABBY, 9.0, 0.8, Verdict.OK)


def spot(row: int, column: int, side: int = 9) -> np.ndarray:
    heatmap = np.zeros((side, side), np.float32)
    heatmap[row, column] = 1
    return heatmap


@pytest.mark.parametrize(("row", "column"), list(product((0, 1, 2), repeat=2)))
def test_place_is_the_ninth_of_the_photo_with_the_maximum(row: int, column: int) -> None:
    photo = Photo(90, 30, Box(0, 0, 90, 30))

    for inside in (0, 2):
        assert groups.place_of(spot(3 * row + inside, 3 * column + inside), photo) == PLACES[3 * row + column]


def test_place_is_that_in_the_photo_and_not_in_the_part_that_the_model_sees() -> None:
    wide = Photo(300, 100, Box(100, 0, 200, 100))  # the model sees the middle third

    assert groups.place_of(spot(0, 0), wide) == "top"
    assert groups.place_of(spot(8, 8), wide) == "bottom"


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 0.0])
def test_place_of_an_odd_map_is_one_of_the_nine(value: float) -> None:
    assert groups.place_of(np.full((2, 2), value, np.float32), Photo(9, 9, Box(0, 0, 9, 9))) in PLACES


@pytest.mark.parametrize(
    ("photo", "place"),
    [
        (Photo(9, 9, Box(-900, -900, -800, -800)), "upper left"),
        (Photo(9, 9, Box(1e300, 1e300, 1e308, 1e308)), "lower right"),
        (Photo(0, 0, Box(0, 0, 9, 9)), "lower right"),
    ],
)
def test_place_outside_of_the_photo_is_the_nearest_one(photo: Photo, place: str) -> None:
    assert groups.place_of(spot(4, 4), photo) == place


def test_thousand_photos_read_as_a_few_findings() -> None:
    rng = np.random.default_rng(0)
    changes = (Change.ELSEWHERE, Change.PREDICTION, Change.VERDICT, Change.NONE)
    labels = [f"class {index}" for index in range(100)]
    cases = [
        case_of(
            index, change=changes[index % 4], places=("centre", str(rng.choice(PLACES))), baseline=SAME,
            candidate=Answer(Prediction(str(rng.choice(labels)), 0.5, 1, 2.0), 1.0, 0.5, rng.choice(list(Verdict))),
        )
        for index in range(1000)
    ]  # fmt: skip
    found = groups.group(cases)

    assert len(found) <= 3 * groups.MOST
    assert [group.change for group in found] == sorted((group.change for group in found), key=changes.index)
    listed = sorted(index for group in found for index in group.cases)
    assert listed == [index for index, case in enumerate(cases) if case.change is not Change.NONE]
    for group in found:
        assert {cases[index].change for index in group.cases} == {group.change}
        assert group.photos == len({cases[index].image for index in group.cases})


def test_larger_group_is_first_and_the_small_ones_are_one() -> None:
    counts = {"top": 5, "left": 4, "right": 3, "bottom": 2, "centre": 1}
    places = [place for place, count in counts.items() for _ in range(count)]
    cases = [case_of(5 * index, places=("top", place)) for index, place in enumerate(places)]
    found = groups.group(cases)

    assert [group.photos for group in found] == [5, 4, 3, 3]
    assert [group.title for group in found[:3]] == ["looks at the top", "looks at the left", "looks at the right"]
    assert found[3].title.startswith("2 smaller")


def test_photo_with_several_cases_counts_once() -> None:
    cases = [case_of(0, method, places=("top", "left")) for method in ("gradcam", "smoothgrad")]
    (found,) = groups.group(cases)

    assert (found.cases, found.photos) == ((0, 1), 1)


def test_titles_say_what_changed() -> None:
    lynx = replace(SAME, prediction=Prediction("lynx", 0.5, 287, 1.0))
    nothing = replace(SAME, prediction=None)
    flat = replace(SAME, verdict=Verdict.FLAT)
    cases = [
        case_of(0, change=Change.PREDICTION, baseline=SAME, candidate=lynx),
        case_of(1, change=Change.PREDICTION, baseline=SAME, candidate=nothing),
        case_of(2, change=Change.VERDICT, baseline=SAME, candidate=flat),
    ]

    titles = [group.title for group in groups.group(cases)]
    assert titles == ["tabby becomes lynx", "tabby becomes nothing", "OK becomes FLAT"]


def test_no_findings_are_no_groups() -> None:
    assert groups.group([case_of(4, change=Change.NONE)]) == ()
    assert groups.group([]) == ()
