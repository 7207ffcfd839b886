"""Regions of maps: connected components, boxes, outlines and masks, as scikit-image and pycocotools find them."""

import numpy as np
import pytest
from pycocotools import mask as coco
from scipy.ndimage import binary_fill_holes
from skimage import draw, measure

from camserve_server.imaging import regions, run_lengths, scales
from camserve_server.imaging.values import Box, RegionOptions, Rendering, Threshold

# pycocotools' own arrays do not know a parameter of NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SIZE = (24, 32)
SAME = Box(0, 0, 32, 24)
EVERY = 10_000


def random_map(seed, size=SIZE, grid=(7, 7), sign="both"):
    """Return a map whose regions differ in form: interpolated from a grid, or with a value of its own in each pixel."""
    raw = np.random.default_rng(seed).normal(size=size if seed % 3 == 0 else grid).astype(np.float32)
    return scales.values_on_input(raw, Rendering(sign=sign), size)


def find(values, seen=SAME, size=SIZE, threshold=("quantile", 0.8), most=EVERY, *, masks=True):
    return regions.find(values, seen, size, RegionOptions(Threshold(*threshold), most, masks=masks))


def selected_by_mass(strengths, share):
    """Return the pixels that are as strong as the last one that is needed for the share: a plain loop."""
    total, needed = strengths.astype(float).sum() * share, 0.0
    for value in sorted(strengths.ravel(), reverse=True):
        needed += float(value)
        if needed >= total * (1 - 1e-12):
            return strengths >= value
    raise AssertionError


def components(values, threshold):
    """Return the properties of the components that scikit-image finds, the one with the largest sum first."""
    strengths = np.abs(values)
    kind, value = threshold
    selected = strengths >= np.quantile(strengths, value) if kind == "quantile" else selected_by_mass(strengths, value)
    found = []
    for sign in (1, -1):
        labels = measure.label(selected & (sign * values > 0), connectivity=2)
        found += measure.regionprops(labels, intensity_image=strengths.astype(np.float64))
    return sorted(found, key=lambda each: -each.image_intensity.sum())


def raster(contour, size):
    """Return the pixels whose centres an outline encloses, drawn by scikit-image at twice the size."""
    fine = draw.polygon2mask((2 * size[0] + 1, 2 * size[1] + 1), 2 * contour[:, ::-1].astype(float))
    return fine[1::2, 1::2]


SEEDS = [pytest.param(seed, marks=pytest.mark.slow if seed else ()) for seed in range(3)]

FAST = (("quantile", 0.0), ("quantile", 0.8), ("quantile", 1.0), ("mass", 0.0), ("mass", 0.5), ("mass", 1.0))
SLOW = (("quantile", 0.5), ("quantile", 0.97), ("mass", 0.3), ("mass", 0.9))
THRESHOLDS = [*FAST, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=lambda threshold: f"{threshold[0]} {threshold[1]}")
@pytest.mark.parametrize("sign", ["positive", "negative", "both", "absolute"])
@pytest.mark.parametrize("seed", SEEDS)
def test_regions_are_those_of_scikit_image(seed, sign, threshold):
    values = random_map(seed, sign=sign)
    found, expected = find(values, threshold=threshold), components(values, threshold)

    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        top, left, bottom, right = theirs.bbox
        row, column = np.unravel_index(np.argmax(theirs.image_intensity), theirs.image.shape)
        assert ours.box == Box(left, top, right, bottom)
        assert ours.area == theirs.area
        assert ours.peak == (left + column + 0.5, top + row + 0.5)
        assert abs(ours.peak_value) == theirs.intensity_max
        assert ours.share == pytest.approx(theirs.image_intensity.sum() / np.abs(values).sum(dtype=float), rel=1e-9)
        mask = np.zeros(SIZE, bool)
        mask[theirs.slice] = theirs.image
        assert np.array_equal(coco.decode({"size": SIZE, "counts": ours.mask.counts}).astype(bool), mask)
        assert np.array_equal(raster(ours.contour, SIZE), binary_fill_holes(mask))


PHOTOS = [
    (SAME, SIZE),
    (Box(10.3, -5.2, 90.7, 61.9), (60, 100)),  # reaches beyond the upper and lower edge
    (Box(-40.0, -30.0, 140.0, 90.0), (60, 100)),
    (Box(20, 10, 21, 11), (60, 100)),  # all of the map in one pixel
    (Box(0, 0, 9, 7), (7, 9)),  # a photo with fewer pixels than the map
    (Box(0.2, 0.3, 16.1, 40.9), (41, 17)),
]


