"""Pictures of maps: intensities, colours, overlays, files."""

import io

import cv2
import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image
from pytorch_grad_cam.utils.image import show_cam_on_image
from skimage import data

from camserve_server.core.errors import InvalidArgument
from camserve_server.imaging import render, scales
from camserve_server.imaging.values import Box, Rendering

PHOTO = data.chelsea()
HEIGHT, WIDTH = PHOTO.shape[:2]
WHOLE = Box(0, 0, WIDTH, HEIGHT)
SEEN = Box(93.96, 18.75, 357.04, 281.25)
MAP = np.random.default_rng(0).normal(size=(7, 7)).astype(np.float32)


def scaled(heatmap, size=(224, 224), **options):
    return scales.scale_map(heatmap, Rendering(**options), size)


def intensity(heatmap, size=(224, 224)):
    return scaled(heatmap, size).heat


def pixels(picture):
    return np.asarray(Image.open(io.BytesIO(picture.data)).convert("RGB"))


def overlay(photo=PHOTO, heatmap=MAP, seen=SEEN, **options):
    return pixels(render.draw(photo, scaled(heatmap), seen, Rendering(overlay="png", **options))[0])


def alone(photo=PHOTO, heatmap=MAP, seen=SEEN, **options):
    return pixels(render.draw(photo, scaled(heatmap), seen, Rendering(heatmap_image="png", **options))[1])


def differ(first, second):
    return np.abs(first.astype(int) - second).max()


def hot_cell(row, column, shape=(7, 7)):
    heatmap = np.zeros(shape, np.float32)
    heatmap[row, column] = 1
    return heatmap


def middle_of_brightest(picture):
    rows, columns = np.nonzero(picture[..., 0] == picture[..., 0].max())
    return columns.mean() + 0.5, rows.mean() + 0.5


# Intensities


def test_intensities_are_the_positive_values_relative_to_the_greatest():
    heatmap = np.array([[-2, 0, 1], [4, 2, -8]], np.float32)
    expected = np.array([[0, 0, 0.25], [1, 0.5, 0]], np.float32)
    result = intensity(heatmap)
    assert result.dtype == np.float32
    assert np.array_equal(result, expected)


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-11, 1, 1e30])
def test_intensities_do_not_depend_on_the_scale_of_a_map(scale):
    heatmap = np.array([[0, 0.5, 1]]) * scale
    result = intensity(heatmap.astype(np.float32))
    assert result[0] == pytest.approx([0, 0.5, 1], abs=0.1 if scale < 1e-40 else 1e-6)


@pytest.mark.parametrize("value", [-1, 0, np.nan, np.inf, -np.inf])
def test_map_without_positive_values_has_zero_intensity(value):
    heatmap = np.full((3, 4), -1, np.float32)
    heatmap[1, 1] = value
    assert not intensity(heatmap).any()
    if not np.isfinite(value):
        heatmap[0, 0] = 1
        assert not intensity(heatmap).any()


# Colours


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        *((same, 1) for same in ("viridis", "turbo", "inferno", "magma", "plasma", "cividis", "bone", "gray")),
        ("coolwarm", 4),
        ("jet", 34),  # OpenCV's jet has softer corners; it is the one that Grad-CAM libraries draw with
    ],
)
def test_colours_are_those_of_matplotlib(name, tolerance):
    expected = np.rint(mpl.colormaps[name](np.arange(256))[:, :3] * 255)
    assert differ(render.colormap(name), expected) <= tolerance


@pytest.mark.parametrize("name", render.COLORMAPS)
def test_every_colour_map_can_be_drawn(name):
    assert render.colormap(name).shape == (256, 3)
    assert render.colormap(name).dtype == np.uint8
    ramp = np.arange(256, dtype=np.float32)[None]
    picture = alone(np.zeros((1, 256, 3), np.uint8), ramp, Box(0, 0, 256, 1), colormap=name)
    assert np.array_equal(picture[0], render.colormap(name))


