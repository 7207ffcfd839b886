"""Results can be inspected, saved and shown."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import camserve

if TYPE_CHECKING:
    import pathlib


def encoded(kind: str) -> camserve.Picture:
    out = io.BytesIO()
    Image.new("RGB", (6, 4), "red").save(out, kind)
    return camserve.Picture(kind, out.getvalue(), 6, 4)


@pytest.fixture
def full() -> camserve.Explanation:
    return camserve.Explanation(
        method="gradcam",
        layer="features",
        target=camserve.Prediction("tabby", 0.5, 281, 3.0),
        contrast=None,
        score=3.0,
        verdict=camserve.Verdict.OK,
        verdict_message="",
        parameters={},
        photo=camserve.Photo(6, 4, camserve.Box(0, 0, 6, 4)),
        heatmap=np.arange(4, dtype=np.float32).reshape(2, 2),
        overlay_picture=encoded("jpeg"),
        colored_picture=encoded("png"),
    )


@pytest.fixture
def bare(full: camserve.Explanation) -> camserve.Explanation:
    return replace(full, heatmap=None, overlay_picture=None, colored_picture=None)


def test_pictures_are_files_and_images(full: Any) -> None:
    assert full.overlay.startswith(b"\xff\xd8")
    assert full.image.size == (6, 4)
    assert full.heatmap_image.startswith(b"\x89PNG")
    assert full.heatmap_on_image.shape == (4, 6)


@pytest.mark.parametrize(
    ("part", "option"),
    [
        ("overlay", "overlay='jpeg'"),
        ("image", "overlay='jpeg'"),
        ("heatmap_image", "heatmap_image='png'"),
        ("heatmap_on_image", "heatmap=True"),
    ],
)
def test_error_for_a_missing_part_names_the_option(bare: Any, part: str, option: str) -> None:
    with pytest.raises(camserve.FailedPrecondition) as caught:
        getattr(bare, part)

    assert f"client.explain(..., {option})".replace("'", '"') in str(caught.value)


@pytest.mark.parametrize("name", ["a.jpg", "a.jpeg", "a.JPG"])
def test_overlay_is_saved_unchanged(full: Any, tmp_path: pathlib.Path, name: str) -> None:
    path = full.save(str(tmp_path / name))

    assert path == tmp_path / name
    assert path.read_bytes() == full.overlay


@pytest.mark.parametrize(("name", "kind"), [("a.png", "PNG"), ("a.webp", "WEBP"), ("a.b.png", "PNG")])
def test_other_suffix_encodes_the_picture_again(full: Any, tmp_path: pathlib.Path, name: str, kind: str) -> None:
    with Image.open(full.save(tmp_path / name)) as saved:
        assert saved.format == kind
        assert saved.size == (6, 4)


def test_png_with_alpha_can_be_saved_as_jpeg(full: Any, tmp_path: pathlib.Path) -> None:
    out = io.BytesIO()
    Image.new("RGBA", (6, 4)).save(out, "png")
    clear = replace(full, overlay_picture=camserve.Picture("png", out.getvalue(), 6, 4))

    with Image.open(clear.save(tmp_path / "a.jpg")) as saved:
        assert saved.format == "JPEG"


def test_npy_saves_the_raw_map(full: Any, tmp_path: pathlib.Path) -> None:
    saved = np.load(full.save(tmp_path / "a.npy"))

    np.testing.assert_array_equal(saved, full.heatmap)
    assert saved.dtype == np.float32


@pytest.mark.parametrize("name", ["a.gif", "a", ".jpg"])
def test_another_suffix_is_refused(full: Any, tmp_path: pathlib.Path, name: str) -> None:
    with pytest.raises(camserve.InvalidArgument, match=r"must be one of \.jpg, .*\.npy"):
        full.save(tmp_path / name)

    assert list(tmp_path.iterdir()) == []


def test_missing_part_cannot_be_saved(bare: Any, tmp_path: pathlib.Path) -> None:
    for name in ("a.jpg", "a.npy"):
        with pytest.raises(camserve.FailedPrecondition):
            bare.save(tmp_path / name)


def test_notebook_shows_the_overlay(full: Any, bare: Any) -> None:
    assert full._repr_png_().startswith(b"\x89PNG")
    assert 'src="data:image/jpeg;base64,' in full._repr_html_()
    assert "tabby · gradcam" in full._repr_html_()
    assert bare._repr_png_() is None
    assert "no overlay" in bare._repr_html_()


def test_verdict_that_is_not_ok_is_shown(full: Any) -> None:
    blank = replace(full, verdict=camserve.Verdict.ALL_NEGATIVE, verdict_message="nothing for it")

    assert "features · ALL_NEGATIVE: nothing for it" in blank._repr_html_()
    assert "ALL_NEGATIVE" not in full._repr_html_()


def test_notebook_shows_a_whole_result(full: Any) -> None:
    html = result_of(full)._repr_html_()

    assert "<td>tabby</td><td>50.0%</td>" in html
    assert html.count("<figure") == 2


def test_labels_are_escaped_in_html(full: Any) -> None:
    evil = camserve.Prediction("<script>alert(1)</script>", 0.5, 1, 1.0)

    html = result_of(replace(full, target=evil))._repr_html_()

    assert "<script>" not in html


def test_result_survives_pickling(full: Any) -> None:
    again = pickle.loads(pickle.dumps(result_of(full)))  # noqa: S301 -- our own

    assert again.size == (6, 4)
    assert again.explanations[0].overlay == full.overlay


def test_repr_has_no_bytes(full: Any) -> None:
    assert len(repr(full)) < 500


def test_results_are_frozen(full: Any) -> None:
    with pytest.raises(AttributeError):
        full.method = "another"


def result_of(explanation: camserve.Explanation) -> camserve.Result:
    return camserve.Result(
        predictions=(explanation.target,),
        explanations=(explanation, explanation),
        model="tiny",
        request_id="r",
        photo=explanation.photo,
        timing=camserve.Timing(0, 0, 0, 0, 1),
    )


async def test_class_without_a_label_is_named_by_its_index(client: Any, server: Any) -> None:
    def unlabelled(request: Any, request_id: str = "id") -> Any:
        response = answer(request, request_id)
        response.predictions[0].label = response.explanations[0].target.label = ""
        return response

    answer, server.answer = server.answer, unlabelled
    result = await client.explain(b"\x07")

    assert (result.predictions[0].label, result.explanations[0].target.label) == ("class 7", "class 7")
    assert result.explanations[0].title == "class 7"
