"""Targets that are masks, on a whole server: files, errors, receipts and JSON."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

import camserve
from coloured import painted
from http_calls import EXPLAIN, post
from support import PHOTOS

PLACES = {"red": (20, 90, 48), "green": (80, 24, 40)}
HEIGHT, WIDTH = 144, 160


@pytest.fixture(scope="module")
def client(tasks_served):
    with camserve.Client(tasks_served.address, retries=0, timeout=60) as client:
        yield client


def file_of(image, **options):
    out = io.BytesIO()
    image.save(out, "PNG", **options)
    return out.getvalue()


@pytest.fixture(scope="module")
def photo():
    """Photo of 160 x 144 pixels, which the model sees cropped and scaled."""
    return file_of(Image.fromarray(painted(160, **PLACES)[:HEIGHT]))


def rectangle(left, top, right, bottom):
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[top:bottom, left:right] = True
    return mask


GREEN = rectangle(24, 80, 64, 120)


def asked(client, photo, target, **options):
    options = {"model": "colours", "methods": ["gradcam", "saliency"], "overlay": None, **options}
    return client.explain(photo, targets=target, **options).explanations


@pytest.mark.parametrize("model", ["colours", "proportional"])
@pytest.mark.parametrize("edges", [(24, 80, 64, 120), (3, 0, 17, 144), (60, 60, 61, 61), (130, 100, 160, 144)])
def test_mask_that_is_a_rectangle_gives_exactly_the_answer_of_the_box(client, photo, edges, model):
    of_box = asked(client, photo, camserve.segment("red", edges), model=model)
    of_mask = asked(client, photo, camserve.mask("red", rectangle(*edges)), model=model)

    for ours, theirs in zip(of_mask, of_box, strict=True):
        assert (ours.score, ours.target, ours.verdict) == (theirs.score, theirs.target, theirs.verdict)
        np.testing.assert_array_equal(ours.heatmap, theirs.heatmap)


def test_masks_of_every_type_give_the_same_answer(client, photo, tmp_path):
    grey = GREEN.astype(np.uint8) * 7
    path = tmp_path / "mask.png"
    path.write_bytes(file_of(Image.fromarray(grey)))
    same = [grey, Image.fromarray(GREEN), Image.fromarray(grey), path, str(path), path.read_bytes()]
    first, *others = (asked(client, photo, camserve.mask("red", mask))[0] for mask in [GREEN, *same])

    for other in others:
        assert other.score == first.score
        np.testing.assert_array_equal(other.heatmap, first.heatmap)


def test_masks_orientation_is_applied_as_the_photos_is(client, photo):
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    turned = file_of(Image.fromarray(GREEN[::-1, ::-1]), exif=exif.tobytes())
    (expected, _), (found, _) = (asked(client, photo, camserve.mask("red", mask)) for mask in (GREEN, turned))

    assert found.score == expected.score


def test_receipt_with_a_mask_is_replayed_byte_for_byte(client, photo):
    explanation = asked(client, photo, [camserve.segment("red"), camserve.mask("red", GREEN)])[1]
    receipt = camserve.Receipt.from_json(explanation.receipt.to_json())
    replay = client.replay(receipt, photo)

    assert explanation.resolved is None
    assert replay.same, replay.differences
    assert replay.explanation.receipt.to_json() == receipt.to_json()


def test_mask_is_a_base64_field_in_json(tasks_served, client, photo):
    segment = {"className": {"label": "red"}, "mask": base64.b64encode(file_of(Image.fromarray(GREEN))).decode()}
    body = {"image": base64.b64encode(photo).decode(), "model": "colours", "targets": [{"segment": segment}]}
    (explanation,) = post(tasks_served.http_port, EXPLAIN, body).json["explanations"]

    assert explanation["score"] == pytest.approx(asked(client, photo, camserve.mask("red", GREEN))[0].score)
    assert explanation["resolvedTarget"] == {"segment": {"className": {"classIndex": 1}, "mask": ""}}


JPEG = io.BytesIO()
Image.fromarray(GREEN).convert("L").save(JPEG, "JPEG")
DEEP = file_of(Image.fromarray(GREEN.astype(np.uint16)))
COLOURED = file_of(Image.fromarray(np.zeros((HEIGHT, WIDTH, 3), np.uint8)))
PALETTE = file_of(Image.fromarray(GREEN.astype(np.uint8)).convert("P"))
PNG = file_of(Image.fromarray(GREEN))
BOMB = file_of(Image.new("1", (16_000, 16_000)))


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (np.zeros((HEIGHT, WIDTH), bool), "every pixel of the mask is 0"),
        (np.ones((WIDTH, HEIGHT), bool), "the mask has 144 x 160 pixels, and the photo 160 x 144"),
        (
            rectangle(0, 0, 15, 144),
            "the mask is outside of what the model sees: from 16 to 142 across and from 8 to 134 down",
        ),
        (BOMB, "16,000 x 16,000 pixels: .* accepted"),
        (JPEG.getvalue(), "a mask must be a PNG file, and this one is a JPEG"),
        (b"GIF89a", "not a JPEG, PNG, WebP, BMP, TIFF or NPY file: it starts like a GIF"),
        (COLOURED, "a mask must be a grey PNG of at most 8 bits per pixel: it has RGB pixels of 8 bits"),
        (PALETTE, "it has palette pixels of 8 bits"),
        (DEEP, "it has grey pixels of 16 bits"),
        (PNG[:-30], "the PNG file is truncated or broken"),
    ],
)
def test_mask_that_cannot_be_used_is_refused_by_name(client, photo, mask, words):
    with pytest.raises(camserve.InvalidArgument, match=words) as caught:
        asked(client, photo, camserve.mask("red", mask))
    assert list(caught.value.fields) == ["targets[0].segment.mask"]


def test_photo_and_masks_share_the_limit_of_pixels(client):
    grey = np.zeros((3000, 3000), np.uint8)
    photo = file_of(Image.fromarray(grey))
    with pytest.raises(camserve.InvalidArgument, match="have more than 16,777,216 pixels between them"):
        client.explain(photo, model="colours", targets=camserve.mask("red", grey + 1))


def test_mask_of_a_classifier_is_refused(client):
    with pytest.raises(camserve.FailedPrecondition, match="resnet returns classes"):
        client.explain(PHOTOS["chelsea"], model="resnet", targets=camserve.mask(1, GREEN))


def test_target_of_an_inspection_has_no_mask(client, photo):
    with pytest.raises(camserve.InvalidArgument, match="without another image, a region, a mask or a box"):
        client.inspect(photo, model="colours", target=camserve.mask("red", GREEN))
