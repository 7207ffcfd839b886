"""Options of pictures and regions reach a real server: its answers equal NumPy's and scikit-image's."""

import io
import re
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco
from scipy import ndimage
from skimage import measure
from torch import nn

import camserve
from camserve._values.resampling import onto_photo
from camserve_server import Explainer
from support import PHOTOS

PAGE = (Path(__file__).parents[2] / "docs/client.md").read_text(encoding="utf-8")
CLOSE = 1e-5  # relative to the largest value: float32 interpolation against float64


@pytest.fixture(scope="module")
def client(address):
    with camserve.Client(address, timeout=600) as client:
        yield client


@pytest.fixture(scope="module")
def photo():
    # With an even width no centre of a pixel is on the edge between two pixels of the model's input.
    return np.asarray(Image.open(PHOTOS["chelsea"]))[:, :450]


@pytest.fixture(scope="module")
def explain(client, photo):
    """Function that explains the cat with one method, which has positive and negative values."""

    def explain(**options):
        target = camserve.contrast("tabby", "Egyptian cat")
        given = {"methods": "gradcam", "targets": target, "overlay": "png", "intensity": True, **options}
        return client.explain(photo, **given).explanations[0]

    return explain


def enlarged(heatmap):
    """Interpolate a raw map bilinearly to the input of the model, in float64."""
    return cv2.resize(heatmap.astype(np.float64), (224, 224), interpolation=cv2.INTER_LINEAR)


SHOWN = {
    "positive": lambda heatmap: np.maximum(heatmap, 0),
    "negative": lambda heatmap: np.maximum(-heatmap, 0),
    "absolute": np.abs,
    "both": lambda heatmap: heatmap,
}


@pytest.mark.parametrize(
    ("profile", "sign"),
    [
        *(("paper", sign) for sign in SHOWN),
        ("signed", "both"),
        *(pytest.param("signed", sign, marks=pytest.mark.slow) for sign in SHOWN if sign != "both"),
    ],
)
def test_sign_selects_the_values_that_are_shown(explain, profile, sign):
    explanation = explain(profile=profile, sign=sign)
    values = SHOWN[sign](explanation.heatmap)

    assert explanation.heatmap.min() < 0 < explanation.heatmap.max()
    assert explanation.scale == np.abs(values).max()
    np.testing.assert_allclose(explanation.intensity, enlarged(values) / explanation.scale, atol=CLOSE, rtol=0)


def test_defaults_of_the_profiles_are_positive_values_and_both_signs(explain):
    for profile, sign in (("paper", "positive"), ("signed", "both")):
        assert explain(profile=profile).overlay == explain(profile=profile, sign=sign).overlay


def test_scale_of_a_request_is_the_largest_and_can_be_used_again(client, photo):
    options = {"methods": ["gradcam", "layercam"], "targets": ["tabby", "Egyptian cat"], "intensity": True}
    own, shared = (client.explain(photo, **options, scale=scale).explanations for scale in ("map", "request"))
    largest = max(explanation.scale for explanation in own)
    again = client.explain(photo, **options, scale=largest).explanations

    assert len({explanation.scale for explanation in own}) == len(own)
    assert {explanation.scale for explanation in (*shared, *again)} == {largest}
    for alone, together, later in zip(own, shared, again, strict=True):
        np.testing.assert_array_equal(together.intensity, later.intensity)
        expected = alone.intensity.astype(np.float64) * alone.scale / largest
        np.testing.assert_allclose(together.intensity, expected, atol=CLOSE, rtol=0)
        assert together.overlay == later.overlay


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def on_photo(values, explanation):
    """Return the value of the model's input at each pixel of the photo, and -1 where the model saw nothing."""
    seen, (height, width) = explanation.photo.seen, values.shape
    x = (np.arange(explanation.photo.width) + 0.5 - seen.left) / (seen.right - seen.left)
    y = (np.arange(explanation.photo.height) + 0.5 - seen.top) / (seen.bottom - seen.top)
    inside = ((y >= 0) & (y < 1))[:, None] & ((x >= 0) & (x < 1))
    rows, columns = ((values * count).astype(int) for values, count in ((y.clip(0, 1), height), (x.clip(0, 1), width)))
    found = values[np.ix_(rows.clip(max=height - 1), columns.clip(max=width - 1))]
    return np.where(inside, found, -1)


