"""Segmentation, detection and embedding models on a whole server: maps show the requested object."""

import io

import numpy as np
import pytest
from PIL import Image

import camserve
from coloured import painted
from support import PHOTOS

PLACES = {"red": (20, 90, 48), "green": (80, 24, 40)}


@pytest.fixture(scope="module")
def client(tasks_served):
    with camserve.Client(tasks_served.address, retries=0, timeout=60) as client:
        yield client


def png(image):
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def photo():
    """Photo of 160 x 144 pixels, which the model sees cropped and scaled."""
    return png(painted(160, **PLACES)[:144])


def share_inside(explanation, place):
    """Return the share of the hottest tenth of a map that is inside a square of the photo."""
    top, left, side = place
    heat = np.nan_to_num(explanation.heatmap_on_image, nan=-np.inf)
    hot = heat >= np.quantile(heat[np.isfinite(heat)], 0.9)
    return hot[top : top + side, left : left + side].sum() / hot.sum()


@pytest.mark.parametrize("label", PLACES)
def test_map_of_a_class_is_hot_where_the_class_is(client, photo, label):
    result = client.explain(photo, model="colours", targets=[camserve.segment(label)])
    (explanation,) = result.explanations

    assert [prediction.label for prediction in result.predictions] == ["red", "green", "background"]
    assert result.predictions[0].area > result.predictions[1].area > 0.05
    assert (explanation.target.label, explanation.target.box, explanation.verdict) == (label, None, "OK")
    assert explanation.target in result.predictions
    assert share_inside(explanation, PLACES[label]) >= 0.9


def test_region_is_given_in_pixels_of_the_photo(client, photo):
    """The score of red is negative in the green square and positive in the red one."""
    top, left, side = PLACES["red"]
    red = camserve.segment("red", (left, top, left + side, top + side))
    top, left, side = PLACES["green"]
    green = camserve.segment("red", camserve.Box(left, top, left + side, top + side))
    in_red, in_green = client.explain(photo, model="colours", targets=[red, green]).explanations

    assert in_red.score > 0.5 > -0.5 > in_green.score


@pytest.mark.parametrize("label", PLACES)
def test_map_of_an_object_is_hot_where_the_object_is(client, photo, label):
    result = client.explain(photo, model="finder", targets=[camserve.detection(label)])
    (explanation,) = result.explanations
    box, (top, left, side) = explanation.target.box, PLACES[label]
    off = np.array([box.left, box.top, box.right, box.bottom]) - [left, top, left + side, top + side]

    assert [prediction.label for prediction in result.predictions] == ["red", "green"]
    assert explanation.target in result.predictions
    assert np.abs(off).max() <= 8  # a cell sees 4 pixels of the input, which are 8 of the photo
    assert share_inside(explanation, PLACES[label]) >= 0.9


def test_most_certain_objects_are_explained_by_default(client, photo):
    result = client.explain(photo, model="finder", top_k=2)

    assert tuple(explanation.target for explanation in result.explanations) == result.predictions
    with pytest.raises(camserve.FailedPrecondition, match="finder finds only 2 objects in this image"):
        client.explain(photo, model="finder", top_k=3)


TARGETS = {
    "colours": [camserve.segment("red"), camserve.segment("green", (80, 20, 120, 60))],
    "finder": [camserve.detection("red"), camserve.detection("green", (30, 70, 80, 120))],
    "lraspp": None,
    "detector": None,
    "resnet": [
        camserve.probability(3),
        camserve.finer(5),
        camserve.finer(5, 6, weight=0.5),
        7,
        camserve.contrast(1, 2),
    ],
}


@pytest.mark.parametrize("model", TARGETS)
def test_resolved_target_gives_the_same_explanation(client, photo, model):
    image = photo if model in ("colours", "finder") else PHOTOS["chelsea"]
    first = client.explain(image, model=model, targets=TARGETS[model], overlay=None).explanations
    again = client.explain(
        image, model=model, targets=[explanation.resolved for explanation in first], overlay=None
    ).explanations

    for expected, other in zip(first, again, strict=True):
        assert expected.verdict in ("OK", "ALL_NEGATIVE")
        assert other.resolved == expected.resolved or model in ("colours", "finder")  # boxes are converted twice
        assert other.score == pytest.approx(expected.score, rel=1e-5)
        np.testing.assert_allclose(other.heatmap, expected.heatmap, atol=1e-5 * np.abs(expected.heatmap).max())


