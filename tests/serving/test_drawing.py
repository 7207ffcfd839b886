"""Drawing the explanations of a request: shared scales, thresholds, regions, and the memory that they take."""

import io
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import fork_server
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging import scales
from camserve_server.imaging.values import Box, RegionOptions, Rendering, Threshold
from camserve_server.jobs import Explanation
from camserve_server.jobs.verdict import Verdict
from camserve_server.methods.values import MethodCall
from camserve_server.serving import drawing, memory
from camserve_server.serving.photos import PreparedPhoto
from camserve_server.serving.requests import ExplainRequest
from camserve_server.targets.values import ClassTarget

SIZE = (96, 128)  # of the model's input
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (120, 160, 3), np.uint8)
MAPS = [RNG.normal(size=shape).astype(np.float32) * factor for shape, factor in (((6, 8), 1), ((6, 8), 5), (SIZE, 2))]
BLANK = np.full((6, 8), np.nan, np.float32)


def drawn(maps, photo=PIXELS, input_size=SIZE, **options):
    """Draw maps as a request does; return their explanations."""
    return draw(*prepare(maps, photo, input_size, **options))


def draw(request, prepared, explanations):
    return run(drawing.draw_and_reply(request, prepared, explanations, Limits(), list))


def prepare(maps, photo, input_size=SIZE, **options):
    size = photo.shape[:2]
    seen = Box(0.1 * size[1], 0, 0.9 * size[1], size[0])
    image = np.zeros((*input_size, 3), np.uint8)
    job = SimpleNamespace(explanations=len(maps))
    request = ExplainRequest(job, Rendering(**options), 0, b"")
    call = MethodCall("gradcam")
    explanations = [Explanation(call, "", ClassTarget(1), 1.0, heatmap, Verdict.OK) for heatmap in maps]
    return request, PreparedPhoto(photo, size, image, seen, job, None), explanations


