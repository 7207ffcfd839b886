"""Regions and comparisons of maps equal those of scikit-image, SciPy and the server."""

import numpy as np
import pytest
from scipy import stats
from skimage import measure

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
            total = each.image_intensity.sum()
            found.append((box, int(each.area), total / strengths.sum(), each.intensity_max))
    return sorted(found, key=lambda one: -one[2])


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

    by_box = {tuple(box.values()): (area, share, most) for box, area, share, most in expected}
    assert [key(each) for each in sorted(found, key=key)] == sorted(by_box)
    for each in found:
        area, part, most = by_box[key(each)]
        assert each["area"] == area
        np.testing.assert_allclose(each["share"], part, rtol=1e-5)
        np.testing.assert_allclose(abs(each["peakValue"]), most, rtol=1e-6)
    np.testing.assert_allclose([each["share"] for each in found], [one[2] for one in expected], rtol=1e-5)


def test_regions_are_in_the_pixels_of_the_photo(js):
    photo = {"width": 200, "height": 100, "seen": {"left": 50, "right": 150, "bottom": 100}}
    values = np.zeros((4, 4), np.float32)
    values[1, 2] = 2
    style = {"threshold": {"value": 1}}
    (found,) = js(REGIONS, heat=heatmap(values), photo=photo, style=style, size=(4, 4))

    assert found["box"] == {"left": 100, "top": 25, "right": 125, "bottom": 50}
    assert (found["area"], found["peak"], found["peakValue"], found["share"]) == (625, {"x": 112.5, "y": 37.5}, 2, 1)


def test_only_the_largest_regions_are_returned(js):
    code = REGIONS.replace("1000", "3")
    found = js(code, heat=heatmap(MAPS["noise"]), photo=GRID, style={}, size=SIZE)
    expected = oracle(MAPS["noise"], 0.8, "positive")

    np.testing.assert_allclose([each["share"] for each in found], [one[2] for one in expected[:3]], rtol=1e-5)


PAIRS = {
    "noise": (signed(7, 7), signed(7, 7, 1)),
    "ties": (np.round(signed(9, 8)), np.round(signed(9, 8, 1))),
    "same": (signed(7, 7), 3 * signed(7, 7) + 1),
    "opposite": (signed(7, 7), -signed(7, 7)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_correlations_equal_those_of_scipy(js, name):
    one, other = PAIRS[name]
    found = js("return compare.compareMaps(maps.decodeMap(a), maps.decodeMap(b))", a=heatmap(one), b=heatmap(other))

    np.testing.assert_allclose(found["spearman"], stats.spearmanr(one.ravel(), other.ravel()).statistic, atol=1e-9)
    expected = stats.pearsonr(one.ravel().astype(np.float64), other.ravel().astype(np.float64)).statistic
    np.testing.assert_allclose(found["pearson"], expected, atol=1e-9)
    strong = [(values >= np.quantile(values, 0.8)) & (values > 0) for values in (one, other)]
    assert found["iou"] == (strong[0] & strong[1]).sum() / (strong[0] | strong[1]).sum()


def test_constant_map_has_no_correlation(js):
    found = js(
        "return compare.compareMaps(maps.decodeMap(a), maps.decodeMap(b))",
        a=heatmap(np.ones((3, 3))),
        b=heatmap(signed(3, 3)),
    )

    assert (found["spearman"], found["pearson"]) == (None, None)
    assert found["text"] == "One of the maps is constant, so they cannot be compared."


@pytest.mark.parametrize(
    ("rho", "words"),
    [(0.95, "almost alike"), (0.7, "in the main"), (0.4, "in part"), (0, "little"), (-0.8, "contradict")],
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