@pytest.mark.parametrize(
    ("name", "hint"), [("jett", '(did you mean "jet"?)'), ("Viridis", '"viridis"'), ("grey", '"gray"'), ("", "winter")]
)
def test_unknown_colour_map_error_lists_the_known_ones(name, hint):
    with pytest.raises(InvalidArgument) as refusal:
        render.colormap(name)
    assert refusal.value.field == "rendering.colormap"
    assert refusal.value.message.startswith(f'unknown colormap "{name}": expected one of autumn, bone, cividis, ')
    assert hint in refusal.value.message
    with pytest.raises(InvalidArgument):
        render.draw(PHOTO, scaled(MAP), SEEN, Rendering(colormap=name))


def test_error_truncates_a_long_name():
    with pytest.raises(InvalidArgument) as refusal:
        render.colormap("x" * 1_000_000)
    assert len(refusal.value.message) < 400


# Pictures


def test_only_requested_pictures_are_made():
    assert render.draw(PHOTO, scaled(MAP), SEEN, Rendering()) == (None, None)
    over, heat = render.draw(PHOTO, scaled(MAP), SEEN, Rendering(overlay="jpeg"))
    assert (over.format, over.width, over.height, heat) == ("jpeg", WIDTH, HEIGHT, None)
    over, heat = render.draw(PHOTO, scaled(MAP), SEEN, Rendering(heatmap_image="webp"))
    assert (over, heat.format, heat.width, heat.height) == (None, "webp", WIDTH, HEIGHT)


@pytest.mark.parametrize("file_format", ["jpeg", "png", "webp"])
def test_pictures_have_their_format_and_similar_pixels(file_format):
    options = Rendering(overlay=file_format, heatmap_image=file_format, quality=95)
    for picture, lossless in zip(render.draw(PHOTO, scaled(MAP), SEEN, options), (overlay(), alone()), strict=True):
        file = Image.open(io.BytesIO(picture.data))
        assert file.format.lower() == picture.format == file_format
        assert file.size == (picture.width, picture.height) == (WIDTH, HEIGHT)
        assert np.abs(np.asarray(file).astype(int) - lossless).mean() < 2


@pytest.mark.parametrize("file_format", ["jpeg", "webp"])
def test_higher_quality_takes_more_bytes(file_format):
    low, high = (
        len(render.draw(PHOTO, scaled(MAP), SEEN, Rendering(overlay=file_format, quality=quality))[0].data)
        for quality in (30, 95)
    )
    assert low * 2 < high


def test_outside_the_seen_box_the_photo_is_unchanged_and_the_heatmap_black():
    over, heat = overlay(), alone()
    left, top, right, bottom = 94, 19, 357, 281  # the pixels whose centres lie in the box
    outside = np.ones((HEIGHT, WIDTH), bool)
    outside[top:bottom, left:right] = False
    assert np.array_equal(over[outside], PHOTO[outside])
    assert not heat[outside].any()
    assert heat[~outside].any(axis=-1).all()


def test_alpha_0_is_the_photo_and_alpha_1_the_colours():
    assert np.array_equal(overlay(alpha=0), PHOTO)
    assert np.array_equal(overlay(seen=WHOLE, alpha=1), alone(seen=WHOLE))
    assert differ(overlay(seen=WHOLE, alpha=0.25), 0.75 * PHOTO + 0.25 * alone(seen=WHOLE)) <= 1


@pytest.mark.parametrize("shape", [(7, 7), (12, 9), (1, 1), (1, 14), (224, 200)])
def test_whole_photo_is_interpolated_as_torch_does(shape):
    heatmap = np.random.default_rng(1).random(shape, np.float32)
    grid = torch.from_numpy(intensity(heatmap))[None, None]
    expected = torch.nn.functional.interpolate(grid, (HEIGHT, WIDTH), mode="bilinear", align_corners=False)[0, 0]
    picture = alone(heatmap=heatmap, seen=WHOLE, colormap="gray")
    assert differ(picture[..., 0], (expected.numpy() * 255).round()) <= 1