def test_nothing_is_painted_below_a_threshold(explain, photo):
    whole = explain()
    by_quantile = explain(threshold=0.75)
    least = np.quantile(whole.intensity, 0.75)
    by_value = explain(threshold_value=least * whole.scale)
    painted = (pixels(by_quantile.overlay) != photo).any(2)
    strength = onto_photo(whole.intensity, whole.photo)

    assert not painted[np.isnan(strength) | (strength < least - 0.02)].any()
    assert painted[strength > least + 0.02].all()
    assert np.mean((pixels(by_value.overlay) != photo).any(2) != painted) < 0.001
    np.testing.assert_array_equal(by_quantile.heatmap, whole.heatmap)


def test_faded_overlay_is_nearer_to_the_photo_the_weaker_the_map_is(explain, photo):
    whole, faded = (explain(fade=fade, alpha=1.0) for fade in (False, True))
    strength = np.nan_to_num(onto_photo(whole.intensity, whole.photo))
    mixed = photo + strength[..., None] * (pixels(whole.overlay).astype(float) - photo)

    np.testing.assert_allclose(pixels(faded.overlay), mixed, atol=3)  # levels of 255


def test_colour_bar_is_to_the_right_of_the_same_picture(explain, photo):
    plain, barred = (pixels(explain(color_bar=bar).overlay) for bar in (False, True))

    assert barred.shape[1] > plain.shape[1] == photo.shape[1]
    np.testing.assert_array_equal(barred[: plain.shape[0], : plain.shape[1]], plain)


def test_contour_lines_follow_their_intensities(explain):
    plain, lined = (explain(contour_lines=count) for count in (0, 1))
    changed = (pixels(plain.overlay) != pixels(lined.overlay)).any(2)
    strength = onto_photo(plain.intensity, plain.photo)[changed]

    assert 0.001 < changed.mean() < 0.1
    np.testing.assert_allclose(strength, 0.5, atol=0.1)  # one line, between 0 and 1


def regions_of(explanation, least):
    """Return the regions where the intensity reaches a value, by scikit-image: the strongest first.

    Each is a mask of the photo, its share of the sum, and its strongest value.
    """
    strength = np.abs(explanation.intensity.astype(np.float64))
    labels = np.zeros(strength.shape, int)
    for part in (explanation.intensity > 0, explanation.intensity < 0):
        found = measure.label(part & (strength >= least), connectivity=2)
        labels += np.where(found, found + labels.max(), 0)
    sums = {label: strength[labels == label].sum() for label in range(1, labels.max() + 1)}
    order = sorted(sums, key=lambda label: -sums[label])
    strongest = [strength[labels == label].max() * explanation.scale for label in order]
    masks = [on_photo(labels, explanation) == label for label in order]
    shares = [sums[label] / strength.sum() for label in order]
    return list(zip(masks, shares, strongest, strict=True))


@pytest.mark.parametrize(
    ("profile", "quantile"),
    [
        ("paper", 0.5),
        ("signed", 0.8),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in (("paper", 0.8), ("paper", 0.99), ("signed", 0.5), ("signed", 0.99))
        ),
    ],
)
def test_regions_equal_those_of_scikit_image(explain, profile, quantile):
    options = camserve.RegionOptions(quantile=quantile, max_regions=64, masks=True)
    explanation = explain(profile=profile, regions=options)
    sent = np.float64(np.float32(quantile))
    expected = regions_of(explanation, np.quantile(np.abs(explanation.intensity).astype(np.float64), sent))

    assert len(explanation.regions) == len(expected) > 0
    for region, (mask, share, strongest) in zip(explanation.regions, expected, strict=True):
        (properties,) = measure.regionprops(mask.astype(int))
        top, left, bottom, right = properties.bbox
        np.testing.assert_array_equal(region.mask_array, mask)
        assert region.box == camserve.Box(left, top, right, bottom)
        assert region.area == properties.area
        assert region.share == pytest.approx(share, rel=CLOSE)
        assert mask[int(region.peak[1]), int(region.peak[0])]
        assert abs(region.peak_value) == pytest.approx(strongest, rel=CLOSE)


def test_regions_with_half_of_the_mass_have_half_of_the_sum(explain):
    options = camserve.RegionOptions(mass=0.5, max_regions=64)
    explanation = explain(regions=options)
    strengths = np.sort(explanation.intensity.astype(np.float64).ravel())[::-1]
    count = int(np.searchsorted(np.cumsum(strengths), strengths.sum() / 2)) + 1
    expected = regions_of(explanation, strengths[count - 1])

    assert [region.area for region in explanation.regions] == [int(mask.sum()) for mask, *_ in expected]
    assert 0.5 <= sum(region.share for region in explanation.regions) < 0.51  # equal values count together


