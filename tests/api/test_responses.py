"""Responses of a running server. Its tests share one server, because none of them changes its state."""

import asyncio
import base64
import hashlib
import importlib.metadata
import io
import json
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2, error_details_pb2
from PIL import Image

from api.running_server import PHOTO, item, refusal_of, request, smoothgrad
from camserve.v1 import explain_pb2, models_pb2
from camserve_server.api.servicers.explain import progress_reporter
from camserve_server.core.errors import ConfigError
from camserve_server.core.limits import Limits
from camserve_server.imaging import fitting, images, scales
from camserve_server.imaging.values import Rendering

RAW = explain_pb2.Rendering(heatmap=True)
BUF = Path(sys.executable).with_name("buf")


async def buf_curl(port, *arguments, body=None):
    """Call the server with `buf curl`, which learns its services by reflection."""
    command = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *arguments[:-1]]
    process = await asyncio.create_subprocess_exec(
        *command,
        f"http://127.0.0.1:{port}{arguments[-1]}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(None if body is None else json.dumps(body).encode())
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("sent", ["call-7", "x" * 128, "with spaces: and = signs"])
async def test_request_id_of_a_caller_is_in_the_response_and_in_the_trailer(sent, shared_server):
    call = shared_server.explain(request(), metadata=[("x-request-id", sent)])

    assert (await call).request_id == sent
    assert dict(await call.trailing_metadata())["x-request-id"] == sent


@pytest.mark.parametrize("sent", [None, "", "x" * 129])
async def test_missing_or_too_long_request_id_is_replaced(sent, shared_server):
    call = shared_server.explain(request(), metadata=[] if sent is None else [("x-request-id", sent)])
    received = (await call).request_id

    assert len(received) == 32
    assert int(received, 16)
    assert dict(await call.trailing_metadata())["x-request-id"] == received


async def test_response_has_predictions_heatmaps_overlays_and_timing(shared_server):
    methods = [explain_pb2.Method(name="gradcam"), explain_pb2.Method(name="saliency")]
    rendering = explain_pb2.Rendering(heatmap=True, overlay=explain_pb2.IMAGE_FORMAT_PNG)
    reply = await shared_server.explain(request(methods=methods, top_k=2, rendering=rendering))
    sizes = [(each.method, each.layer, each.heatmap.height, each.heatmap.width) for each in reply.explanations]

    assert reply.model == "tiny"
    assert len(reply.predictions) == 5
    assert {prediction.label for prediction in reply.predictions} == {"ant", "bee", "cat", "dog", "elk"}
    assert sum(prediction.probability for prediction in reply.predictions) == pytest.approx(1, abs=1e-6)
    assert sizes == [("gradcam", "features", 8, 8)] * 2 + [("saliency", "", 32, 32)] * 2
    assert all(Image.open(io.BytesIO(each.overlay.data)).size == (40, 30) for each in reply.explanations)
    assert reply.timing.batch_rows >= 2
    assert min(reply.timing.decode_ms, reply.timing.compute_ms, reply.timing.render_ms) > 0


async def test_receipt_identifies_model_weights_image_and_versions(shared_server):
    receipt = (await shared_server.explain(request())).receipt
    info = shared_server.pipeline.models["tiny"]
    image, _ = fitting.fit(images.decode(PHOTO, Limits()), info.preprocess)

    assert (receipt.digest, receipt.weights, receipt.source) == (info.digest, info.weights, info.source)
    assert (receipt.precision, receipt.device) == ("float32", "cpu")
    assert receipt.image_sha256 == hashlib.sha256(PHOTO).hexdigest()
    assert receipt.input_sha256 == hashlib.sha256(image.tobytes()).hexdigest()
    assert receipt.versions["torch"] == importlib.metadata.version("torch")
    assert set(receipt.versions) >= {"camserve", "torch", "torchvision", "timm", "numpy"}


async def test_resolved_targets_can_be_requested_and_give_the_same_heatmaps(shared_server):
    first = (await shared_server.explain(request(top_k=3, rendering=RAW))).explanations
    targets = [each.resolved_target for each in first]
    second = (await shared_server.explain(request(targets=targets, rendering=RAW))).explanations

    assert [each.heatmap.data for each in first] == [each.heatmap.data for each in second]


@pytest.mark.parametrize("profile", [2, 3, 4])
async def test_intensities_of_a_profile_have_the_size_of_the_model_input(profile, shared_server):
    rendering = explain_pb2.Rendering(heatmap=True, intensity=True, profile=profile)
    (explanation,) = (await shared_server.explain(request(rendering=rendering))).explanations
    raw = np.frombuffer(explanation.heatmap.data, "<f4").reshape(explanation.heatmap.height, explanation.heatmap.width)
    names = {2: "grad-cam", 3: "torchcam", 4: "captum"}

    assert (explanation.intensity.height, explanation.intensity.width) == (32, 32)
    np.testing.assert_array_equal(
        np.frombuffer(explanation.intensity.data, "<f4").reshape(32, 32),
        scales.scale_map(raw, Rendering(profile=names[profile]), (32, 32)).heat,
    )


async def test_stream_responses_have_the_ids_of_their_requests_and_the_stream_ends_ok(shared_server):
    call = shared_server.stream(item(f"r{k}", top_k=k) for k in (1, 2, 3, 4, 5))
    responses = {reply.request_id: reply.response async for reply in call}

    assert {name: len(response.explanations) for name, response in responses.items()} == {
        f"r{k}": k for k in (1, 2, 3, 4, 5)
    }
    assert all(response.request_id == name for name, response in responses.items())
    assert await call.code() == grpc.StatusCode.OK


@pytest.mark.parametrize("name", ["", "x" * 129, "a\n2026-01-01 00:00:00,000 INFO forged"])
async def test_stream_request_without_a_printable_id_is_refused(name, shared_server):
    (reply,) = [reply async for reply in shared_server.stream([item(name)])]

    assert reply.request_id == name
    assert reply.error.code == code_pb2.Code.INVALID_ARGUMENT
    assert reply.error.fields[0].field == "request_id"


async def test_stream_item_without_a_request_fails_alone(shared_server):
    empty = explain_pb2.ExplainStreamRequest(request_id="empty")
    replies = {reply.request_id: reply async for reply in shared_server.stream([empty, item("good")])}

    assert replies["empty"].error.fields[0].field == "image"
    assert replies["good"].HasField("response")


async def test_long_method_reports_progress_on_a_stream_before_its_response(shared_server):
    call = shared_server.stream([item("r", methods=[smoothgrad(250)], progress=True)])
    replies = [reply async for reply in call]
    progress = [reply.progress for reply in replies[:-1]]

    assert replies[-1].WhichOneof("outcome") == "response"
    assert {reply.request_id for reply in replies} == {"r"}
    assert len(progress) >= 3
    assert [report.rows_done for report in progress] == sorted({report.rows_done for report in progress})
    assert {report.rows_total for report in progress} == {251}
    assert 1 <= progress[0].rows_done < progress[-1].rows_done == 251


async def test_last_progress_is_sent_although_the_request_ends_at_once():
    sent = []

    async def write(reply):
        sent.append((reply.progress.rows_done, reply.progress.rows_total))

    async with progress_reporter(item("r", progress=True), write) as progress:
        progress(1, 2)
        progress(2, 2)

    assert sent == [(2, 2)]


async def test_progress_is_reported_only_on_request(shared_server):
    call = shared_server.stream([item("r", methods=[smoothgrad(130)])])

    assert [reply.WhichOneof("outcome") async for reply in call] == ["response"]


async def test_call_without_a_message_is_refused(shared_server):
    error = await refusal_of(shared_server.channel.stream_unary("/camserve.v1.ExplainService/Explain")(iter(())))

    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    assert error.message == "the call ended without a message"


async def test_health_of_an_unknown_service_is_not_found(shared_server):
    error = await refusal_of(shared_server.status("camserve.v1.Nothing"))

    assert error.code == grpc.StatusCode.NOT_FOUND


async def test_descriptions_of_models_layers_and_methods(shared_server):
    described = await shared_server.models.GetModel(models_pb2.GetModelRequest(name="tiny"))
    default = await shared_server.models.GetModel(models_pb2.GetModelRequest())
    layers = (await shared_server.models.ListLayers(models_pb2.ListLayersRequest(model="tiny"))).layers
    methods = (await shared_server.models.ListMethods(models_pb2.ListMethodsRequest())).methods

    assert described == default
    assert (described.model.classes, described.model.default_layer, described.model.weights) == (
        5,
        "features",
        "default",
    )
    assert list(described.labels) == ["ant", "bee", "cat", "dog", "elk"]
    assert [layer.name for layer in layers] == ["stem", "act", "features", "pool", "flat", "head"]
    assert [layer.name for layer in layers if layer.explainable] == ["stem", "act", "features", "pool"]
    assert {method.name for method in methods} >= {"gradcam", "hirescam", "layercam", "saliency", "smoothgrad"}
    assert [method.kind for method in methods] == sorted(method.kind for method in methods)  # CAMs first


@pytest.mark.parametrize("rpc", ["GetModel", "ListLayers"])
async def test_unknown_model_is_reported_with_the_field_of_the_request(rpc, shared_server):
    field = {"GetModel": "name", "ListLayers": "model"}[rpc]
    kind = getattr(models_pb2, f"{rpc}Request")
    error = await refusal_of(getattr(shared_server.models, rpc)(kind(**{field: "tinny"})))

    assert error.code == grpc.StatusCode.NOT_FOUND
    assert error.detail(error_details_pb2.BadRequest).field_violations[0].field == field
    assert 'did you mean "tiny"' in error.message


async def test_reflection_allows_calls_without_the_proto_files(shared_server):
    code, out, err = await buf_curl(shared_server.port, "--list-methods", "")

    assert (code, err) == (0, "")
    assert set(out.split()) >= {
        *(
            f"camserve.v1.ExplainService/{name}"
            for name in ("Explain", "ExplainStream", "InspectLayers", "ExtractFeatures")
        ),
        *(f"camserve.v1.ModelService/{name}" for name in ("ListModels", "GetModel", "ListLayers", "ListMethods")),
        "grpc.health.v1.Health/Check",
    }

    image = base64.b64encode(PHOTO).decode()
    code, out, err = await buf_curl(
        shared_server.port, "-d", "@-", "/camserve.v1.ExplainService/Explain", body={"image": image, "topK": 2}
    )
    reply = json.loads(out)

    assert (code, err) == (0, "")
    assert reply["model"] == "tiny"
    assert [each["method"] for each in reply["explanations"]] == ["gradcam", "gradcam"]


async def test_second_server_on_the_same_port_is_refused(shared_server, serving):
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{shared_server.port}: is the port taken"):
        async with serving(address=f"127.0.0.1:{shared_server.port}"):
            pass