def test_fractional_box_is_interpolated_at_its_position():
    """Return the reference: torch's grid_sample at the centre of every pixel, in float64."""
    x = (np.arange(94, 357) + 0.5 - SEEN.left) / (SEEN.right - SEEN.left)
    y = (np.arange(19, 281) + 0.5 - SEEN.top) / (SEEN.bottom - SEEN.top)
    grid = torch.from_numpy(np.stack(np.meshgrid(x, y), axis=-1) * 2 - 1)[None]
    values = torch.from_numpy(intensity(MAP).astype(np.float64))[None, None]
    expected = torch.nn.functional.grid_sample(values, grid, padding_mode="border", align_corners=False)[0, 0]
    picture = alone(colormap="gray")[19:281, 94:357, 0]
    assert differ(picture, (expected.numpy() * 255).round()) <= 1


def test_overlay_is_that_of_pytorch_grad_cam():
    heatmap = np.random.default_rng(2).random((7, 7), np.float32)
    mask = cv2.resize(intensity(heatmap), (WIDTH, HEIGHT))
    ours = overlay(heatmap=heatmap, seen=WHOLE).astype(float)
    theirs = show_cam_on_image(np.float32(PHOTO) / 255, mask, use_rgb=True).astype(float)
    # It truncates where camserve rounds, and stretches the picture to full brightness.
    theirs *= ours.max() / theirs.max()
    assert np.abs(ours - theirs).max() <= 4


@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 3), (6, 2), (5, 6)])
@pytest.mark.parametrize("seen", [WHOLE, SEEN, Box(75.5, 0, 375.5, 300)])
def test_maximum_of_the_overlay_is_at_the_cells_place(row, column, seen):
    picture = alone(heatmap=hot_cell(row, column), seen=seen, colormap="gray")
    cell = (seen.right - seen.left) / 7, (seen.bottom - seen.top) / 7
    x, y = middle_of_brightest(picture)
    # At the map's edge the cell stays at its value up to the edge of the box.
    assert abs(x - (seen.left + (column + 0.5) * cell[0])) <= (1 if 0 < column < 6 else cell[0] / 4 + 1)
    assert abs(y - (seen.top + (row + 0.5) * cell[1])) <= (1 if 0 < row < 6 else cell[1] / 4 + 1)


@pytest.mark.parametrize("max_side", [64, 200])
def test_high_cell_of_a_fine_map_is_visible_in_a_small_picture(max_side):
    picture = alone(heatmap=hot_cell(100, 150, (224, 224)), colormap="gray", max_side=max_side)
    scale = max_side / WIDTH
    expected = (
        (SEEN.left + 150.5 / 224 * (SEEN.right - SEEN.left)) * scale,
        (SEEN.top + 100.5 / 224 * (SEEN.bottom - SEEN.top)) * scale,
    )
    assert picture.max() > 80
    assert middle_of_brightest(picture) == pytest.approx(expected, abs=1)


def test_maps_with_tiny_values_are_drawn():
    assert differ(alone(heatmap=MAP * 1e-11), alone()) <= 1


def test_zero_map_is_drawn_in_the_colour_of_zero():
    for heatmap in (-np.abs(MAP), np.full_like(MAP, np.nan)):
        assert (alone(heatmap=heatmap, seen=WHOLE) == render.colormap("jet")[0]).all()


def test_padding_beyond_the_photo_is_not_drawn():
    """A photo of 100 x 100 in the middle of a padded input of 200 x 200: only the inner cells show."""
    photo = np.zeros((100, 100, 3), np.uint8)
    heatmap = np.zeros((4, 4), np.float32)
    heatmap[1:3, 1:3] = ((0.25, 0.5), (0.75, 1))
    heatmap[0, 0] = 1
    picture = alone(photo, heatmap, Box(-50, -50, 150, 150), colormap="gray")[..., 0]
    centres = picture[24:26, 24:26], picture[24:26, 74:76], picture[74:76, 24:26], picture[74:76, 74:76]
    assert [centre.mean() / 255 for centre in centres] == pytest.approx([0.25, 0.5, 0.75, 1], abs=0.02)


