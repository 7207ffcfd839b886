"""Calls over HTTP: replies and errors equal those of gRPC, and tokens, deadlines and cancellation are the same."""

import base64
import contextlib
import gzip
import http.client
import json

import grpc
import pytest
from google.protobuf import json_format
from google.rpc import status_pb2

from api.running_server import PHOTO
from api.running_server import request as explain_request
from camserve._codec.json_messages import to_json
from camserve._codec.protocol import IMAGE_FORMATS, RPCS, code_name, message_class
from camserve.v1 import evaluate_pb2, explain_pb2, models_pb2
from camserve.web import connect
from camserve_server.api import auth, tokens
from http_calls import EXPLAIN, JSON, LIST, post, request
from support import PHOTOS, rows_waiting, wait_until

RENDERING = explain_pb2.Rendering(overlay=explain_pb2.IMAGE_FORMAT_PNG, heatmap=True, intensity=True)
FULL = explain_request(rendering=RENDERING, methods=[explain_pb2.Method(name="gradcam")], top_k=2)
REQUESTS = {
    EXPLAIN: FULL,
    "/camserve.v1.ExplainService/InspectLayers": explain_pb2.InspectLayersRequest(image=PHOTO),
    "/camserve.v1.ExplainService/ExtractFeatures": explain_pb2.ExtractFeaturesRequest(
        image=PHOTO, layer="features", raw=True
    ),
    "/camserve.v1.ExplainService/EstimateCost": explain_pb2.EstimateCostRequest(explain=FULL),
    "/camserve.v1.EvaluateService/Evaluate": evaluate_pb2.EvaluateRequest(explain=explain_request()),
    "/camserve.v1.EvaluateService/ListMetrics": evaluate_pb2.ListMetricsRequest(),
    LIST: models_pb2.ListModelsRequest(),
    "/camserve.v1.ModelService/GetModel": models_pb2.GetModelRequest(name="tiny"),
    "/camserve.v1.ModelService/ListLayers": models_pb2.ListLayersRequest(),
    "/camserve.v1.ModelService/ListMethods": models_pb2.ListMethodsRequest(),
    "/camserve.v1.ModelService/LoadModel": models_pb2.LoadModelRequest(name="tiny"),
    "/camserve.v1.ModelService/UnloadModel": models_pb2.UnloadModelRequest(name="tiny"),
}
"""A request of every unary RPC. The last one leaves no model, so the test of all of them loads it again."""
UNARY = [path for path, rpc in RPCS.items() if not rpc.server_streaming]


def call_grpc(channel, path, message):
    rpc = RPCS[path]
    reply = message_class(rpc.output_type)
    return channel.unary_unary(path)(message.SerializeToString(), timeout=60), reply


def comparable(message):
    """Return a reply without what differs between two calls: the request's id and times."""
    for field, value in message.ListFields():
        if field.name in ("request_id", "timing", "version"):
            message.ClearField(field.name)
        elif field.message_type and field.is_repeated and not field.message_type.GetOptions().map_entry:
            for item in value:
                comparable(item)
        elif field.message_type and not field.is_repeated:
            comparable(value)
    return message


def test_every_unary_rpc_has_a_request_here():
    assert sorted(REQUESTS) == sorted(UNARY)


@pytest.mark.parametrize("path", REQUESTS)
def test_json_reply_equals_the_grpc_reply_field_by_field(path, port, channel):
    data, reply = call_grpc(channel, path, REQUESTS[path])
    if path.endswith("UnloadModel"):
        call_grpc(channel, path.replace("Unload", "Load"), models_pb2.LoadModelRequest(name="tiny"))
    response = post(port, path, REQUESTS[path])
    binary = post(port, path, REQUESTS[path].SerializeToString(), connect.PROTO)
    if path.endswith("UnloadModel"):
        call_grpc(channel, path.replace("Unload", "Load"), models_pb2.LoadModelRequest(name="tiny"))

    assert (response.status, response.headers["content-type"]) == (200, JSON)
    assert (binary.status, binary.headers["content-type"]) == (200, connect.PROTO)
    expected = comparable(reply.FromString(data))
    assert comparable(json_format.Parse(response.body, reply())) == expected
    assert comparable(reply.FromString(binary.body)) == expected
    assert expected.ListFields()


