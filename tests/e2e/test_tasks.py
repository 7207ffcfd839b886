"""Segmentations, detectors and embeddings behind the whole server: what is asked for in a photo is shown in it."""

import io

import numpy as np
import pytest
from PIL import Image

import camserve
from coloured import painted
from support import PHOTOS, serving

NETS = (
    "colours=coloured:Colours?size=64&labels={labels}",
    "finder=coloured:Finder?size=64&labels={labels}",
    "pooled=coloured:Pooled?size=64&task=embed",
    "lraspp=torchvision:lraspp_mobilenet_v3_large?weights=none&size=64",
    "ssdlite=torchvision:ssdlite320_mobilenet_v3_large?weights=none&size=128",
    "resnet=torchvision:resnet18?weights=none&size=64",
)
PLACES = {"red": (20, 90, 48), "green": (80, 24, 40)}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    labels = tmp_path_factory.mktemp("labels") / "colours.txt"
    labels.write_text("background\nred\ngreen\n")
    with (
        serving(models=tuple(net.format(labels=labels) for net in NETS), threads=1) as served,
        camserve.Client(served.address, retries=0, timeout=60) as one,
    ):
        yield one


def png(image):
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def photo():
    """A photo of 160 x 144 pixels, so that the model neither sees its margins nor its scale."""
    return png(painted(160, **PLACES)[:144])


def share_inside(explanation, place):
    """The share of a map's hottest tenth, on the photo, that is inside a square."""
    top, left, side = place
    seen = np.nan_to_num(explanation.heatmap_on_image, nan=-np.inf)
    hot = seen >= np.quantile(seen[np.isfinite(seen)], 0.9)
    return hot[top : top + side, left : left + side].sum() / hot.sum()


@pytest.mark.parametrize("label", PLACES)
def test_a_class_in_a_photo_is_explained_where_it_is(client, photo, label):
    result = client.explain(photo, model="colours", targets=[camserve.segment(label)])
    (one,) = result.explanations

    assert [each.label for each in result.predictions] == ["red", "green", "background"]
    assert result.predictions[0].area > result.predictions[1].area > 0.05
    assert (one.target.label, one.target.box, one.verdict) == (label, None, "OK")
    assert one.target in result.predictions
    assert share_inside(one, PLACES[label]) >= 0.9


def test_the_part_of_a_photo_is_given_in_its_pixels(client, photo):
    """Where green is, nothing speaks for red; where red is, all does."""
    top, left, side = PLACES["red"]
    here = camserve.segment("red", (left, top, left + side, top + side))
    top, left, side = PLACES["green"]
    there = camserve.segment("red", camserve.Box(left, top, left + side, top + side))
    found = client.explain(photo, model="colours", targets=[here, there]).explanations

    assert found[0].score > 0.5 > -0.5 > found[1].score


@pytest.mark.parametrize("label", PLACES)
def test_an_object_in_a_photo_is_explained_where_it_is(client, photo, label):
    result = client.explain(photo, model="finder", targets=[camserve.detection(label)])
    (one,) = result.explanations
    box, (top, left, side) = one.target.box, PLACES[label]
    off = np.array([box.left, box.top, box.right, box.bottom]) - [left, top, left + side, top + side]

    assert [each.label for each in result.predictions] == ["red", "green"]
    assert one.target in result.predictions
    assert np.abs(off).max() <= 8  # a cell looks 4 of the input's pixels far, each 2 of the photo's
    assert share_inside(one, PLACES[label]) >= 0.9


def test_the_objects_that_a_detector_is_most_certain_of_are_explained_by_default(client, photo):
    result = client.explain(photo, model="finder", top_k=2)

    assert tuple(each.target for each in result.explanations) == result.predictions
    with pytest.raises(camserve.FailedPrecondition, match="finder finds only 2 objects in this image"):
        client.explain(photo, model="finder", top_k=3)


QUESTIONS = {
    "colours": [camserve.segment("red"), camserve.segment("green", (80, 20, 120, 60))],
    "finder": [camserve.detection("red"), camserve.detection("green", (30, 70, 80, 120))],
    "lraspp": None,
    "ssdlite": None,
    "resnet": [
        camserve.probability(3),
        camserve.finer(5),
        camserve.finer(5, 6, weight=0.5),
        7,
        camserve.contrast(1, 2),
    ],
}


