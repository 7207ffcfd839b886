"""Evaluation of explanations by a server: refusals, costs and effects on other requests."""

import math
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

import camserve
from camserve.v1 import evaluate_pb2
from camserve_server.api import codec
from camserve_server.core.limits import Limits
from camserve_server.metrics import METRICS
from rounding import check_same
from support import PHOTOS, serving, wait_until

SMALL = "small=timm:test_resnet?weights=none&size=64"
ROWS = 100


@pytest.fixture(scope="module")
def served():
    with serving(models=(SMALL,), threads=1, max_request_rows=ROWS) as running:
        yield running


@pytest.fixture
def client(served):
    with camserve.Client(served.address, timeout=60) as connected:
        yield connected


def test_several_maps_are_evaluated_together(client):
    result = client.evaluate(
        PHOTOS["chelsea"],
        methods=["gradcam", "saliency"],
        targets=[3, camserve.contrast(3, 4)],
        metrics=[("deletion", {"steps": 3}), ("road", {"steps": 1}), ("randomisation", {"stages": 2}), "sparseness"],
    )
    explained = client.explain(PHOTOS["chelsea"], methods=["gradcam", "saliency"], targets=[3, camserve.contrast(3, 4)])

    assert [each.method for each in result.explained.explanations] == ["gradcam"] * 2 + ["saliency"] * 2
    assert [each.metric for each in result.rows[0]] == ["deletion", "road", "randomisation", "sparseness"]
    assert [len(each.curves) for each in result.rows[0]] == [1, 2, 1, 0]
    assert result.rows[0][0].parameters == {"steps": 3.0}
    assert all(math.isfinite(each.value) for each in result.readings)
    assert result.explained.request_id
    for evaluated, alone in zip(result.explained.explanations, explained.explanations, strict=True):
        check_same(evaluated.heatmap, alone.heatmap, SMALL, evaluated.method)
    assert result.plot().width > 700


def test_deletion_and_insertion_are_the_default(client):
    result = client.evaluate(PHOTOS["chelsea"])

    assert [(each.metric, each.higher_is_better) for each in result.readings] == [
        ("deletion", False),
        ("insertion", True),
    ]


def test_box_is_in_the_photos_pixels(client):
    first = client.evaluate(PHOTOS["chelsea"], metrics="pointing_game", box=(0, 0, 1, 1)).readings[0]
    across, down = (float(word) for word in first.message.split("the peak is at ")[1].split(", ")[:2] if word)
    around = (across - 3, down - 3, across + 3, down + 3)
    hit = client.evaluate(PHOTOS["chelsea"], metrics=[("pointing_game", {"tolerance": 0}), "energy_in_box"], box=around)

    assert hit.readings[0].value == 1.0
    assert 0 < hit.readings[1].value < 0.2


@pytest.mark.parametrize(
    ("options", "error", "field", "words"),
    [
        ({"metrics": "delation"}, camserve.NotFound, "metrics[0].name", 'did you mean "deletion"'),
        ({"metrics": [("road", {"step": 3})]}, camserve.InvalidArgument, "metrics[0].parameters", "it takes steps"),
        (
            {"metrics": [("road", {"steps": 0.5})]},
            camserve.InvalidArgument,
            'metrics[0].parameters["steps"]',
            "1 to 99",
        ),
        ({"metrics": ["road", "pointing_game"]}, camserve.InvalidArgument, "metrics[1].name", "set box"),
        ({"metrics": "sparseness", "box": (5, 5, 5, 9)}, camserve.InvalidArgument, "box", "the box is empty"),
        ({"metrics": ["sparseness"] * 17}, camserve.InvalidArgument, "metrics", "17 metrics, and 16 is the limit"),
        ({"methods": "grdcam"}, camserve.NotFound, "explain.methods[0].name", "unknown method"),
        ({"colormap": "jett"}, camserve.InvalidArgument, "explain.rendering.colormap", "unknown colormap"),
        (
            {"metrics": [("deletion", {"steps": 120})]},
            camserve.InvalidArgument,
            "metrics",
            "the request costs 121 rows, 120 of them for metrics, and 100 is the limit",
        ),
    ],
)
def test_invalid_evaluation_is_refused_before_a_row_is_computed(served, client, options, error, field, words):
    before = served.pipeline.batcher.stats.rows
    with pytest.raises(error, match=re.escape(words)) as caught:
        client.evaluate(PHOTOS["chelsea"], **options)

    assert list(caught.value.fields) == [field]
    assert served.pipeline.batcher.stats.rows == before
    assert served.pipeline.batcher.admitted == 0


def test_every_metric_is_listed_with_its_paper_and_parameters(client):
    listed = {each.name: each for each in client.metrics()}

    assert list(listed) == list(METRICS)
    for name, metric in METRICS.items():
        described = listed[name]
        assert (described.paper, described.higher_is_better, described.needs_box) == (
            metric.paper,
            metric.higher_is_better,
            metric.boxed,
        )
        assert [each.name for each in described.parameters] == [each.name for each in metric.parameters]
        assert described.summary
        assert described.formula
    assert (listed["deletion"].rows, listed["road"].rows, listed["sparseness"].rows) == (20, 18, 0)
    assert [name for name, described in listed.items() if described.repeats] == ["max_sensitivity", "randomisation"]


def test_randomised_weights_do_not_affect_other_requests(served, client):
    """Some requests use random weights while others use the model's own."""
    alone = client.explain(PHOTOS["chelsea"], targets=[3]).explanations[0].heatmap
    with ThreadPoolExecutor(4) as pool:
        judging = [
            pool.submit(client.evaluate, PHOTOS["chelsea"], metrics=[("randomisation", {"seed": seed})])
            for seed in range(2)
        ]
        asked = [pool.submit(client.explain, PHOTOS["chelsea"], targets=[3]) for _ in range(6)]
        maps = [each.result().explanations[0].heatmap for each in asked]
        readings = [each.result().readings[0] for each in judging]

    for heatmap in maps:
        check_same(heatmap, alone, SMALL)
    assert readings[0].curves[0].y != readings[1].curves[0].y
    assert len(client.models()) == len(served.pipeline.models) == 1


def test_cancelled_evaluation_leaves_no_rows(served, client):
    batcher = served.pipeline.batcher
    rows = batcher.stats.rows
    served.do(batcher.pause)
    with pytest.raises(camserve.DeadlineExceeded):
        client.evaluate(PHOTOS["chelsea"], metrics=["deletion"], timeout=0.3)  # real timeout: no batch runs before it
    wait_until(lambda: batcher.admitted == 0)
    served.do(batcher.resume)
    client.explain(PHOTOS["chelsea"])

    assert batcher.stats.rows == rows + 1


def test_evaluation_service_has_its_own_health(client):
    assert client.health("camserve.v1.EvaluateService") is camserve.Health.SERVING


def test_cost_of_an_evaluation_is_known_in_advance(served):
    request = evaluate_pb2.EvaluateRequest(metrics=[evaluate_pb2.Metric(name=name) for name in ("road", "increase")])
    asked = codec.read_evaluation(request, served.pipeline.models, Limits())

    assert asked.assessment.rows == 1 + 18 + 1
