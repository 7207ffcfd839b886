"""Everything a caller may ask of a classifier, asked of detectors and segmentation models of transformers."""

import functools
from contextlib import ExitStack

import numpy as np
import pytest

import camserve
import needs
from support import PHOTOS, serving

pytest.importorskip("transformers", reason=needs.TRANSFORMERS)

from docs.generate import small_transformers

pytestmark = pytest.mark.slow

DETECTORS = ("detr", "rt_detr", "yolos")
FAMILIES = ("rt_detr", "segformer", "mask2former")
"""One of each kind of output, for metrics and inspections: they ask no family for more than its scores."""


@pytest.fixture(scope="module")
def client_of(tmp_path_factory):
    """Return a function that returns a client of a server with one model, which is loaded once."""
    root = tmp_path_factory.mktemp("families")
    with ExitStack() as opened:

        @functools.cache
        def client_of(family):
            name, task = ("mask2former", "?task=detect") if family == "instances" else (family, "")
            spec = f"{family}=hf:{small_transformers.save(name, root / family)}{task}"
            running = opened.enter_context(serving(models=(spec,), device="cpu"))
            return opened.enter_context(camserve.Client(running.address))

        yield client_of


@pytest.fixture
def client(client_of, family):
    return client_of(family)


METHODS = (
    "gradcam",
    camserve.Method("layercam", augmentation_smoothing=True),
    camserve.Method("hirescam", eigen_smoothing=True),
    camserve.Method("smoothgrad", {"samples": 2, "seed": 11}),
    camserve.Method("integrated_gradients", {"steps": 2}),
    camserve.Method("occlusion", {"window": 96, "stride": 96}),
)


@pytest.mark.parametrize(
    ("family", "methods"),
    [
        ("segformer", METHODS[1::2]),
        ("rt_detr", METHODS),
        ("segformer", METHODS[::2]),
        ("detr", METHODS[1::2]),
        ("yolos", METHODS),
        ("mask2former", METHODS[::2]),
        ("instances", METHODS[1::2]),
    ],
)
def test_methods_of_every_kind_explain_it_and_their_receipts_replay(family, methods, client):
    result = client.explain(PHOTOS["chelsea"], model=family, methods=methods, overlay="png", heatmap=True)

    assert len(result.explanations) == len(methods)
    for explanation in result.explanations:
        assert np.isfinite(explanation.heatmap).all()
        assert explanation.image.size == (451, 300)
        replay = client.replay(explanation.receipt, PHOTOS["chelsea"])
        assert replay.same, (explanation.method, replay.differences)


@pytest.mark.parametrize("family", FAMILIES)
def test_faithfulness_of_its_explanation_is_measured(family, client):
    evaluation = client.evaluate(
        PHOTOS["chelsea"], metrics=[("deletion", {"steps": 4}), ("insertion", {"steps": 4})], model=family
    )

    assert [reading.metric for reading in evaluation.readings] == ["deletion", "insertion"]
    assert all(np.isfinite(reading.value) for reading in evaluation.readings)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_layers_and_features_are_inspected(family, client):
    inspection = client.inspect(PHOTOS["coffee"], model=family)
    assert any(layer.gradient and layer.gradient.norm > 0 for layer in inspection.layers)

    features = client.features(PHOTOS["coffee"], model=family)
    assert len(features.channels) == 16
    assert all(np.isfinite(channel.gradient_weight) for channel in features.channels)


@pytest.mark.parametrize("family", ["yolos", "segformer"])
def test_its_components_and_concepts_are_drawn(family, client):
    components = client.features(PHOTOS["coffee"], model=family, rank="pca", fit=[PHOTOS["chelsea"]])
    concepts = client.features(PHOTOS["coffee"], model=family, rank="factors", top=2)

    assert components.image.size == (600, 400)
    assert np.isfinite(components.maps).all()
    assert sum(channel.share for channel in concepts.channels) == pytest.approx(1)
    assert not any(channel.nearest for channel in concepts.channels)


@pytest.mark.parametrize("family", ["instances", *DETECTORS])
def test_object_is_named_by_its_class_and_box(family, client):
    predictions = client.explain(PHOTOS["chelsea"], model=family, max_predictions=100).predictions
    chosen = predictions[len(predictions) // 2]
    by_box = camserve.detection(chosen.label, chosen.box)
    (explanation,) = client.explain(PHOTOS["chelsea"], model=family, targets=[by_box]).explanations

    assert explanation.target.label == chosen.label
    overlapping = [p for p in predictions if p.label == chosen.label and p.box == explanation.target.box]
    assert explanation.score == pytest.approx(overlapping[0].score, rel=1e-3)


@pytest.mark.parametrize(("family", "words"), [("rt_detr", "detection"), ("segformer", "segment")])
def test_target_of_another_task_names_the_right_one(family, words, client):
    with pytest.raises(camserve.CamserveError, match=words):
        client.explain(PHOTOS["chelsea"], model=family, targets=["thing 1"])