@pytest.mark.parametrize("model", QUESTIONS)
def test_what_was_explained_can_be_asked_for_again(client, photo, model):
    image = photo if model in ("colours", "finder") else PHOTOS["chelsea"]
    first = client.explain(image, model=model, targets=QUESTIONS[model], overlay=None).explanations
    again = client.explain(image, model=model, targets=[one.resolved for one in first], overlay=None).explanations

    for one, other in zip(first, again, strict=True):
        assert one.verdict in ("OK", "ALL_NEGATIVE")
        assert other.resolved == one.resolved or model in ("colours", "finder")  # boxes are carried there and back
        assert other.score == pytest.approx(one.score, rel=1e-5)
        np.testing.assert_allclose(other.heatmap, one.heatmap, atol=1e-5 * np.abs(one.heatmap).max())


def test_methods_layers_and_views_go_with_every_target(client, photo):
    methods = ["gradcam", "layercam", "saliency", ("smoothgrad", {"samples": 2})]
    for model, target in (("colours", camserve.segment("red")), ("finder", camserve.detection("red"))):
        found = client.explain(photo, model=model, targets=target, methods=methods, overlay=None).explanations
        assert [one.method for one in found] == ["gradcam", "layercam", "saliency", "smoothgrad"]
        assert min(share_inside(one, PLACES["red"]) for one in found[:3]) >= 0.9


def test_a_photo_is_like_another_one_where_they_are_alike(client, photo):
    (one,) = client.explain(
        photo, model="pooled", targets=camserve.similarity(painted(64, red=(0, 0, 64))), layers="smooth"
    ).explanations

    assert (one.target.label, one.resolved) == ("similarity", None)
    assert 0.5 < one.score < 1
    assert share_inside(one, PLACES["red"]) >= 0.9


def test_a_classifier_compares_photos_by_the_features_before_its_last_layer(client):
    like, unlike = (
        client.explain(PHOTOS["chelsea"], model="resnet", targets=camserve.similarity(PHOTOS[name]))
        for name in ("chelsea", "rocket")
    )

    assert like.explanations[0].score == pytest.approx(1, abs=1e-5)
    assert unlike.explanations[0].score < 0.9999
    assert len(like.predictions) == 5


@pytest.mark.parametrize(
    ("model", "target", "error", "words"),
    [
        ("finder", "red", camserve.FailedPrecondition, r"boxes: explain an object with detection\(\.\.\.\)"),
        ("colours", 1, camserve.FailedPrecondition, r"a class for every pixel: explain one with segment\(\.\.\.\)"),
        ("pooled", 1, camserve.FailedPrecondition, r"explain the similarity of two images with similarity\(\.\.\.\)"),
        (
            "pooled",
            None,
            camserve.FailedPrecondition,
            r"explain the similarity of two images with similarity\(\.\.\.\)",
        ),
        ("resnet", camserve.detection(1), camserve.FailedPrecondition, "classes: explain one by its label or index"),
        (
            "colours",
            camserve.segment("red", (0, 0, 5, 140)),
            camserve.InvalidArgument,
            "the box is outside of what the model sees: from 16 to 142 across and from 8 to 134 down",
        ),
        (
            "finder",
            camserve.detection("red", (0, 137, 9, 144)),
            camserve.InvalidArgument,
            "outside of what the model sees",
        ),
        ("finder", camserve.detection("background"), camserve.FailedPrecondition, 'but "red", "green"'),
        ("resnet", camserve.similarity(b"no photo"), camserve.InvalidArgument, "not a JPEG, PNG, WebP or BMP file"),
    ],
)
def test_what_does_not_fit_the_model_or_the_photo_is_refused_in_words(client, photo, model, target, error, words):
    with pytest.raises(error, match=words) as caught:
        client.explain(photo, model=model, targets=target)
    assert next(iter(caught.value.fields)).startswith("targets")


def test_a_server_says_what_its_models_answer_with(client):
    assert [model.task for model in client.models()] == ["segment", "detect", "embed", "segment", "detect", "classify"]
