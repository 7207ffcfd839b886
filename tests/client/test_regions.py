"""Regions are decoded, and their masks are those that pycocotools reads."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as coco

import camserve
from camserve._codec.results import decode_result
from camserve._values.regions import run_lengths
from camserve.v1 import explain_pb2
from client import hostile

RANDOM = np.random.default_rng(0)


def decoded(message: explain_pb2.Region, height: int = 4, width: int = 6) -> camserve.Region:
    """Decode a response of one map with one region."""
    response = explain_pb2.ExplainResponse(
        photo=explain_pb2.Photo(height=height, width=width),
        explanations=[explain_pb2.Explanation(scale=2.5, regions=[message])],
    )
    (region,) = decode_result(response).explanations[0].regions
    return region


def encoded(mask: Any) -> Any:
    """Return the mask as pycocotools encodes it."""
    return coco.encode(np.asfortranarray(mask, np.uint8))


def stripes(height: int, width: int, run: int) -> Any:
    return np.arange(height * width).reshape(width, height).T // run % 2 == 1


MASKS = {
    "noise": RANDOM.random((37, 53)) < 0.5,
    "blobs": RANDOM.random((9, 7)).repeat(31, 0).repeat(17, 1) < 0.4,
    "empty": np.zeros((5, 3)),
    "full": np.ones((5, 3)),
    "one pixel": np.ones((1, 1)),
    "one row": RANDOM.random((1, 999)) < 0.3,
    "one column": RANDOM.random((999, 1)) < 0.3,
    "the first pixel": np.pad(np.ones((1, 1)), ((0, 999), (0, 999))),
    "the last pixel": np.pad(np.ones((1, 1)), ((999, 0), (999, 0))),
    "runs of 2^15 and more": stripes(1024, 1024, 2**15),
    "runs of alternating lengths": np.concatenate([stripes(64, 64, run) for run in (1, 64, 7, 500)], 1),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools and NumPy 2
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_mask_equals_that_of_pycocotools(mask: Any) -> None:
    counts = encoded(mask)["counts"]
    message = explain_pb2.RunLengths(height=mask.shape[0], width=mask.shape[1], counts=counts)

    region = decoded(explain_pb2.Region(mask=message), *mask.shape)

    assert region.mask is not None
    assert region.mask_array.dtype == np.bool_
    np.testing.assert_array_equal(region.mask_array, mask)
    np.testing.assert_array_equal(coco.decode(region.mask), mask)


def test_runs_of_a_large_photo_equal_those_of_pycocotools() -> None:
    runs = [2**31, 3, 2**31 - 1, 70_000, 5, 10**9]  # of 30,000 × 200,000 pixels, which need not be decoded
    size = [30_000, 200_000]
    runs.append(size[0] * size[1] - sum(runs))

    counts = coco.frPyObjects({"size": size, "counts": runs}, *size)["counts"].decode()

    np.testing.assert_array_equal(run_lengths(counts), runs)


def test_region_has_the_values_of_the_message() -> None:
    region = decoded(hostile.region())

    assert region.box == camserve.Box(3, 0, 6, 4)
    assert (region.area, region.peak, region.peak_value, region.share) == (12, (4.5, 1.5), 2, 0.75)
    assert region.contour.dtype == np.float32
    np.testing.assert_array_equal(region.contour, [[3, 0], [6, 0], [6, 4], [3, 4]])
    np.testing.assert_array_equal(region.mask_array, [[False] * 3 + [True] * 3] * 4)
    assert region.mask == {"size": [4, 6], "counts": "<<"}


def test_region_and_its_contour_are_read_only() -> None:
    region = decoded(hostile.region())

    with pytest.raises(AttributeError):
        region.area = 1  # type: ignore[misc]  # this is the test
    with pytest.raises(ValueError, match="read-only"):
        region.contour[0] = 1


def test_region_without_a_mask_names_the_option() -> None:
    message = hostile.region()
    message.ClearField("mask")
    region = decoded(message)

    assert region.mask is None
    with pytest.raises(camserve.FailedPrecondition, match=r"masks=True"):
        _ = region.mask_array


def test_region_as_json_has_all_of_its_values() -> None:
    plain = json.loads(json.dumps(decoded(hostile.region()).plain()))

    assert plain == {
        "box": {"left": 3, "top": 0, "right": 6, "bottom": 4},
        "area": 12,
        "contour": [[3, 0], [6, 0], [6, 4], [3, 4]],
        "peak": [4.5, 1.5],
        "peak_value": 2,
        "share": 0.75,
        "mask": {"size": [4, 6], "counts": "<<"},
    }


def test_region_survives_pickling_and_its_repr_is_short() -> None:
    region = pickle.loads(pickle.dumps(decoded(hostile.region())))  # noqa: S301 -- the data is the test's own

    np.testing.assert_array_equal(region.mask_array, decoded(hostile.region()).mask_array)
    assert "contour" not in repr(region)


def test_scale_and_class_map_are_decoded() -> None:
    classes = np.array([[0, 1, 65535]], np.uint16)
    response = explain_pb2.ExplainResponse(
        photo=explain_pb2.Photo(height=1, width=6),
        explanations=[explain_pb2.Explanation(scale=2.5), explain_pb2.Explanation()],
        class_map=explain_pb2.ClassMap(height=1, width=3, data=classes.astype("<u2").tobytes()),
    )

    result = decode_result(response)

    assert [explanation.scale for explanation in result.explanations] == [2.5, 0]
    assert result.class_map is not None
    assert result.class_map.dtype == np.uint16
    np.testing.assert_array_equal(result.class_map, classes)
    np.testing.assert_array_equal(result.class_map_on_image, classes.repeat(2, 1))


def test_result_without_a_class_map_names_the_option() -> None:
    result = decode_result(explain_pb2.ExplainResponse())

    assert result.class_map is None
    with pytest.raises(camserve.FailedPrecondition, match="class_map=True"):
        _ = result.class_map_on_image
