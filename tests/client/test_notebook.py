"""A notebook shows the maps of a result over its photo, without a server and without executing texts of the server."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import camserve
from camserve._codec.images import image_bytes
from camserve._values.photo_source import SIDE, PhotoSource

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

MAP = np.linspace(-1, 1, 49, dtype=np.float32).reshape(7, 7)
EVIL = "</script><img src=x onerror=alert(1)><!-- \u2028"


def file_of(image: Image.Image, kind: str = "jpeg", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@pytest.fixture
def photo(tmp_path: pathlib.Path) -> pathlib.Path:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    path = tmp_path / "photo.jpg"
    path.write_bytes(file_of(Image.fromarray(pixels).resize((800, 600), Image.Resampling.BICUBIC)))
    return path


@pytest.fixture
def result(photo: pathlib.Path) -> Callable[..., camserve.Result]:
    """Function that returns a result with maps of the photo."""

    def make(image: object = photo, count: int = 4, **changes: Any) -> camserve.Result:
        digest = hashlib.sha256(image_bytes(image)).hexdigest()
        geometry = camserve.Photo(800, 600, camserve.Box(100, 0, 700, 600))
        target = camserve.Prediction("tabby", 0.5, 281, 3.0)
        texts = dict.fromkeys(("model", "source", "weights", "digest", "precision", "device", "input_sha256"), "")
        receipt = camserve.Receipt(
            **texts, image_sha256=digest, versions={}, method="gradcam", parameters={}, augmentation_smoothing=False,
            eigen_smoothing=False, layers=("features",), fusion=None, target={"class_index": 1}, score=3.0,
            verdict=camserve.Verdict.OK, heatmap=MAP,
        )  # fmt: skip
        overlay = camserve.Picture("jpeg", photo.read_bytes(), 800, 600)
        explanation = camserve.Explanation(
            method="gradcam", layer="features", target=target, contrast=None, score=3.0, verdict=camserve.Verdict.OK,
            verdict_message="", parameters={}, photo=geometry, heatmap=MAP, overlay_picture=overlay,
            colored_picture=None, resolved=281, receipt_or_none=receipt,
        )  # fmt: skip
        explanation = replace(explanation, **changes)
        return camserve.Result(
            (target,), (explanation,) * count, "tiny", "r", geometry, camserve.Timing(0, 0, 0, 0, 1),
            source=PhotoSource(image, image_bytes),
        )  # fmt: skip

    return make


def data_of(html: str) -> Any:
    """Return the data that the page's script receives."""
    found = re.search(r"\.show\(document\.getElementById\(\"[\w-]+\"\), (\{.*\})\);</script>", html)
    assert found, "there is no comparison"
    return json.loads(found[1])


def test_comparison_has_the_photo_and_the_raw_maps(result: Any) -> None:
    data = data_of(result()._repr_html_())

    assert data["photo"] == {"width": 800, "height": 600, "seen": {"left": 100, "top": 0, "right": 700, "bottom": 600}}
    with Image.open(io.BytesIO(base64.b64decode(data["image"].partition(",")[2]))) as image:
        assert (image.format, image.size) == ("JPEG", (SIDE, SIDE * 600 // 800))
    assert len(data["maps"]) == 4
    stored = data["maps"][0]["heatmap"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(stored["data"]), "<f4").reshape(7, 7), MAP)


def test_comparison_of_four_maps_is_small(result: Any) -> None:
    assert len(result()._repr_html_()) <= 150_000


def test_comparison_refers_to_nothing_outside(result: Any) -> None:
    html = result()._repr_html_()

    assert "://" not in html
    assert not re.search(r"\bimport\b|\bfetch\(", html)


def test_overlays_are_shown_where_no_script_runs(result: Any) -> None:
    html = re.sub(r"<(script|style)>.*?</\1>", "", result()._repr_html_(), flags=re.DOTALL)
    pictures = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', html)

    assert len(pictures) == 4
    for picture in pictures:
        with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
            assert max(image.size) <= 256
    assert '<th scope="row">tabby</th><td>50.0%</td>' in html


def test_texts_of_the_server_are_not_executed(result: Any) -> None:
    target = camserve.Prediction(EVIL, 0.5, 1, 1.0)
    html = result(target=target, layer=EVIL, verdict=camserve.Verdict.FLAT, verdict_message=EVIL)._repr_html_()

    assert html.count("</script>") == 1
    assert "<img src=x" not in html
    assert data_of(html)["maps"][0]["layer"] == EVIL


@pytest.mark.parametrize(
    "changes",
    [
        {"contrast": camserve.Prediction("lynx", 0.1, 2, 1.0)},
        {"resolved": camserve.finer(281)},
        {"resolved": None, "target": camserve.Prediction("similarity", 0.0, 0, 0.5)},
        {"method": "integrated_gradients"},
    ],
)
def test_evidence_for_and_against_is_the_default_where_both_matter(result: Any, changes: Any) -> None:
    assert data_of(result(**changes)._repr_html_())["maps"][0]["signed"] is True
    assert data_of(result()._repr_html_())["maps"][0]["signed"] is False


def test_result_without_maps_shows_its_overlays(result: Any) -> None:
    html = result(heatmap=None)._repr_html_()

    assert "<script>" not in html
    assert html.count("data:image/jpeg") == 4


@pytest.mark.parametrize("change", ["deleted", "replaced", "broken"])
def test_photo_that_is_another_one_by_now_is_not_shown(result: Any, photo: Any, change: str) -> None:
    found = result()
    if change == "deleted":
        photo.unlink()
    else:
        photo.write_bytes(file_of(Image.new("RGB", (8, 8))) if change == "replaced" else b"\xff\xd8\xff")

    assert "<script>" not in found._repr_html_()


def test_photo_may_be_bytes_or_an_image_of_the_caller(result: Any, photo: Any) -> None:
    array = np.array(Image.open(photo))
    for image in (photo.read_bytes(), array, Image.fromarray(array)):
        assert data_of(result(image)._repr_html_())["image"].startswith("data:image/jpeg;base64,")


def test_result_does_not_keep_an_array_alive(result: Any, photo: Any) -> None:
    found = result(np.array(Image.open(photo)))  # nothing else refers to it

    assert "<script>" not in found._repr_html_()


def test_pickle_does_not_contain_the_photo(result: Any, photo: Any) -> None:
    found = result(photo.read_bytes(), overlay_picture=None)
    stored = pickle.dumps(found)

    assert len(stored) < 10_000
    assert "<script>" not in pickle.loads(stored)._repr_html_()  # noqa: S301 -- our own


def test_photo_is_shown_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    data = file_of(Image.new("RGB", (40, 20)), exif=exif)
    thumbnail = PhotoSource(data, image_bytes).thumbnail(hashlib.sha256(data).hexdigest())

    assert thumbnail is not None
    with Image.open(io.BytesIO(thumbnail)) as image:
        assert image.size == (20, 40)


async def test_client_gives_a_result_the_reference_to_its_photo(client: Any, photo: Any) -> None:
    data = photo.read_bytes()
    found = await client.explain(photo)

    assert found.source.thumbnail(hashlib.sha256(data).hexdigest()) is not None