def test_json_of_a_large_reply_is_made_value_by_value(monkeypatch):
    reply = explain_pb2.ExplainResponse(request_id="π\n")
    for byte in (b"\xff", b"\xfe"):
        reply.explanations.add().overlay.data = byte * 2**20
    with monkeypatch.context() as patches:
        patches.setattr(json, "dumps", None)  # which would hold the interpreter's lock for the whole reply
        found = to_json(reply)

    assert json_format.Parse(found, explain_pb2.ExplainResponse()) == reply
    assert "π".encode() in found
    assert found.count(b"\n") + found.count(b" ") == 0


def test_names_of_fields_may_be_in_snake_case(port):
    image = base64.b64encode(PHOTO).decode()
    camel, snake = (post(port, EXPLAIN, {"image": image, name: 3}) for name in ("maxPredictions", "max_predictions"))

    assert camel.json["predictions"] == snake.json["predictions"]
    assert len(snake.json["predictions"]) == 3


def test_json_request_may_change_what_layers_return(port, channel):
    changes = [
        {"layer": "stem", "channels": [0, 2], "silence": True},
        {"layer": "features", "clamp": {"minimum": 0}},
        {"layer": "features", "input": True, "scale": 0.5},
        {"layer": "features", "replaceMean": True, "channels": [1]},
        {"layer": "features", "clipGradient": 0.01},
    ]
    body = {"image": base64.b64encode(PHOTO).decode(), "interventions": changes}
    data, reply = call_grpc(channel, EXPLAIN, json_format.ParseDict(body, explain_pb2.ExplainRequest()))
    response = post(port, EXPLAIN, body)

    assert comparable(json_format.Parse(response.body, reply())) == comparable(reply.FromString(data))
    assert response.json["unchangedPredictions"] != response.json["predictions"]
    assert len(response.json["receipt"]["interventions"]) == 5
    refused = post(port, EXPLAIN, {**body, "interventions": [{"layer": "stem", "channels": [4], "silence": True}]})
    assert (refused.status, refused.json["code"]) == (400, "invalid_argument")
    (fault,) = refused.detail("BadRequest")["fieldViolations"]
    assert (fault["field"], fault["description"]) == (
        "interventions[0].channels",
        'there is no channel 4: layer "stem" has 4 channels, from 0',
    )


@pytest.mark.parametrize("media_type", IMAGE_FORMATS)
def test_caller_that_accepts_a_picture_gets_the_overlay_itself(media_type, port, channel):
    rendering = explain_pb2.Rendering(overlay=IMAGE_FORMATS[media_type])
    data, reply = call_grpc(channel, EXPLAIN, explain_request(rendering=rendering))
    response = post(port, EXPLAIN, explain_request(), accept=media_type)

    assert response.headers["content-type"] == media_type
    assert response.body == reply.FromString(data).explanations[0].overlay.data


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [("image/*", "image/jpeg"), ("application/json, image/png", JSON), ("*/*", JSON), ("text/html", JSON)],
)
def test_type_that_the_caller_accepts_first_decides(accept, content_type, port):
    assert post(port, EXPLAIN, explain_request(), accept=accept).headers["content-type"] == content_type


def test_requested_format_of_the_overlay_wins_over_the_accepted_one(port):
    assert post(port, EXPLAIN, FULL, accept="image/jpeg").headers["content-type"] == "image/png"


def test_error_instead_of_a_picture_is_json(port):
    response = post(port, EXPLAIN, {}, accept="image/jpeg")

    assert (response.status, response.headers["content-type"], response.json["code"]) == (400, JSON, "invalid_argument")


