"""The pyramid of a detector on a whole server: every client gets the same map, and receipts are replayed."""

import base64
import json

import grpc
import numpy as np
import pytest
from click.testing import CliRunner
from google.protobuf import json_format

import camserve
from camserve import cli
from camserve.v1 import explain_pb2, models_pb2
from camserve_server import Explainer
from camserve_server.api.oip.v2 import inference_pb2
from http_calls import EXPLAIN, LIST, post
from support import PHOTOS

PHOTO = PHOTOS["coffee"]
SCALES = ("backbone.features.0", "backbone.features.1", "backbone.extra.0")


@pytest.fixture(scope="module")
def client(tasks_served):
    with camserve.Client(tasks_served.address, retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def explanation(client):
    """The explanation of a request that names no layer."""
    (explanation,) = client.explain(PHOTO, overlay=None).explanations
    return explanation


def test_pyramid_is_the_default_of_a_detector(client, explanation):
    (named,) = client.explain(PHOTO, layers="pyramid", overlay=None).explanations

    assert (explanation.layer, explanation.fusion, explanation.verdict) == ("pyramid", "sum", "OK")
    assert explanation.heatmap.shape == (8, 8)
    np.testing.assert_array_equal(named.heatmap, explanation.heatmap)


def test_models_name_their_scales(client, tasks_served):
    listed = json_format.Parse(post(tasks_served.http_port, LIST, {}).body, models_pb2.ListModelsResponse())
    for models in (client.models(), listed.models):
        scales = {model.name: tuple(model.pyramid) for model in models}
        assert (scales["detector"], scales["resnet"]) == (SCALES, ())


def test_pyramid_is_the_sum_of_the_maps_of_its_layers(client, explanation):
    apart = client.explain(PHOTO, layers=SCALES, overlay=None).explanations
    together = client.explain(PHOTO, layers=SCALES, fusion="sum", overlay=None).explanations[0]

    assert [each.layer for each in apart] == [*SCALES]
    assert together.layer == " + ".join(SCALES)
    np.testing.assert_array_equal(together.heatmap, explanation.heatmap)
    total = sum(each.heatmap.sum(dtype=np.float64) for each in apart)
    assert explanation.heatmap.sum(dtype=np.float64) == pytest.approx(total, rel=1e-4)


def test_http_returns_the_same_map(tasks_served, explanation):
    message = {
        "image": base64.b64encode(PHOTO.read_bytes()).decode(),
        "layers": ["pyramid"],
        "rendering": {"heatmap": True},
    }
    response = json_format.Parse(post(tasks_served.http_port, EXPLAIN, message).body, explain_pb2.ExplainResponse())

    (found,) = response.explanations
    assert (found.layer, found.fusion) == ("pyramid", explain_pb2.FUSION_SUM)
    assert found.heatmap.data == explanation.heatmap.astype("<f4").tobytes()


def test_open_inference_returns_the_same_map(tasks_served, explanation):
    request = inference_pb2.ModelInferRequest(model_name="detector")
    request.inputs.add(name="image", datatype="BYTES", shape=[1]).contents.bytes_contents.append(PHOTO.read_bytes())
    request.parameters["layer"].string_param = "pyramid"
    request.outputs.add(name="heatmap")
    with grpc.insecure_channel(tasks_served.address) as channel:
        method = "/inference.GRPCInferenceService/ModelInfer"
        decode = inference_pb2.ModelInferResponse.FromString
        response = channel.unary_unary(method, type(request).SerializeToString, decode)(request, timeout=60)

    assert response.outputs[0].shape == [1, 8, 8]
    assert response.raw_output_contents[0] == explanation.heatmap.astype("<f4").tobytes()


def test_command_returns_the_same_map(tasks_served, explanation, tmp_path):
    command = ["explain", PHOTO, "-o", tmp_path, "--layer", "pyramid", "--heatmaps", "--server", tasks_served.address]
    done = CliRunner().invoke(cli.main, [str(word) for word in command])

    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*.npy")
    np.testing.assert_array_equal(np.load(path), explanation.heatmap)


@pytest.mark.slow
def test_explainer_returns_the_same_map(detector, explanation):
    with Explainer(detector, device="cpu", settings={"threads": 1}) as explainer:
        (found,) = explainer.explain(PHOTO, layers="pyramid", overlay=None).explanations

    assert (found.layer, found.fusion) == ("pyramid", "sum")
    np.testing.assert_array_equal(found.heatmap, explanation.heatmap)


@pytest.mark.parametrize("options", [{}, {"layers": "pyramid", "fusion": "max"}, {"layers": SCALES, "fusion": "sum"}])
def test_receipt_of_a_pyramid_is_replayed(client, options):
    (explanation,) = client.explain(PHOTO, methods="layercam", overlay=None, **options).explanations
    receipt = camserve.Receipt.from_json(explanation.receipt.to_json())
    replay = client.replay(receipt, PHOTO)

    assert replay.same, replay.differences
    assert replay.gap == 0
    assert (receipt.layers, receipt.fusion) == (
        tuple(explanation.layer.split(" + ")),
        options.get("fusion", "sum"),
    )
    assert json.loads(receipt.to_json())["layers"] == [*receipt.layers]


def test_maps_of_a_pyramid_are_evaluated(client):
    evaluation = client.evaluate(PHOTO, layers="pyramid", metrics=["sparseness", ("deletion", {"steps": 2})])

    assert {reading.explanation.layer for reading in evaluation.readings} == {"pyramid"}
    assert all(np.isfinite(reading.value) for reading in evaluation.readings)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"model": "resnet", "layers": "pyramid"},
            camserve.FailedPrecondition,
            'resnet has no pyramid: it is no detector; name one of its layers; the default is "layer4"',
        ),
        ({"layers": ["pyramid", SCALES[0]]}, camserve.InvalidArgument, '"pyramid" is all scales in one map'),
        ({"layers": "pyramids"}, camserve.NotFound, 'unknown layer "pyramids"'),
    ],
)
def test_pyramid_that_cannot_be_explained_is_refused(client, options, error, words):
    with pytest.raises(error, match=words):
        client.explain(PHOTO, **options)
