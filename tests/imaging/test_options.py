"""Options of drawing: signs, scales, thresholds, fading, contour lines, outlines and colour bars on pictures."""

import io
import itertools

import numpy as np
import pytest
from matplotlib.colors import TwoSlopeNorm
from PIL import Image
from scipy.spatial import cKDTree
from skimage import data, measure
from skimage.draw import polygon_perimeter

from camserve_server.imaging import marks, regions, render, scales
from camserve_server.imaging.interpolation import interpolate
from camserve_server.imaging.values import Box, RegionOptions, Rendering, Threshold

PHOTO = data.chelsea()[::2, ::2]
HEIGHT, WIDTH = PHOTO.shape[:2]
WHOLE, SEEN = Box(0, 0, WIDTH, HEIGHT), Box(46.98, 9.375, 178.52, 140.625)
SIZE = (224, 224)
MAP = np.random.default_rng(0).normal(size=(7, 7)).astype(np.float32)
PIXELWISE = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
BOTH = {"sign": "both", "colormap": "coolwarm"}


def draw(photo=PHOTO, raw=MAP, seen=SEEN, least=None, outlines=(), **options):
    """Draw a map; return the overlay and the heatmap alone as pixels."""
    rendering = Rendering(overlay="png", heatmap_image="png", **options)
    scale = rendering.scale if isinstance(rendering.scale, float) else None
    scaled = scales.scale_map(raw, rendering, SIZE, scale)
    pictures = render.draw(photo, scaled, seen, rendering, threshold=least, outlines=outlines)
    return [np.asarray(Image.open(io.BytesIO(picture.data)).convert("RGB")) for picture in pictures]


def differ(first, second):
    return np.abs(first.astype(int) - second).max()


def shown(raw=MAP, sign="positive", seen=SEEN, size=(HEIGHT, WIDTH)):
    """Return the shown values at the pixels of a picture, and the place of these pixels."""
    grid = interpolate(scales.shown_values(raw, sign), seen, size)
    count = len(grid.rows.low)
    return grid.values(0, count), grid.place(0, count)


# Signs and scales


def test_colours_of_both_signs_are_those_of_matplotlibs_norm():
    top = float(np.abs(MAP).max())
    values, place = shown(sign="both")
    expected = TwoSlopeNorm(0, -top, top)(values.astype(np.float64)) * 255

    _, alone = draw(sign="both", colormap="gray")
    assert np.abs(alone[place][..., 0] - expected).max() <= 0.5 + 1e-3


@pytest.mark.parametrize("raw", [MAP, PIXELWISE], ids=["grid", "pixels"])
def test_zero_has_the_colour_in_the_middle(raw):
    _, alone = draw(raw=raw * 0, seen=WHOLE, **BOTH)

    assert (alone == render.colormap("coolwarm")[128]).all()
    assert np.array_equal(render.colormap("coolwarm")[127], render.colormap("coolwarm")[128])


def test_negative_values_are_drawn_as_positive_ones_of_the_negated_map():
    for first, second in zip(draw(sign="negative"), draw(raw=-MAP), strict=True):
        assert np.array_equal(first, second)


@pytest.mark.parametrize("raw", [MAP, PIXELWISE], ids=["grid", "pixels"])
@pytest.mark.parametrize("max_side", [None, 60])
@pytest.mark.parametrize("options", [{}, BOTH, {"profile": "captum"}, {"profile": "captum", **BOTH}])
def test_picture_with_the_maps_own_scale_as_fixed_scale_is_the_same(raw, max_side, options):
    scale = scales.own_scale(raw, Rendering(**options), SIZE)

    for first, second in zip(
        draw(raw=raw, max_side=max_side, **options),
        draw(raw=raw, max_side=max_side, scale=scale, **options),
        strict=True,
    ):
        assert np.array_equal(first, second)


@pytest.mark.parametrize("sign", ["positive", "both"])
@pytest.mark.parametrize("factor", [1e-36, 1e-12, 0.3, 2.0, 1e12])
def test_values_beyond_a_fixed_scale_have_the_strongest_colour(sign, factor):
    scale = factor * float(np.abs(MAP).max())
    values, place = shown(sign=sign)
    units = (values.astype(np.float64) / scale).clip(-1, 1)
    expected = (units + 1) / 2 * 255 if sign == "both" else units * 255

    _, alone = draw(sign=sign, colormap="gray", scale=scale)
    assert np.abs(alone[place][..., 0] - expected).max() <= 0.5 + 1e-3