def test_other_forms_of_the_option_request_the_same_regions(explain):
    areas = [
        [region.area for region in explain(regions=form).regions]
        for form in (True, 0.8, camserve.RegionOptions(), camserve.RegionOptions(quantile=0.8, masks=True))
    ]

    assert areas[1:] == areas[:1] * 3
    assert explain(regions=camserve.RegionOptions(max_regions=1)).regions[0].area == areas[0][0]
    assert explain().regions == ()


def test_regions_are_drawn_only_where_their_outlines_are(explain):
    plain, drawn = (explain(regions=camserve.RegionOptions(draw=draw, masks=True)) for draw in (False, True))
    changed = (pixels(plain.overlay) != pixels(drawn.overlay)).any(2)
    masks = [np.pad(region.mask_array, 9).astype(np.uint8) for region in plain.regions]
    edges = sum(cv2.morphologyEx(mask, cv2.MORPH_GRADIENT, np.ones((9, 9), np.uint8)) for mask in masks)

    assert changed.any()
    assert not changed[edges[9:-9, 9:-9] == 0].any()


def test_contour_of_a_region_contains_the_centres_of_its_pixels(explain):
    for region in explain(regions=camserve.RegionOptions(quantile=0.5, masks=True)).regions:
        height, width = region.mask["size"]
        centres = np.stack(np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5), -1).reshape(-1, 2)
        inside = measure.points_in_poly(centres, region.contour).reshape(height, width)

        np.testing.assert_array_equal(inside, ndimage.binary_fill_holes(region.mask_array))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools and NumPy 2
def test_mask_of_a_region_is_read_by_pycocotools(explain):
    for region in explain(regions=camserve.RegionOptions(masks=True)).regions:
        box = region.box

        np.testing.assert_array_equal(coco.decode(region.mask), region.mask_array)
        assert coco.area(region.mask) == region.area
        assert coco.toBbox(region.mask).tolist() == [box.left, box.top, box.right - box.left, box.bottom - box.top]


def test_receipt_of_a_signed_explanation_with_regions_is_replayed(client, explain, photo):
    explanation = explain(profile="signed", regions=True, scale=2.5, threshold=0.5)

    assert client.replay(explanation.receipt, photo).same


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"profile": "grad-cam", "sign": "both"}, "rendering.sign"),
        ({"profile": "torchcam", "scale": "request"}, "rendering.shared_scale"),
        ({"class_map": True}, "class_map"),
    ],
)
def test_options_that_exclude_each_other_are_refused(client, explain, options, field):
    with pytest.raises(camserve.CamserveError) as refused:
        explain(**options)
    with pytest.raises(type(refused.value)):
        client.estimate_cost(**options)

    assert list(refused.value.fields) == [field]


def test_estimated_cost_is_the_number_of_rows_that_run(client, photo):
    options = {"methods": ["gradcam", ("rise", {"samples": 8})], "top_k": 2}
    totals = set()
    result = client.explain(photo, **options, on_progress=lambda _, total: totals.add(total))
    cost = client.estimate_cost(**options)

    assert totals == {cost.rows}
    assert cost.explanations == len(result.explanations)
    with pytest.raises(camserve.InvalidArgument, match=f"{cost.max_rows} is the limit"):
        client.estimate_cost(methods=[("rise", {"samples": 4096})], top_k=16)


def test_explainer_has_the_same_options(explain, photo):
    options = {"profile": "signed", "scale": "request", "regions": 0.9, "targets": camserve.contrast(281, 285)}
    with Explainer("timm:test_resnet?weights=none&size=64") as explainer:
        (explanation,) = explainer.explain(photo, **options).explanations
        assert explainer.estimate_cost(**options) == camserve.Cost(rows=1, explanations=1, max_rows=16384)
    served = explain(model="resnet", **options)

    assert explanation.scale == pytest.approx(served.scale, rel=CLOSE)
    assert [region.area for region in explanation.regions] == [region.area for region in served.regions]


def blocks(heading):
    """Return the Python code of a section of the client's page."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def test_class_map_of_the_page_lies_on_the_photo(tmp_path, monkeypatch):
    shutil.copy(PHOTOS["chelsea"], tmp_path / "cat.jpg")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, 2, 1))
    with Explainer(network, size=64, task="segment") as explainer:
        names = {"camserve": camserve, "client": explainer}
        for block in blocks("Class maps"):
            exec(block, names)  # noqa: S102 -- the page's own code

    np.testing.assert_array_equal(names["on_photo"], on_photo(names["classes"].astype(int), names["result"]))
    assert names["classes"].shape == (16, 16)
    assert len(np.unique(names["classes"])) > 1