WRONG = {
    "photo": (EXPLAIN, explain_pb2.ExplainRequest(image=b"x")),
    "model": (EXPLAIN, explain_request(model="none")),
    "method": (EXPLAIN, explain_request(methods=[explain_pb2.Method(name="grdcam")])),
    "layer": (EXPLAIN, explain_request(layers=["head"])),
    "rows": (EXPLAIN, explain_request(top_k=17)),
    "no metric": (
        "/camserve.v1.EvaluateService/Evaluate",
        evaluate_pb2.EvaluateRequest(explain=explain_request(top_k=9)),
    ),
    "folder": (
        "/camserve.v1.ModelService/LoadModel",
        models_pb2.LoadModelRequest(name="tiny", weights="x.safetensors"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_error_has_the_code_and_the_details_of_grpc(name, port, channel):
    path, message = WRONG[name]
    with pytest.raises(grpc.RpcError) as caught:
        call_grpc(channel, path, message)
    trailers = dict(caught.value.trailing_metadata())
    response = post(port, path, message, x_request_id=trailers["x-request-id"])

    assert response.status == connect.HTTP_STATUS[caught.value.code()]
    assert response.json["code"] == code_name(caught.value.code())
    assert response.json["message"] == caught.value.details()
    expected = status_pb2.Status.FromString(trailers["grpc-status-details-bin"]).details
    found = response.json["details"]
    assert [detail["type"] for detail in found] == [detail.TypeName() for detail in expected]
    assert [base64.b64decode(f"{detail['value']}===") for detail in found] == [detail.value for detail in expected]
    assert all(detail["debug"] for detail in found)
    assert response.headers["x-request-id"] == trailers["x-request-id"]


def test_fault_of_a_json_message_names_its_field(port):
    response = post(port, EXPLAIN, {"rendering": {"colormp": "JET"}})

    assert response.status == 400
    assert response.json["message"] == (
        'unknown field "rendering.colormp" of camserve.v1.Rendering (did you mean "colormap"?)'
    )
    assert response.detail("BadRequest")["fieldViolations"][0]["field"] == "rendering.colormp"
    assert response.detail("RequestInfo")["requestId"] == response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"content_type": "text/plain"}, 415, "Content-Type: application/json or application/proto"),
        ({"content_encoding": "br"}, 415, "Content-Encoding: identity or gzip"),
        ({"connect_protocol_version": "2"}, 400, "connect-protocol-version must be 1"),
        ({"connect_timeout_ms": "-1"}, 400, "connect-timeout-ms has 1 to 10 digits"),
        ({"connect_timeout_ms": "12345678901"}, 400, "connect-timeout-ms has 1 to 10 digits"),
    ],
)
def test_invalid_header_is_refused(headers, status, message, port):
    response = post(port, LIST, {}, **headers)

    assert (response.status, response.json["code"]) == (status, "invalid_argument")
    assert message in response.json["message"]


def test_compressed_request_is_answered(port):
    body = gzip.compress(json.dumps({"image": base64.b64encode(PHOTO).decode()}).encode())

    assert post(port, EXPLAIN, body, content_encoding="gzip").json["model"] == "tiny"


def test_photo_of_the_largest_message_is_explained(port):
    photo = PHOTOS["rocket"].read_bytes()
    padded = photo + bytes(8 * 2**20 - len(photo) - 100)

    assert post(port, EXPLAIN, {"image": base64.b64encode(padded).decode()}).json["photo"]["width"] == 640


@pytest.mark.parametrize("request_id", ["from-the-caller", ""])
def test_response_has_the_request_id(request_id, port):
    response = post(port, EXPLAIN, explain_request(), **({"x_request_id": request_id} if request_id else {}))

    assert response.json["requestId"] == response.headers["x-request-id"]
    assert response.headers["x-request-id"] == request_id or not request_id


def test_unknown_path_is_not_found_and_other_methods_are_not_allowed(port):
    missing = post(port, "/camserve.v1.ExplainService/Nothing", {})
    other = request(port, "PUT", EXPLAIN)

    assert (missing.status, missing.json["code"]) == (404, "unimplemented")
    assert (other.status, other.headers["allow"]) == (405, "POST")
    assert request(port, "GET", "/nothing").status == 404


def test_deadline_of_a_call_ends_it(serve):
    with serve() as served:
        served.do(served.pipeline.batcher.pause)
        late = {"connect_timeout_ms": "50"}  # real timeout: no batch runs before it
        response = post(served.http_port, EXPLAIN, explain_request(), **late)
        wait_until(lambda: rows_waiting(served) == 0)
        served.do(served.pipeline.batcher.resume)

    assert (response.status, response.json["code"]) == (504, "deadline_exceeded")
    assert response.headers["x-request-id"]


