"""Values of more than 8 bits, and in floating point: pixels have the same scores, whatever they are sent as."""

import io

import cv2
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

import camserve
import camserve_server
from as_written import PREPROCESS, SIZE, plain
from camserve_server import Explainer
from camserve_server.core.limits import Limits
from camserve_server.imaging import headers
from camserve_server.models import Source
from models.test_as_written import OPTIONS

RANGE = (0, 4095)  # of 12 bits
GREY = np.random.default_rng(10).integers(0, 4096, (SIZE, SIZE), np.uint16)
COLOURS = np.random.default_rng(11).integers(0, 4096, (SIZE, SIZE, 3), np.uint16)
ALPHA = np.full((SIZE, SIZE, 1), 65535, np.uint16)


def png(pixels):
    """Return a PNG of 16 bits; OpenCV takes colours as BGR."""
    ordered = pixels if pixels.ndim == 2 else np.concatenate([pixels[:, :, 2::-1], pixels[:, :, 3:]], 2)
    return cv2.imencode(".png", ordered)[1].tobytes()


def tiff(pixels):
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, photometric="minisblack" if pixels.ndim == 2 else "rgb")
    return file.getvalue()


def score(client, image, **options):
    return client.explain(image, targets=1, overlay=None, **options).explanations[0].score


@pytest.fixture(scope="module")
def explainer():
    with Explainer(plain(), **OPTIONS) as explainer:
        yield explainer


def expected(network, values):
    """Return the score of class 1 for values from 0 to 1 [h,w,3]."""
    image = torch.from_numpy(((values - 0.5) / 0.25).astype(np.float32)).permute(2, 0, 1)[None]
    with torch.no_grad():
        return network(image)[0, 1].item()


@pytest.mark.parametrize("pixels", [GREY, COLOURS], ids=["grey", "colours"])
def test_pixels_have_the_same_score_as_a_png_a_tiff_and_an_array(explainer, pixels):
    files = [pixels, png(pixels), tiff(pixels)]
    if pixels is COLOURS:
        files += [png(np.concatenate([pixels, ALPHA], 2))]
    else:
        files += [Image.fromarray(pixels), Image.fromarray(pixels.astype(np.int32))]
    found = {score(explainer, file, value_range=RANGE) for file in files}
    values = np.broadcast_to(np.atleast_3d(pixels), (SIZE, SIZE, 3)) / 4095

    assert len(found) == 1
    assert found.pop() == pytest.approx(expected(plain(), values), rel=1e-4)


def test_photo_of_16_bits_keeps_its_depth_in_all_calls_of_a_server():
    file = png(COLOURS)
    with camserve_server.running({"net": Source(plain(), PREPROCESS)}) as address, camserve.Client(address) as client:
        results = [client.explain(each, value_range=RANGE, overlay="png", targets=1) for each in (file, COLOURS)]
        features = [client.features(each, value_range=RANGE, rank="activation") for each in (file, COLOURS)]
        readings = [client.inspect(each, value_range=RANGE) for each in (file, COLOURS)]
    first, second = (each.explanations[0] for each in results)

    assert np.array_equal(first.heatmap, second.heatmap)
    assert np.array_equal(np.asarray(first.overlay_picture.open()), np.asarray(second.overlay_picture.open()))
    assert np.array_equal(features[0].maps, features[1].maps)
    assert readings[0].layers == readings[1].layers


def test_photo_of_16_bits_without_a_range_has_the_upper_8(explainer):
    assert score(explainer, png(COLOURS)) == score(explainer, (COLOURS >> 8).astype(np.uint8))


def test_values_that_become_float32_count():
    eight, pixels = cv2.imencode(".png", (COLOURS >> 4).astype(np.uint8))[1].tobytes(), COLOURS[:, :, 0].size
    assert headers.memory_to_decode(eight, Limits()) == 6 * pixels
    assert headers.memory_to_decode(eight, Limits(), as_float=True) == (3 + 12) * pixels
    assert headers.memory_to_decode(png(COLOURS), Limits()) == 6 * pixels
    assert headers.memory_to_decode(png(COLOURS), Limits(), as_float=True) == (6 + 12) * pixels


EIGHT_BITS = (COLOURS >> 4).astype(np.uint8)


@pytest.mark.parametrize(
    "image",
    [EIGHT_BITS.astype(np.float32), Image.fromarray(EIGHT_BITS).convert("F")],
    ids=["array", "PIL"],
)
def test_floats_in_another_unit_are_refused_or_named(explainer, image):
    with pytest.raises(
        camserve.InvalidArgument,
        match=r"has values from .* to 2.*, and the model takes 0 to 1: name .* such as 0 and 255",
    ) as caught:
        score(explainer, image)
    assert list(caught.value.fields) == ["value_range"]
    grey = Image.fromarray(EIGHT_BITS).convert("L") if isinstance(image, Image.Image) else EIGHT_BITS
    assert score(explainer, image, value_range=(0, 255)) == pytest.approx(score(explainer, grey), abs=0.05)


def test_floats_from_0_to_1_may_overshoot(explainer):
    values = EIGHT_BITS.astype(np.float32) / 200 - 0.1
    assert score(explainer, values) == pytest.approx(expected(plain(), values), rel=1e-4)


@pytest.mark.parametrize(("mean", "std"), [(120.0, 60.0), (0.0, 1.0)], ids=["in their unit", "not normalised"])
def test_model_may_take_floats_in_another_unit(mean, std):
    values = EIGHT_BITS.astype(np.float32)
    with Explainer(plain(), size=SIZE, crop="whole", mean=(mean,) * 3, std=(std,) * 3) as explainer:
        found = score(explainer, values)
    assert found == pytest.approx(expected(plain(), (values - mean) / std * 0.25 + 0.5), rel=1e-4)


def test_whole_numbers_of_a_pil_image_have_8_bits_if_they_fit(explainer):
    grey = Image.fromarray(EIGHT_BITS).convert("L")
    assert score(explainer, grey.convert("I")) == score(explainer, grey)
    with pytest.raises(camserve.InvalidArgument, match="whole numbers from 0 to 65,535, not 0 to 70,000"):
        score(explainer, Image.fromarray(np.array([[0, 70000]], np.int32)))