def test_same_values_have_the_same_colours_in_two_maps_with_one_scale():
    _, first = draw(scale=2.0, colormap="gray", seen=WHOLE)
    _, second = draw(raw=MAP * 0.5, scale=1.0, colormap="gray", seen=WHOLE)
    _, weaker = draw(raw=MAP * 0.5, scale=2.0, colormap="gray", seen=WHOLE)

    assert np.array_equal(first, second)
    assert np.abs(weaker - first / 2).max() <= 1


# Thresholds and fading


@pytest.mark.parametrize("sign", ["positive", "negative", "both", "absolute"])
@pytest.mark.parametrize("raw", [MAP, PIXELWISE], ids=["grid", "pixels"])
@pytest.mark.parametrize("least", [0.0, 1.0, *(pytest.param(least, marks=pytest.mark.slow) for least in (0.2, 2.8))])
def test_nothing_is_painted_below_a_threshold(sign, raw, least):
    colours = {"sign": sign, "colormap": "coolwarm"}
    values, place = shown(raw, sign)
    painted = np.zeros((HEIGHT, WIDTH), bool)
    painted[place] = (np.abs(values) >= least) & (values != 0)
    (overlay, alone), (whole_overlay, whole) = draw(raw=raw, least=least, **colours), draw(raw=raw, **colours)

    assert np.array_equal(overlay[~painted], PHOTO[~painted])
    assert not alone[~painted].any()
    assert np.array_equal(overlay[painted], whole_overlay[painted])
    assert np.array_equal(alone[painted], whole[painted])


def test_quantile_paints_its_share_of_the_seen_part():
    values = np.abs(scales.values_on_input(MAP, Rendering(**BOTH), SIZE))
    least = scales.threshold_of(values, Threshold("quantile", 0.8))
    _, alone = draw(least=least, seen=WHOLE, **BOTH)

    assert alone.any(axis=-1).mean() == pytest.approx(0.2, abs=0.01)


def test_threshold_above_every_value_leaves_the_photo_as_it_is():
    overlay, alone = draw(least=1e9, color_bar=False, contour_lines=16, fade=True)

    assert np.array_equal(overlay, PHOTO)
    assert not alone.any()


