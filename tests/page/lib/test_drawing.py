"""The browser draws a map as the server does."""

import io

import cv2
import numpy as np
import pytest
from PIL import Image

from camserve._values.picture import Box, Photo
from camserve._values.resampling import onto_photo
from camserve_server.imaging import render, scales, values
from camserve_server.imaging.values import Rendering, Threshold
from page.lib.maps_data import array, heatmap, signed

SIZE = (224, 224)
MAPS = {"coarse": signed(7, 7), "wide": signed(5, 9, 1), "pixelwise": signed(*SIZE, 2)}
SIGNS = ("positive", "negative", "both", "absolute")
SCALE = "return draw.ownScale(maps.decodeMap(heat), style, size)"


def assert_close(found, expected):
    """Compare with a float32 result: the browser computes in float64."""
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6 * max(1.0, float(np.abs(expected).max())))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("sign", SIGNS)
def test_scale_is_that_of_the_server(js, name, sign):
    found = js(SCALE, heat=heatmap(MAPS[name]), style={"sign": sign}, size=SIZE)

    assert_close(found, scales.own_scale(MAPS[name], Rendering(sign=sign), SIZE))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_map_with_a_non_finite_value_is_drawn_as_without_evidence(js, bad):
    values = MAPS["coarse"].copy()
    values[3, 3] = bad

    assert js(SCALE, heat=heatmap(values), style={"sign": "both"}, size=SIZE) == 0
    np.testing.assert_array_equal(painted(js, {}, values), painted(js, {}, np.zeros((7, 7))))


@pytest.mark.parametrize("share", [0, 0.5, 0.8, 0.999, 1])
@pytest.mark.parametrize("sign", SIGNS)
def test_threshold_is_the_quantile_of_the_shown_values(js, share, sign):
    rendering = Rendering(sign=sign)
    values = np.abs(scales.values_on_input(MAPS["coarse"], rendering, SIZE))
    expected = scales.threshold_of(values, Threshold("quantile", share))

    found = js(
        "return draw.thresholdValue(maps.decodeMap(heat), style, size)",
        heat=heatmap(MAPS["coarse"]),
        style={"sign": sign, "threshold": {"quantile": share}},
        size=SIZE,
    )

    assert_close(found, expected)


PAINT = """
const image = { width: size[1], height: size[0], data: new Uint8ClampedArray(4 * size[0] * size[1]) };
draw.paint(image, maps.decodeMap(heat), maps.readPhoto(photo), style, { inputSize: [224, 224] });
return Array.from(image.data);
"""
PHOTO = {"width": 90, "height": 60, "seen": {"left": 15, "right": 75, "bottom": 60}}  # JSON leaves out zeros
SEEN = Photo(90, 60, Box(15, 0, 75, 60))


def painted(js, style, raw=MAPS["coarse"], size=(60, 90)):
    pixels = js(PAINT, heat=heatmap(raw), photo=PHOTO, style=style, size=size)
    return np.array(pixels, np.uint8).reshape(*size, 4)


def interpolated(raw):
    """Return values at the photo's pixels by the Python client, in float64."""
    return np.nan_to_num(onto_photo(raw.astype(np.float64), SEEN))


@pytest.mark.parametrize("colormap", ["jet", "viridis", "coolwarm"])
def test_picture_has_the_colours_of_the_interpolated_values(js, colormap):
    values = MAPS["coarse"].clip(0)
    levels = (interpolated(values / values.max()) * 255).round().astype(int)
    found = painted(js, {"colormap": colormap})

    assert (found[:, :15, 3] == 0).all()
    assert (found[:, 75:, 3] == 0).all()
    assert (found[:, 15:75, 3] == 255).all()
    neighbours = [render.colormap(colormap)[(levels + step).clip(0, 255)] for step in (-1, 0, 1)]
    fits = np.any([(found[..., :3] == each).all(2) for each in neighbours], axis=0)
    assert fits[:, 15:75].all()


def test_signed_picture_has_its_middle_colour_at_zero(js):
    values = np.array([[-2, 0, 1]], np.float32)
    found = painted(js, {"sign": "both", "smooth": False}, values)
    table = render.colormap("coolwarm").astype(int)

    assert tuple(found[30, 20, :3]) == tuple(table[0])
    assert np.abs(found[30, 45, :3] - table[128]).max() <= 1
    assert np.abs(found[30, 70, :3] - table[191]).max() <= 3


def test_threshold_and_fade_set_the_opacity(js):
    values = MAPS["coarse"].clip(0)
    strengths = interpolated(values / values.max())[:, 15:75]
    found = painted(js, {"threshold": {"value": float(values.max()) / 2}, "fade": True})[:, 15:75, 3]

    clear = np.abs(strengths - 0.5) > 1e-6
    assert ((found > 0) == (strengths >= 0.5))[clear].all()
    np.testing.assert_allclose(found[strengths > 0.5], 255 * strengths[strengths > 0.5], atol=0.51)


