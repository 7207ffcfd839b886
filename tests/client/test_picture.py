"""Interpolation of a raw map to the photo equals values computed by hand and PIL's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from camserve._values.picture import Box, Photo
from camserve._values.resampling import classes_onto_photo, onto_photo

NAN = np.nan


def test_interpolation_equals_values_computed_by_hand() -> None:
    # Two cells over four pixels: their centres at pixels 1 and 3; quarters in between.
    heatmap = np.array([[0.0, 4.0]], np.float32)
    photo = Photo(6, 2, Box(1, 0, 5, 2))

    row = [NAN, 0, 1, 3, 4, NAN]
    np.testing.assert_array_equal(onto_photo(heatmap, photo), [row, row])


def test_rows_and_columns_equal_values_computed_by_hand() -> None:
    heatmap = np.array([[0, 4], [8, 12]], np.float32)
    photo = Photo(4, 5, Box(0, 1, 4, 5))

    expected = [
        [NAN, NAN, NAN, NAN],
        [0, 1, 3, 4],
        [2, 3, 5, 6],
        [6, 7, 9, 10],
        [8, 9, 11, 12],
    ]
    np.testing.assert_array_equal(onto_photo(heatmap, photo), expected)


def test_fractional_box_equals_values_computed_by_hand() -> None:
    # The pixel centres 0.5, 1.5 and 2.5 lie 0, 1 and 2 of 2.5 pixels into the box.
    heatmap = np.array([[0.0, 10.0]], np.float32)
    photo = Photo(4, 1, Box(0.5, 0, 3.0, 1))

    expected = [0.0, 1 / 2.5 * 2 * 10 - 5, 10.0, NAN]
    np.testing.assert_allclose(onto_photo(heatmap, photo)[0], expected, rtol=1e-6)


def test_enlargement_equals_that_of_pil() -> None:
    heatmap = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    photo = Photo(60, 50, Box(3, 4, 53, 46))

    result = onto_photo(heatmap, photo)

    resized = Image.fromarray(heatmap).resize((50, 42), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(result[4:46, 3:53], np.asarray(resized), atol=1e-5)
    assert np.isnan(result[:4]).all()
    assert np.isnan(result[46:]).all()
    assert np.isnan(result[:, :3]).all()
    assert np.isnan(result[:, 53:]).all()


def test_result_is_float32_in_the_size_of_the_photo() -> None:
    result = onto_photo(np.ones((2, 2), np.float32), Photo(9, 7, Box(0, 0, 9, 7)))

    assert result.dtype == np.float32
    assert result.shape == (7, 9)
    assert (result == 1).all()


def test_box_beyond_the_photo_is_clipped() -> None:
    # A model that pads sees more than there is.
    heatmap = np.array([[0.0, 4.0]], np.float32)

    result = onto_photo(heatmap, Photo(2, 1, Box(-1, 0, 3, 1)))

    np.testing.assert_array_equal(result, [[1, 3]])


@pytest.mark.parametrize("box", [Box(2, 2, 2, 2), Box(8, 8, 9, 9), Box(-3, -3, -1, -1)])
def test_map_is_nan_where_the_model_saw_nothing(box: Any) -> None:
    assert np.isnan(onto_photo(np.ones((2, 2), np.float32), Photo(4, 4, box))).all()


def test_map_with_non_finite_values_causes_no_warning() -> None:
    heatmap = np.array([[np.inf, 1.0], [-np.inf, np.nan]], np.float32)

    result = onto_photo(heatmap, Photo(4, 4, Box(0, 0, 4, 4)))

    assert not np.isfinite(result).all()


def test_classes_on_the_photo_equal_values_computed_by_hand() -> None:
    classes = np.array([[0, 65535], [7, 8]], np.uint16)

    result = classes_onto_photo(classes, Photo(6, 4, Box(1, 0, 5, 3)))

    # The centre of the second row lies in the middle of the seen part, on the edge of the second row of cells.
    upper, lower, none = [-1, 0, 0, 65535, 65535, -1], [-1, 7, 7, 8, 8, -1], [-1] * 6
    np.testing.assert_array_equal(result, [upper, lower, lower, none])


@pytest.mark.parametrize("size", [(60, 40), (7, 5), (3, 2)])
def test_enlarged_and_reduced_classes_equal_those_of_pil(size: tuple[int, int]) -> None:
    classes = np.random.default_rng(0).integers(0, 256, (10, 15), np.uint8)

    result = classes_onto_photo(classes.astype(np.uint16), Photo(*size, Box(0, 0, *size)))

    np.testing.assert_array_equal(result, np.asarray(Image.fromarray(classes).resize(size, Image.Resampling.NEAREST)))


def test_photo_without_a_visible_part_has_no_classes() -> None:
    result = classes_onto_photo(np.ones((2, 2), np.uint16), Photo(3, 2, Box(8, 8, 9, 9)))

    np.testing.assert_array_equal(result, np.full((2, 3), -1))