def test_every_method_explains_segments_and_detections(client, photo):
    methods = ["gradcam", "layercam", "saliency", ("smoothgrad", {"samples": 2})]
    for model, target in (("colours", camserve.segment("red")), ("finder", camserve.detection("red"))):
        explanations = client.explain(photo, model=model, targets=target, methods=methods, overlay=None).explanations
        assert [explanation.method for explanation in explanations] == ["gradcam", "layercam", "saliency", "smoothgrad"]
        assert min(share_inside(explanation, PLACES["red"]) for explanation in explanations[:3]) >= 0.9


def test_similarity_map_is_hot_where_photos_are_alike(client, photo):
    (explanation,) = client.explain(
        photo, model="pooled", targets=camserve.similarity(painted(64, red=(0, 0, 64))), layers="smooth"
    ).explanations

    assert (explanation.target.label, explanation.resolved) == ("similarity", None)
    assert 0.5 < explanation.score < 1
    assert share_inside(explanation, PLACES["red"]) >= 0.9


def test_classifier_compares_photos_by_its_last_features(client):
    like, unlike = (
        client.explain(PHOTOS["chelsea"], model="resnet", targets=camserve.similarity(PHOTOS[name]))
        for name in ("chelsea", "rocket")
    )

    assert like.explanations[0].score == pytest.approx(1, abs=1e-5)
    assert unlike.explanations[0].score < 0.9999
    assert len(like.predictions) == 5


@pytest.mark.parametrize("model", ["colours", "lraspp"])
def test_class_map_has_the_largest_logit_of_each_cell(client, photo, model):
    options = camserve.ExplainOptions(model=model, methods="gradcam", top_k=1)
    plain, result = (client.explain(photo, **options, class_map=asked) for asked in (False, True))
    classes, shares = np.unique(result.class_map, return_counts=True)
    areas = {prediction.class_index: prediction.area for prediction in result.predictions}

    assert plain.class_map is None
    assert result.class_map.dtype == np.uint16
    # The areas of the predictions are counted on the same cells, by other code.
    assert areas == pytest.approx(dict(zip(classes.tolist(), shares / result.class_map.size, strict=True)))
    assert (plain.explanations[0].heatmap == result.explanations[0].heatmap).all()


def test_class_map_shows_the_colours_where_they_are(client, photo):
    result = client.explain(photo, model="colours", class_map=True)
    box, size = result.photo.seen, len(result.class_map)
    for label, (top, left, side) in PLACES.items():
        index = next(each.class_index for each in result.predictions if each.label == label)
        row = int((top + side / 2 - box.top) / (box.bottom - box.top) * size)
        column = int((left + side / 2 - box.left) / (box.right - box.left) * size)
        assert result.class_map[row, column] == index


def test_class_map_of_a_classifier_is_refused(client, photo):
    with pytest.raises(camserve.FailedPrecondition, match="predicts no class of each pixel") as caught:
        client.explain(photo, model="resnet", class_map=True)
    assert list(caught.value.fields) == ["class_map"]


@pytest.mark.parametrize(
    ("model", "target", "error", "message"),
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
        (
            "resnet",
            camserve.similarity(b"no photo"),
            camserve.InvalidArgument,
            "not a JPEG, PNG, WebP, BMP, TIFF or NPY file",
        ),
    ],
)
def test_target_that_does_not_fit_model_or_photo_is_refused(client, photo, model, target, error, message):
    with pytest.raises(error, match=message) as caught:
        client.explain(photo, model=model, targets=target)
    assert next(iter(caught.value.fields)).startswith("targets")


def test_models_are_listed_with_their_task(client):
    assert {model.name: model.task for model in client.models()} == {
        "detector": "detect",
        "colours": "segment",
        "finder": "detect",
        "pooled": "embed",
        "proportional": "segment",
        "lraspp": "segment",
        "resnet": "classify",
    }


@pytest.mark.parametrize("rank", ["pca", "factors"])
def test_components_of_an_embedding_have_no_target_and_no_score(client, photo, rank):
    plain = client.features(photo, model="pooled", rank=rank)

    assert (plain.target, plain.contrast, plain.score, plain.predictions) == (None, None, 0, ())
    assert not any(channel.gradient_weight or channel.nearest for channel in plain.channels)
    assert len(plain.maps) == 3
    with pytest.raises(camserve.FailedPrecondition, match="no score to differentiate"):
        client.features(photo, model="pooled", rank="gradient")