@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        ((1, 1), Box(0.06, 0.06, 0.94, 0.94)),
        ((1, 16384), Box(8191.56, 0.06, 8192.44, 0.94)),
        ((16384, 1), Box(0.06, 8191.56, 0.94, 8192.44)),
        ((3, 5000), Box(2498.7, 0.2, 2501.3, 2.8)),
        ((10, 10), Box(9.7, 9.7, 10, 10)),
    ],
)
@pytest.mark.parametrize("max_side", [None, 16])
def test_smallest_box_colours_a_pixel(shape, seen, max_side):
    photo = np.zeros((*shape, 3), np.uint8)
    picture = overlay(photo, np.ones((7, 7), np.float32), seen, max_side=max_side)
    coloured = picture.any(axis=-1)
    assert 1 <= coloured.sum() <= 9


@pytest.mark.parametrize(
    ("max_side", "size"), [(None, (451, 300)), (1000, (451, 300)), (451, (451, 300)), (200, (200, 133)), (16, (16, 11))]
)
def test_pictures_are_reduced_but_never_enlarged(max_side, size):
    rendering = Rendering(overlay="png", heatmap_image="jpeg", max_side=max_side)
    for picture in render.draw(PHOTO, scaled(MAP), SEEN, rendering):
        assert (picture.width, picture.height) == size
        assert Image.open(io.BytesIO(picture.data)).size == size


def test_small_overlay_equals_the_reduced_overlay():
    small = cv2.resize(overlay(), (200, 133), interpolation=cv2.INTER_AREA)
    assert np.abs(overlay(max_side=200).astype(int) - small).mean() < 1.5


def test_large_photos_are_drawn_in_bands_without_seams():
    heatmap = np.linspace(0, 1, 9, dtype=np.float32)[:, None] * np.ones((1, 5), np.float32)
    picture = alone(np.zeros((2000, 700, 3), np.uint8), heatmap, Box(0, 0, 700, 2000), colormap="gray")[..., 0]
    steps = np.diff(picture.astype(int), axis=0)
    assert steps.min() >= 0
    assert steps.max() <= 1


def test_photo_and_map_are_not_changed():
    photo, heatmap = PHOTO.copy(), MAP.copy()
    photo.flags.writeable = heatmap.flags.writeable = False
    overlay(photo, heatmap)
    assert np.array_equal(photo, PHOTO)
    assert np.array_equal(heatmap, MAP)


def test_photo_too_long_for_webp_is_refused():
    photo = np.zeros((1, 16384, 3), np.uint8)
    with pytest.raises(InvalidArgument, match="16,383 pixels on a side: set max_side, or request PNG"):
        render.draw(photo, scaled(MAP), SEEN, Rendering(overlay="webp"))
    assert render.draw(photo, scaled(MAP), SEEN, Rendering(overlay="webp", max_side=16000))[0].width == 16000
    assert overlay(photo, seen=Box(0, 0, 16384, 1)).shape == (1, 16384, 3)


def test_single_high_pixel_does_not_darken_a_map_clipped_at_a_percentile():
    heatmap = np.linspace(0, 1, 10_000, dtype=np.float32).reshape(100, 100)
    heatmap[3, 5] = 1000.0
    cut, uncut = intensity(heatmap, heatmap.shape), intensity(heatmap)

    assert cut.max() == 1.0
    assert (cut == 1).mean() == pytest.approx(0.01, abs=2e-3)
    assert np.median(cut) == pytest.approx(0.505, abs=0.01)
    assert np.median(uncut) < 0.001


def test_map_with_less_than_a_hundredth_above_zero_is_still_drawn():
    heatmap = np.zeros((100, 100), np.float32)
    heatmap[3, 5] = 1e-9

    assert intensity(heatmap, heatmap.shape)[3, 5] == 1.0