@pytest.mark.parametrize("sign", ["positive", "both"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_fading_multiplies_the_opacity_by_the_intensity(sign, alpha):
    overlay, alone = draw(sign=sign, colormap="coolwarm", fade=True, alpha=alpha)
    values, place = shown(sign=sign)
    opacity = alpha * np.abs(values)[..., None] / np.abs(MAP if sign == "both" else MAP.clip(0)).max()
    expected = PHOTO[place] * (1 - opacity) + alone[place] * opacity
    nothing = np.ones((HEIGHT, WIDTH), bool)
    nothing[place] = opacity[..., 0] == 0

    assert np.abs(overlay[place] - expected).max() <= 0.51
    assert np.array_equal(overlay[nothing], PHOTO[nothing])
    assert np.array_equal(alone, draw(sign=sign, colormap="coolwarm")[1])


# Contour lines and outlines


@pytest.mark.parametrize("count", [1, 3, 16])
@pytest.mark.parametrize("sign", ["positive", "both"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_contour_lines_are_where_scikit_image_finds_them(sign, count, seed):
    raw = np.random.default_rng(seed).normal(size=(4, 5)).astype(np.float32)
    size = (300, 400)
    scaled = scales.scale_map(raw, Rendering(sign=sign), SIZE)
    grid = interpolate(scaled.heat, Box(0, 0, size[1], size[0]), size)
    heat = grid.values(0, size[0])
    core, edge = marks.cover_lines(heat, count, 1.0)
    levels = [side * k / (count + 1) for k in range(1, count + 1) for side in ((1, -1) if sign == "both" else (1,))]
    lines = [line for level in levels for line in measure.find_contours(heat, level)]
    rows, columns = np.rint(np.concatenate(lines)).astype(int).T
    distances = cKDTree(np.concatenate([densely(line) for line in lines])).query(np.argwhere(core > 0))[0]
    length = sum(np.hypot(*np.diff(line, axis=0).T).sum() for line in lines)

    assert np.mean(core[rows, columns] > 0.25) > 0.995
    assert np.mean(distances > 1.1) < 0.003  # the others are at saddles, where the map nearly reaches the level
    assert core.sum() == pytest.approx(length, rel=0.01)  # across a line the coverage adds up to its width of a pixel
    assert (edge >= core).all()


def densely(line):
    """Return the points of a line, and four between each two."""
    steps = np.diff(line, axis=0)
    return np.concatenate([line[:-1] + steps * part for part in np.linspace(0, 1, 6)])


@pytest.mark.parametrize("count", [1, 16])
def test_contour_lines_are_drawn_on_both_pictures_across_bands(count):
    options = {"contour_lines": count, "seen": WHOLE}
    plain, marked = draw(seen=WHOLE), draw(**options)
    lines = [np.abs(one.astype(int) - other).max(axis=-1) > 40 for one, other in zip(plain, marked, strict=True)]
    values, _ = shown(seen=WHOLE)
    near_edge, _ = (cover > 0 for cover in marks.cover_lines(values / MAP.max(), count, 1.0))

    for drawn in lines:
        assert drawn.any()
        assert np.mean(drawn[near_edge]) > 0.3


def test_threshold_also_hides_contour_lines():
    values, place = shown()
    painted = np.zeros((HEIGHT, WIDTH), bool)
    painted[place] = values >= 0.5

    overlay, alone = draw(least=0.5, contour_lines=16)
    assert np.array_equal(overlay[~painted], PHOTO[~painted])
    assert not alone[~painted].any()


@pytest.mark.parametrize("raw", [MAP * 0, np.ones((7, 7), np.float32), np.full((1, 1), 0.5, np.float32)])
def test_flat_map_has_no_contour_lines(raw):
    for first, second in zip(draw(raw=raw, scale=1.0), draw(raw=raw, scale=1.0, contour_lines=1), strict=True):
        assert np.array_equal(first, second)


@pytest.mark.parametrize("background", [0, 90, 128, 200, 255])
def test_outlines_contrast_with_any_background(background):
    photo = np.full((100, 100, 3), background, np.uint8)
    square = np.array([[20, 20], [80, 20], [80, 80], [20, 80]], np.int32)
    overlay, alone = draw(photo, seen=Box(0, 0, 100, 100), alpha=0.0, outlines=[square])
    across = overlay[50, 14:27, 0].astype(int)

    assert np.ptp(across) > 100
    assert np.array_equal(overlay[25:75, 25:75], photo[25:75, 25:75])
    assert np.array_equal(alone, draw(photo, seen=Box(0, 0, 100, 100))[1])


@pytest.mark.parametrize("max_side", [None, 150])
def test_outline_of_a_region_lies_on_its_edge(max_side):
    values = scales.values_on_input(MAP, Rendering(), SIZE)
    found = regions.find(values, SEEN, (HEIGHT, WIDTH), RegionOptions())
    plain, _ = draw(alpha=0.0, max_side=max_side)
    marked, _ = draw(alpha=0.0, max_side=max_side, outlines=[region.contour for region in found])
    changed = np.argwhere((plain != marked).any(axis=-1))
    scale = plain.shape[1] / WIDTH
    corners = [region.contour[:, ::-1] * scale - 0.5 for region in found]
    lines = [np.stack(polygon_perimeter(*line.T), axis=1) for line in corners]
    distances = cKDTree(np.concatenate(lines)).query(changed)[0]

    assert len(changed) > 100
    assert distances.max() < 4  # the line and its dark edges are four pixels wide, and the reference is rounded


# Colour bars


@pytest.mark.parametrize("size", [(16, 16), (16, 700), (700, 16), (300, 451), (1, 1), (3, 50), (1100, 300)])
@pytest.mark.parametrize("max_side", [None, 16, 100])
def test_colour_bar_is_added_to_the_right_of_the_same_picture(size, max_side):
    photo = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    seen = Box(0, 0, size[1], size[0])
    for plain, wide in zip(
        draw(photo, seen=seen, max_side=max_side),
        draw(photo, seen=seen, max_side=max_side, color_bar=True),
        strict=True,
    ):
        height, width = plain.shape[:2]
        assert wide.shape == (height, width + marks.bar_width(height, width), 3)
        assert np.array_equal(wide[:, :width], plain)


@pytest.mark.parametrize(
    ("options", "colours"),
    [
        ({}, render.colormap("jet")[::-1]),
        (BOTH, render.colormap("coolwarm")[::-1]),
        ({"profile": "torchcam", "colormap": "gray"}, (np.linspace(1, 0, 256) ** 2 * 255)[:, None]),
    ],
    ids=["positive", "both", "torchcam"],
)
def test_colour_bar_has_the_colours_from_the_largest_value_down(options, colours):
    overlay, _ = draw(np.zeros((400, 300, 3), np.uint8), color_bar=True, **options)
    bar = overlay[:, 300:]
    column = next(x for x in range(bar.shape[1]) if (bar[200, x] != 255).any()) + 2
    drawn = bar[:, column].astype(int)
    inside = np.flatnonzero((drawn != 255).any(axis=-1))
    inside = np.arange(inside[0], inside[-1] + 1)
    places = (np.arange(len(inside)) + 0.5) / len(inside) * 256 - 0.5
    expected = np.stack([np.interp(places, np.arange(256), channel) for channel in colours.T], axis=1)

    assert len(inside) >= 380
    assert np.abs(drawn[inside] - expected).max() <= 4


@pytest.mark.parametrize(("sign", "labels"), [("positive", "2 1 0"), ("negative", "-4 -2 0"), ("both", "4 0 -4")])
def test_colour_bar_is_labelled_with_raw_values(sign, labels, monkeypatch):
    written, text = [], marks._text
    monkeypatch.setattr(marks, "_text", lambda label, size: written.append(label) or text(label, size))
    raw = np.array([[2, 0], [1, -4]], np.float32)
    draw(raw=raw, sign=sign, color_bar=True)
    high, middle, low = labels.split()

    assert written[:3] == [high, low, middle]


def test_labels_of_min_max_profiles_end_at_the_minimum(monkeypatch):
    written, text = [], marks._text
    monkeypatch.setattr(marks, "_text", lambda label, size: written.append(label) or text(label, size))
    raw = np.array([[2, 6], [3, 4]], np.float32)
    draw(raw=raw, profile="torchcam", color_bar=True)

    assert written[:3] == ["6", "2", "4"]


# Hostile values


HOSTILE_MAPS = {
    "NaN": np.full((7, 7), np.nan, np.float32),
    "infinite": np.full((7, 7), np.inf, np.float32),
    "largest": np.where(MAP > 0, np.finfo(np.float32).max, -np.finfo(np.float32).max).astype(np.float32),
    "smallest": MAP.clip(-1, 1) * np.float32(1e-44),
    "flat": np.full((7, 7), 3, np.float32),
    "all negative": -np.abs(MAP),
    "one cell": np.ones((1, 1), np.float32),
    "one row": MAP[:1],
    "larger than the input": np.random.default_rng(2).normal(size=(300, 260)).astype(np.float32),
}
EVERYTHING = {"contour_lines": 16, "color_bar": True, "fade": True}


def hostile():
    """Return combinations in which each pair of values occurs: a few for the fast tests, and one of three for all."""
    shapes = [((1, 1), Box(0, 0, 1, 1)), ((16, 20), Box(-30.5, -3, 40, 90)), ((2, 300), Box(20, -500, 21, 502))]
    signs, profiles = ("positive", "negative", "both", "absolute"), ("paper", "grad-cam", "torchcam", "captum")
    for numbers in itertools.product(range(len(HOSTILE_MAPS)), range(4), range(4), range(3)):
        name, sign, profile, (shape, seen) = (
            each[number] for each, number in zip((list(HOSTILE_MAPS), signs, profiles, shapes), numbers, strict=True)
        )
        fast = numbers[2:] == (sum(numbers[:2]) % 4, (numbers[0] + 2 * numbers[1]) % 3)
        if not fast and sum(numbers) % 3:
            continue
        marks = () if fast else pytest.mark.slow
        yield pytest.param(
            HOSTILE_MAPS[name], sign, profile, shape, seen, marks=marks, id=f"{name}-{sign}-{profile}-{shape}"
        )


@pytest.mark.parametrize(("raw", "sign", "profile", "shape", "seen"), list(hostile()))
def test_every_option_accepts_every_map_and_photo(raw, sign, profile, shape, seen):
    if sign == "both" and profile in {"grad-cam", "torchcam"}:
        profile = "paper"
    photo = np.full((*shape, 3), 128, np.uint8)
    rendering = Rendering(profile=profile, sign=sign)
    values = scales.values_on_input(raw, rendering, SIZE)
    found = regions.find(values, seen, shape, RegionOptions(Threshold("mass", 0.9), masks=True))
    least = scales.threshold_of(np.abs(values), Threshold("quantile", 0.5))
    options = {"profile": profile, "sign": sign, "seen": seen, "outlines": [region.contour for region in found]}
    pictures = draw(photo, raw, least=least, **options, **EVERYTHING) + draw(photo, raw, **options, **EVERYTHING)

    assert np.isfinite(values).all()
    assert {picture.shape for picture in pictures} == {(shape[0], shape[1] + marks.bar_width(*shape), 3)}
    assert all(region.area > 0 and np.isfinite(region.share) for region in found)
