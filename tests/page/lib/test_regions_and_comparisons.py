"""Regions and comparisons of maps equal those of scikit-image, the server and the Python client."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from skimage import measure

from camserve._values import map_numbers
from camserve._values.comparison import compare_explanations
from camserve._values.picture import Box, Photo
from camserve_server.imaging import scales
from camserve_server.imaging.values import Rendering
from page.lib.maps_data import array, heatmap, signed

SIZE = (48, 64)
MAPS = {
    "noise": signed(*SIZE),
    "coarse": signed(7, 9, 1),
    "one peak": np.eye(7, dtype=np.float32),
    "negative": -np.abs(signed(7, 7)),
    "zero": np.zeros((7, 7), np.float32),
}
GRID = {"width": SIZE[1], "height": SIZE[0]}  # a photo of the grid's size: the boxes are in its pixels
REGIONS = (
    "return regions.regionsOf(maps.decodeMap(heat), maps.readPhoto(photo), style, { inputSize: size, most: 1000 })"
)


def oracle(values, share, sign):
    """Return the regions by scikit-image, of positive and negative values apart."""
    grid = scales.values_on_input(values, Rendering(sign=sign), SIZE).astype(np.float64)
    strengths = np.abs(grid)
    strong = (strengths >= np.quantile(strengths.astype(np.float32), share)) & (strengths > 0)
    found = []
    for mask in (strong & (grid > 0), strong & (grid < 0)):
        for each in measure.regionprops(measure.label(mask, connectivity=2), intensity_image=strengths):
            top, left, bottom, right = each.bbox
            box = {"left": left, "top": top, "right": right, "bottom": bottom}
            found.append((box, each.image_intensity.sum() / strengths.sum()))
    return sorted(found, key=lambda one: -one[1])


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("sign", ["positive", "both"])
@pytest.mark.parametrize("share", [0.5, 0.8, 0.97])
def test_regions_equal_those_of_scikit_image(js, name, sign, share):
    expected = oracle(MAPS[name], share, sign)
    found = js(
        REGIONS, heat=heatmap(MAPS[name]), photo=GRID, style={"sign": sign, "threshold": {"quantile": share}}, size=SIZE
    )

    def key(region):
        return tuple(region["box"].values())

    by_box = {tuple(box.values()): part for box, part in expected}
    assert [key(each) for each in sorted(found, key=key)] == sorted(by_box)
    for each in found:
        np.testing.assert_allclose(each["share"], by_box[key(each)], rtol=1e-5)
    np.testing.assert_allclose([each["share"] for each in found], [part for _, part in expected], rtol=1e-5)


def test_regions_are_in_the_pixels_of_the_photo(js):
    photo = {"width": 200, "height": 100, "seen": {"left": 50, "right": 150, "bottom": 100}}
    values = np.zeros((4, 4), np.float32)
    values[1, 2] = 2
    style = {"threshold": {"value": 1}}
    (found,) = js(REGIONS, heat=heatmap(values), photo=photo, style=style, size=(4, 4))

    assert found == {"box": {"left": 100, "top": 25, "right": 125, "bottom": 50}, "share": 1}


def test_only_the_largest_regions_are_returned(js):
    code = REGIONS.replace("1000", "3")
    found = js(code, heat=heatmap(MAPS["noise"]), photo=GRID, style={}, size=SIZE)
    expected = oracle(MAPS["noise"], 0.8, "positive")

    np.testing.assert_allclose([each["share"] for each in found], [part for _, part in expected[:3]], rtol=1e-5)


SQUARE = (20, 0, 80, 60)  # the crop of a model
COARSE, FINE = np.maximum(signed(7, 7), 0), np.maximum(signed(14, 12, 1), 0)
PAIRS = {
    "same grid": (signed(7, 7), signed(7, 7, 1)),
    "itself": (signed(12, 14), signed(12, 14)),
    "opposite": (signed(7, 7), -signed(7, 7)),
    "shares of half a cell": (signed(5, 10), signed(5, 10, 1)),
    "many cells": (signed(40, 30), signed(40, 30, 1) + signed(40, 30)),
    "single pixels": (signed(448, 448), signed(448, 448, 1)),  # in quadratic time, this would exceed the time limit
    "mostly zero": (np.maximum(signed(14, 14) - 3, 0), np.maximum(signed(9, 9, 1) - 3, 0)),
    "finer grid": (COARSE, FINE),
    "coarser grid": (FINE, COARSE),
    "taller and wider": (signed(14, 5), signed(9, 30, 1)),
    "zero": (np.zeros((7, 7)), FINE),
    "both zero": (np.zeros((7, 7)), np.zeros((7, 7))),
    "negative": (-COARSE - 0.5, FINE),
    "not a number": (np.where(np.eye(7), np.nan, 1), signed(7, 7)),
    "infinite": (signed(7, 7), np.where(np.eye(7), -np.inf, 1)),
    "ties": (np.round(signed(9, 8)), np.round(signed(9, 8, 1))),
    "constant": (np.ones((7, 7)), signed(7, 7)),
    "both constant": (np.ones((7, 7)), np.full((7, 7), 2)),
}
SEEN = {
    "same part": ((0, 0, 90, 60), (0, 0, 90, 60)),
    "part of the other's": (SQUARE, (0, 0, 90, 60)),
    "parts that overlap": ((0, 0, 60, 60), (30.5, 10, 90, 60)),
}
COMPARE = """
const cell = ([heat, photo]) => ({ map: maps.decodeMap(heat), photo: maps.readPhoto(photo) });
return compare.compareMaps(cell(a), cell(b));
"""
PYTHON_NAMES = {"iouCurve": "iou_curve"}


def explained(values, seen):
    """Return a map as an explanation of a photo of 90 × 60 pixels, of which the model sees a box."""
    photo = Photo(90, 60, Box(*seen))
    target = SimpleNamespace(probability=0.5, class_index=1)
    return SimpleNamespace(heatmap=np.asarray(values, np.float32), photo=photo, score=1, target=target, verdict="OK")


def cell(values, seen):
    """Return the same as JSON of the API, without zeros."""
    box = {edge: at for edge, at in zip(("left", "top", "right", "bottom"), seen, strict=True) if at}
    return heatmap(values), {"width": 90, "height": 60, "seen": box}


def assert_numbers_are_equal(js, pair, seen):
    """Compare all numbers of two maps with those of the Python client."""
    both = list(zip(pair, seen, strict=True))
    expected = compare_explanations(*(explained(*each) for each in both))
    found = js(COMPARE, a=cell(*both[0]), b=cell(*both[1]))
    for name, value in found.items():
        numbers = np.array(value, np.float64)  # JSON has null for NaN
        truth = getattr(expected, PYTHON_NAMES.get(name, name))
        np.testing.assert_allclose(numbers, truth, rtol=1e-5, atol=1e-6, err_msg=name)


def pairs():
    """Return each pair with each parts; the large one with parts that overlap is enough for the fast tests."""
    for name, parts in itertools.product(PAIRS, SEEN):
        slow = name == "single pixels" and parts != "parts that overlap"
        yield pytest.param(name, parts, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("name", "parts"), list(pairs()))
def test_numbers_equal_those_of_the_python_client(js, name, parts):
    assert_numbers_are_equal(js, PAIRS[name], SEEN[parts])


def test_every_number_of_two_maps_is_compared(js):
    found = js(COMPARE, a=cell(COARSE, SQUARE), b=cell(FINE, SQUARE))

    assert set(map_numbers.UNDEFINED) == {PYTHON_NAMES.get(key, key) for key in found} - {"iou"}
    assert list(map_numbers.SHARES) == js("return compare.SHARES")


@pytest.mark.parametrize("value", [0.1, 0.7, 3])
def test_constant_map_on_another_grid_has_no_correlation(js, value):
    found = js(COMPARE, a=cell(np.full((7, 7), value), SQUARE), b=cell(signed(4, 5), SQUARE))

    assert (found["spearman"], found["pearson"]) == (None, None)


@pytest.mark.parametrize(
    ("rho", "words"),
    [
        (0.95, "almost alike"),
        (0.7, "in the main"),
        (0.4, "in part"),
        (0, "little"),
        (-0.8, "contradict"),
        (None, "constant or not finite"),
    ],
)
def test_agreement_is_described_in_words(js, rho, words):
    assert words in js("return compare.agreement(rho)", rho=rho)


def test_difference_is_on_the_finer_grid_and_at_a_common_scale(js):
    one, other = signed(7, 7), signed(3, 4, 1)
    code = "return compare.difference(maps.decodeMap(a), maps.decodeMap(b), scales)"
    found = array(js(code, a=heatmap(one), b=heatmap(other), scales=[2, 4]))
    resized = scales.values_on_input(other, Rendering(sign="both"), (7, 7)).astype(np.float64)

    np.testing.assert_allclose(found, one / 2 - resized / 4, atol=1e-5)


def test_overlap_tells_the_cells_of_one_map_from_those_of_both(js):
    one, other = np.array([[4, 3, 0, -1]]), np.array([[4, 0, 3, -1]])
    found = js("return compare.overlap(maps.decodeMap(a), maps.decodeMap(b), 0.5)", a=heatmap(one), b=heatmap(other))

    np.testing.assert_array_equal(array(found), [[3, 1, 2, 0]])


@pytest.mark.parametrize("name", ["same grid", "mostly zero", "coarser grid", "zero", "negative", "not a number"])
@pytest.mark.parametrize("share", map_numbers.SHARES)
def test_overlap_has_the_hottest_cells_of_the_python_client(js, name, share):
    pair = PAIRS[name]
    found = js(
        "return compare.overlap(maps.decodeMap(a), maps.decodeMap(b), share)",
        a=heatmap(pair[0]),
        b=heatmap(pair[1]),
        share=share,
    )
    parts = [explained(values, SQUARE) for values in pair]
    coarse, _ = map_numbers._aligned(
        [each.heatmap for each in parts], [each.photo for each in parts], parts[0].photo.seen
    )
    expected = [
        map_numbers._hottest(values, share).reshape(values.shape) & np.isfinite(values).all() for values in coarse
    ]

    np.testing.assert_array_equal(array(found), expected[0] + 2 * expected[1])