def test_call_is_cancelled_when_its_caller_hangs_up(serve):
    with serve() as served:
        served.do(served.pipeline.batcher.pause)
        connection = http.client.HTTPConnection("127.0.0.1", served.http_port)
        connection.request("POST", EXPLAIN, json_format.MessageToJson(explain_request()), {"content-type": JSON})
        wait_until(lambda: rows_waiting(served) == 1)
        connection.close()
        wait_until(lambda: rows_waiting(served) == 0)
        served.do(served.pipeline.batcher.resume)

        assert post(served.http_port, EXPLAIN, explain_request()).status == 200


def test_full_queue_refuses_with_retry_after(serve):
    with serve(max_queue_rows=1, max_explanations=1) as served:
        served.do(served.pipeline.batcher.pause)
        waiting = http.client.HTTPConnection("127.0.0.1", served.http_port)
        waiting.request("POST", EXPLAIN, json_format.MessageToJson(explain_request()), {"content-type": JSON})
        wait_until(lambda: rows_waiting(served) == 1)
        refused = post(served.http_port, EXPLAIN, explain_request())
        served.do(served.pipeline.batcher.resume)
        assert waiting.getresponse().status == 200
        waiting.close()

    assert (refused.status, refused.json["code"]) == (429, "resource_exhausted")
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.detail("ErrorInfo") == {"reason": "QUEUE_FULL", "domain": "camserve"}


@pytest.fixture
def secured(serve, tmp_path):
    """A server with tokens of the three roles; the file of tokens, and the secret tokens by role."""
    secrets, lines = {}, []
    for role in tokens.ROLES:
        secrets[role], token = tokens.new(role, (role,))
        lines.append(token.line())
    path = tmp_path / "tokens"
    path.write_text("\n".join(lines))
    with serve(tokens_file=str(path), admin=True) as served:
        yield served, path, secrets


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


def test_each_rpc_requires_the_role_that_it_has_over_grpc(secured):
    served, _, secrets = secured
    for path in UNARY:
        for role, secret in secrets.items():
            response = post(served.http_port, path, b"{", **bearer(secret))
            allowed = auth.REQUIRED_ROLES[path] == role
            assert response.json["code"] == ("invalid_argument" if allowed else "permission_denied"), (path, role)
            assert response.status == (400 if allowed else 403)


def test_call_without_a_valid_token_is_refused_before_it_is_read(secured):
    served, _, secrets = secured
    for headers in ({}, bearer("wrong"), {"authorization": secrets["explain"]}, {"cookie": secrets["explain"]}):
        response = post(served.http_port, EXPLAIN, b"not json", **headers)

        assert (response.status, response.json["code"]) == (401, "unauthenticated")
        assert response.headers["www-authenticate"] == "Bearer"


def test_page_health_and_description_need_no_token(secured):
    served, _, _ = secured

    assert request(served.http_port, "GET", "/health").status == 200
    assert request(served.http_port, "GET", "/openapi.json").status == 200
    assert request(served.http_port, "GET", "/").status == 200


def test_revoked_token_is_refused(secured, monkeypatch):
    served, path, secrets = secured
    monkeypatch.setattr(auth, "RECHECK_INTERVAL", 0.0)
    before = post(served.http_port, LIST, {}, **bearer(secrets["observe"]))
    path.write_text("")
    after = post(served.http_port, LIST, {}, **bearer(secrets["observe"]))

    assert (before.status, after.status) == (200, 401)


def test_caller_is_the_name_of_the_token_or_the_address(secured, serve, monkeypatch):
    served, _, secrets = secured
    seen = []
    for server, headers, name in ((served, bearer(secrets["explain"]), "explain"), (None, {}, "127.0.0.1")):
        with contextlib.nullcontext(server) if server else serve() as running:
            batcher = running.pipeline.batcher
            admit = batcher.admit
            monkeypatch.setattr(
                batcher, "admit", lambda *a, admit=admit, **k: seen.append(k["caller"]) or admit(*a, **k)
            )
            post(running.http_port, EXPLAIN, explain_request(), **headers)
        assert seen.pop() == name