@pytest.mark.parametrize(("seen", "size"), PHOTOS)
@pytest.mark.parametrize("sign", ["positive", "both"])
@pytest.mark.parametrize("seed", SEEDS)
def test_pixel_of_the_photo_belongs_to_the_region_that_contains_its_centre(seed, sign, seen, size):
    values = random_map(seed, sign=sign)
    strengths = np.abs(values)
    selected = (strengths >= np.quantile(strengths, 0.8)) & (strengths > 0)
    numbers = [measure.label(selected & (side * values > 0), connectivity=2) for side in (1, -1)]
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    row = np.floor((y - seen.top) / (seen.bottom - seen.top) * SIZE[0]).astype(int)
    column = np.floor((x - seen.left) / (seen.right - seen.left) * SIZE[1]).astype(int)
    inside = (row >= 0) & (row < SIZE[0]) & (column >= 0) & (column < SIZE[1])
    expected = set()
    for labels in numbers:
        on_photo = np.where(inside, labels[row.clip(0, SIZE[0] - 1), column.clip(0, SIZE[1] - 1)], 0)
        expected |= {(on_photo == number).tobytes() for number in np.unique(on_photo) if number}

    found = find(values, seen, size)
    masks = [coco.decode({"size": size, "counts": region.mask.counts}).astype(bool) for region in found]
    assert {mask.tobytes() for mask in masks} == expected
    assert len(masks) == len(expected)
    for region, mask in zip(found, masks, strict=True):
        rows, columns = np.nonzero(mask)
        assert region.area == mask.sum()
        assert region.box == Box(columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        assert np.array_equal(raster(region.contour, size), binary_fill_holes(mask))


@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (13, 17), (300, 2)])
def test_run_lengths_equal_those_of_pycocotools(shape, density):
    mask = np.random.default_rng(3).random(shape) < density
    encoded = run_lengths.encode(mask, np.arange(shape[0] + 1), np.arange(shape[1] + 1), shape)
    expected = coco.encode(np.asfortranarray(mask.astype(np.uint8)))

    assert (encoded.height, encoded.width) == tuple(expected["size"]) == shape
    assert encoded.counts == expected["counts"].decode()


def test_run_lengths_of_a_large_photo_equal_those_of_pycocotools():
    mask = np.random.default_rng(3).random((9, 11)) < 0.4
    rows, columns = np.linspace(100, 2900, 10).astype(int), np.linspace(0, 4000, 12).astype(int)
    photo = np.zeros((3000, 4000), np.uint8)
    for row, column in np.argwhere(mask):
        photo[rows[row] : rows[row + 1], columns[column] : columns[column + 1]] = 1

    encoded = run_lengths.encode(mask, rows, columns, (3000, 4000))
    assert encoded.counts == coco.encode(np.asfortranarray(photo))["counts"].decode()


def test_at_most_the_requested_number_of_regions_is_returned_the_largest_sums_first():
    values = random_map(0)
    every = find(values)
    sums = [region.share for region in every]

    assert len(every) > 5
    assert sums == sorted(sums, reverse=True)
    assert [region.box for region in find(values, most=3)] == [region.box for region in every[:3]]


def test_regions_of_both_signs_are_apart_and_those_of_absolute_values_are_not():
    values = np.array([[0, 3, -2, 0]], np.float32)
    seen, size = Box(0, 0, 4, 1), (1, 4)
    positive, negative = find(values, seen, size, ("quantile", 0.5))
    (joined,) = find(np.abs(values), seen, size, ("quantile", 0.5))

    assert (positive.box, positive.peak_value, positive.share) == (Box(1, 0, 2, 1), 3, pytest.approx(0.6))
    assert (negative.box, negative.peak_value, negative.share) == (Box(2, 0, 3, 1), -2, pytest.approx(0.4))
    assert (joined.box, joined.share) == (Box(1, 0, 3, 1), pytest.approx(1))


def test_equal_values_are_in_the_mass_together():
    values = np.array([[4, 4, 4, 1, 0]], np.float32)
    (region,) = find(values, Box(0, 0, 5, 1), (1, 5), ("mass", 0.4))

    assert region.box == Box(0, 0, 3, 1)
    assert region.share == pytest.approx(12 / 13)


def test_outline_leaves_out_holes_and_passes_diagonal_neighbours():
    values = np.array([[1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 0], [0, 0, 0, 1]], np.float32)
    (region,) = find(values, Box(0, 0, 4, 4), (4, 4), ("quantile", 0.0))
    corners = {tuple(corner) for corner in region.contour.tolist()}

    assert region.area == 9
    assert corners == {(0, 0), (3, 0), (3, 3), (4, 3), (4, 4), (3, 4), (0, 3)}


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, -np.inf])
def test_map_that_shows_no_value_has_no_regions(value):
    raw = np.full((7, 7), -1, np.float32)
    raw[3, 3] = value
    values = scales.values_on_input(raw, Rendering(), SIZE)

    assert find(values) == ()
    assert find(values, threshold=("mass", 1.0)) == ()


def test_flat_map_is_one_region_and_a_single_cell_too():
    for raw in (np.ones((7, 7), np.float32), np.full((1, 1), 1e-30, np.float32)):
        (region,) = find(scales.values_on_input(raw, Rendering(), SIZE))
        assert (region.box, region.area, region.share) == (SAME, 24 * 32, pytest.approx(1))
        assert region.contour.tolist() in ([[0, 0], [0, 24], [32, 24], [32, 0]], [[0, 0], [32, 0], [32, 24], [0, 24]])


def test_masks_are_made_only_on_request():
    assert all(region.mask is None for region in find(random_map(1), masks=False))