def run(steps):
    """Return the result of a generator."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def decoded(picture):
    return np.asarray(Image.open(io.BytesIO(picture.data)).convert("RGB"))


@pytest.mark.parametrize("sign", ["positive", "negative", "both", "absolute"])
@pytest.mark.parametrize("profile", ["paper", "captum"])
def test_shared_scale_is_the_largest_of_the_maps_own_scales(profile, sign):
    options = {"profile": profile, "sign": sign, "overlay": "png", "intensity": True}
    alone = [drawn([heatmap], **options)[0].scale for heatmap in MAPS]
    shared = drawn([*MAPS, BLANK], scale="shared", **options)
    fixed = drawn([*MAPS, BLANK], scale=max(alone), **options)

    assert len(set(alone)) == 3
    assert {each.scale for each in shared} == {max(alone)}
    for first, second in zip(shared, fixed, strict=True):
        assert first.overlay == second.overlay
        assert np.array_equal(first.intensity, second.intensity)


def test_scale_of_a_map_draws_the_same_picture_when_it_is_requested():
    for heatmap in MAPS:
        (first,) = drawn([heatmap], overlay="png", heatmap_image="jpeg", color_bar=True)
        (second,) = drawn([heatmap], overlay="png", heatmap_image="jpeg", color_bar=True, scale=first.scale)
        assert (first.overlay, first.heatmap_image) == (second.overlay, second.heatmap_image)


def test_maps_without_values_have_the_scale_0_alone_and_shared():
    for scale in ("own", "shared"):
        assert [each.scale for each in drawn([BLANK, BLANK], overlay="png", scale=scale)] == [0, 0]


@pytest.mark.parametrize("options", [{"overlay": "png"}, {"intensity": True}, {"regions": RegionOptions()}])
def test_scale_is_returned_with_pictures_intensities_and_regions(options):
    rendering = Rendering(**options)
    assert rendering.derived
    assert [each.scale for each in drawn(MAPS, **options)] == [
        scales.own_scale(heatmap, rendering, SIZE) for heatmap in MAPS
    ]
    assert not Rendering(heatmap=True).derived


def test_raw_maps_stay_as_they_are():
    maps = [heatmap.copy() for heatmap in MAPS]
    for heatmap in maps:
        heatmap.flags.writeable = False
    found = drawn(maps, overlay="png", sign="both", threshold=Threshold("quantile", 0.5), regions=RegionOptions())

    assert all(np.array_equal(each.heatmap, heatmap) for each, heatmap in zip(found, MAPS, strict=True))


def test_quantile_is_taken_from_the_shown_values_on_the_pixels_of_the_input():
    (each,) = drawn([MAPS[2]], overlay="png", sign="both", threshold=Threshold("quantile", 0.9), alpha=1.0)
    strengths = np.abs(MAPS[2])
    (fixed,) = drawn(
        [MAPS[2]],
        overlay="png",
        sign="both",
        alpha=1.0,
        threshold=Threshold("value", float(np.quantile(strengths, 0.9))),
    )
    painted = (decoded(each.overlay) != PIXELS).any(axis=-1).mean()

    assert each.overlay == fixed.overlay
    assert 0 < painted < 0.3


def test_outlines_of_regions_are_drawn_only_on_request():
    plain, listed, outlined = (
        drawn([MAPS[0]], overlay="png", heatmap_image="png", regions=regions)[0]
        for regions in (None, RegionOptions(), RegionOptions(draw=True))
    )

    assert plain.overlay == listed.overlay != outlined.overlay
    assert plain.heatmap_image == outlined.heatmap_image
    assert plain.regions == ()
    assert [region.box for region in listed.regions] == [region.box for region in outlined.regions]


def test_regions_need_no_picture():
    (each,) = drawn([MAPS[0]], regions=RegionOptions(masks=True))

    assert each.overlay is None
    assert each.regions
    assert {(region.mask.height, region.mask.width) for region in each.regions} == {PIXELS.shape[:2]}


def test_masks_and_outlines_count_with_the_pictures(monkeypatch):
    monkeypatch.setattr(memory, "MAX_PICTURES", 1000)
    drawn([MAPS[2]], regions=RegionOptions(most=1))
    with pytest.raises(InvalidArgument, match="set max_side, ask for fewer"):
        drawn([MAPS[2]], regions=RegionOptions(most=64, masks=True))


def striped(size):
    heatmap = np.zeros(size, np.float32)
    heatmap[::2], heatmap[:, 0] = 1, 1
    return heatmap


def dotted(size):
    heatmap = np.zeros(size, np.float32)
    heatmap[::2, ::2] = RNG.random((math.ceil(size[0] / 2), math.ceil(size[1] / 2))) + 0.1
    return heatmap


LOADS = [
    {"overlay": "png", "color_bar": True},
    {"overlay": "png", "heatmap_image": "png", "color_bar": True, "max_side": 700},
    {"overlay": "png", "threshold": Threshold("quantile", 0.5), "contour_lines": 16, "fade": True},
    {"overlay": "png", "profile": "captum", "threshold": Threshold("value", 0.0), "sign": "both"},
    {"regions": RegionOptions(Threshold("mass", 1.0), 64, masks=True)},
    {"regions": RegionOptions(Threshold("quantile", 0.0), 64)},
    {"overlay": "png", "heatmap_image": "png", "regions": RegionOptions(Threshold("mass", 1.0), 64, draw=True)},
]
WORST = {
    "noise": lambda size: RNG.normal(size=size).astype(np.float32),
    "stripes": striped,
    "dots": dotted,
    "grid": lambda _size: RNG.normal(size=(7, 7)).astype(np.float32),
}
SMALL = 2_000_000  # bytes of bands, of a compressor and of a default path's arrays, which do not grow with the picture


LARGE, TALL, LITTLE = (900, 1200), (1500, 500), (100, 80)


def loads():
    """Return options with maps and sizes of the photo.

    Noise is hard for pictures and regions, dots for regions; those and a photo smaller than the input are for the fast
    tests, if no other options there draw the same and more.
    """
    for options, kind, size in itertools.product(LOADS, WORST, (LARGE, TALL, LITTLE)):
        hard = [("noise", LARGE)] if options is not LOADS[0] else []
        hard += [("dots", TALL)] if options is LOADS[5] else []
        hard += [("noise", LITTLE)] if options is LOADS[-1] else []
        fast = (kind, size) in hard
        if fast or size == LARGE or kind == "noise" or (kind, size) == ("dots", TALL):
            yield pytest.param(options, kind, size, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("options", "kind", "size"), list(loads()))
def test_drawing_takes_no_more_memory_than_estimated(options, kind, size):
    photo = np.full((*size, 3), 120, np.uint8)
    maps = [WORST[kind]((224, 224)) for _ in range(2)]
    request, prepared, explanations = prepare(maps, photo, (224, 224), **options)
    (found, peak) = fork_server.call(fork_server.allocating, draw, request, prepared, explanations)
    found_bytes = sum(drawing._size_of(each) for each in found)
    rendering = replace(request.rendering, regions=None)

    assert peak <= drawing.memory_to_draw(request, prepared, Limits()) + SMALL
    assert sum(map(drawing._size_of, found)) <= drawing.estimate_reply(request, prepared, explanations)
    if not rendering.pictures:
        each = memory.region_bytes(request.rendering, size, (224, 224))
        assert found_bytes <= 2 * each


def test_colour_bars_count_as_drawn_pixels():
    job = SimpleNamespace(explanations=10)
    plain, wide = Rendering(overlay="jpeg"), Rendering(overlay="jpeg", color_bar=True)
    limits = replace(Limits(), drawn_pixels=10 * 400 * 300)
    picture = drawn([MAPS[0]], np.zeros((400, 300, 3), np.uint8), overlay="jpeg", color_bar=True)[0].overlay

    memory.check_drawn_pixels(job, plain, (400, 300), limits)
    assert memory.pixels_per_map(wide, (400, 300)) == picture.width * picture.height
    with pytest.raises(InvalidArgument):
        memory.check_drawn_pixels(job, wide, (400, 300), limits)