DRAWN = [
    ("positive", {}),
    ("negative", {"fade": True}),
    ("both", {"threshold": {"quantile": 0.7}}),
    ("absolute", {"threshold": {"value": 0.3}, "scale": 1.5, "fade": True}),
]


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize(("sign", "style"), DRAWN)
def test_picture_is_that_of_the_server(js, name, sign, style):
    threshold = style.get("threshold")
    if threshold:
        ((kind, share),) = threshold.items()
        threshold = Threshold(kind, share)
    rendering = Rendering(
        heatmap_image="png",
        overlay="png",
        alpha=1,
        sign=sign,
        colormap="viridis",
        threshold=threshold,
        fade=style.get("fade", False),
    )
    strengths = np.abs(scales.values_on_input(MAPS[name], rendering, SIZE))
    least = scales.threshold_of(strengths, threshold) if threshold else None
    scaled = scales.scale_map(MAPS[name], rendering, SIZE, style.get("scale"))
    white = np.full((60, 90, 3), 255, np.uint8)
    overlay, _ = render.draw(white, scaled, values.Box(15, 0, 75, 60), rendering, threshold=least)
    expected = np.asarray(Image.open(io.BytesIO(overlay.data)).convert("RGB"), float)

    found = painted(js, {"sign": sign, "colormap": "viridis", **style}, MAPS[name]).astype(float)
    opacity = found[..., 3:] / 255
    blended = found[..., :3] * opacity + 255 * (1 - opacity)

    # Rounding may choose the next colour, and decide about a pixel at the threshold.
    assert (np.abs(blended - expected).max(2) > 6).mean() < 4e-3


def test_fixed_scale_makes_two_maps_comparable(js):
    one = painted(js, {"scale": 8.0}, MAPS["coarse"])
    doubled = painted(js, {"scale": 16.0}, 2 * MAPS["coarse"])

    np.testing.assert_array_equal(one, doubled)


def test_contour_lines_separate_the_bands(js):
    ramp = np.linspace(0, 1, 60, dtype=np.float32)[None]
    plain, lined = painted(js, {}, ramp), painted(js, {"contourLines": 3}, ramp)
    columns = np.flatnonzero((plain != lined).any((0, 2)))

    levels = interpolated(ramp)[0]
    dark = np.flatnonzero(np.diff(np.trunc(levels * 4).clip(max=3))[:74] > 0)
    assert len(dark) == 3  # at 1/4, 1/2 and 3/4
    np.testing.assert_array_equal(columns, np.sort([*dark, *(dark + 1)]))
    assert (lined[:-1, dark, :3] < 50).all()
    assert (lined[:-1, dark + 1, :3] == 255).all()


@pytest.mark.parametrize("size", [(60, 90), (33, 49), (200, 300)])
def test_value_at_a_point_is_that_of_the_python_client(js, size):
    photo = Photo(size[1], size[0], Box(-3.5, 2, size[1] - 7, size[0] + 4))
    values = MAPS["wide"]
    expected = onto_photo(values, photo)
    box = {"left": -3.5, "top": 2, "right": size[1] - 7, "bottom": size[0] + 4}

    found = js(
        """
        const [map, at] = [maps.decodeMap(heat), maps.readPhoto(photo)];
        return rows.map((y) => columns.map((x) => maps.valueAt(map, at, x + 0.5, y + 0.5)));
        """,
        heat=heatmap(values),
        photo={"width": size[1], "height": size[0], "seen": box},
        rows=list(range(size[0])),
        columns=list(range(size[1])),
    )

    found = np.array(found, np.float64)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    assert_close(np.nan_to_num(found), np.nan_to_num(expected))


@pytest.mark.parametrize("size", [(3, 4), (5, 5), (1, 9), (7, 2)])
def test_average_is_weighted_by_area_as_in_opencv(js, size):
    values = signed(11, 9)
    expected = cv2.resize(values, size[::-1], interpolation=cv2.INTER_AREA)

    found = js("return maps.average(maps.decodeMap(heat), ...size)", heat=heatmap(values), size=size)

    assert_close(array(found), expected)


def test_colour_maps_are_those_of_the_server(js):
    found = js(
        "return Object.fromEntries(colormaps.COLORMAPS.map((name) => [name, Array.from(colormaps.levels(name))]))"
    )

    assert {"coolwarm", "jet", "viridis"} <= set(found) <= set(render.COLORMAPS)
    for name, levels in found.items():
        pixels = np.array(levels, np.uint32).view(np.uint8).reshape(256, 4)
        np.testing.assert_array_equal(pixels[:, :3], render.colormap(name))
        assert (pixels[:, 3] == 255).all()


def test_heatmap_is_decoded_bit_by_bit(js):
    values = np.array([[1.5, -2.25, 3e38], [7, 0, 1e-45]], np.float32)

    found = array(js("return maps.decodeMap(stored)", stored=heatmap(values)))

    np.testing.assert_array_equal(found, values)


def test_peak_is_the_strongest_value_of_the_sign(js):
    values = np.array([[1, -9, 2], [5, 0, 3]], np.float32)
    found = {
        sign: js(
            "return maps.peak(maps.decodeMap(heat), maps.readPhoto(photo), sign)",
            heat=heatmap(values),
            photo=PHOTO,
            sign=sign,
        )
        for sign in SIGNS
    }

    assert found["positive"] == {"value": 5, "x": 25, "y": 45}
    assert all(found[sign] == {"value": -9, "x": 45, "y": 15} for sign in SIGNS[1:])
