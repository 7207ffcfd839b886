"""The OpenAPI document is valid, covers every RPC and field, and real requests and replies conform to it."""

import json

import jsonschema
import pytest

from api.http.test_calls import REQUESTS, WRONG
from camserve._codec.protocol import RPCS, code_name
from camserve.web import connect
from http_calls import STREAM, body_of, lines_of, post, request


@pytest.fixture(scope="module")
def document(port):
    return request(port, "GET", "/openapi.json").json


def conforms(document, reference, value):
    schema = {"$ref": f"#/components/schemas/{reference}", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


@pytest.mark.slow
def test_document_is_valid(document):
    import openapi_spec_validator  # noqa: PLC0415 -- it takes a second

    openapi_spec_validator.validate(document)


def test_document_has_every_rpc_with_its_messages(document):
    assert set(document["paths"]) == {*RPCS, "/health"}
    for path, rpc in RPCS.items():
        operation = document["paths"][path]["post"]
        media = "application/x-ndjson" if rpc.server_streaming else "application/json"
        reply = operation["responses"]["200"]["content"][media]["schema"]["$ref"]
        assert reply == f"#/components/schemas/{rpc.output_type.full_name}"
        assert operation["description"]


def test_document_has_every_field_and_every_code(document):
    schemas = document["components"]["schemas"]
    messages = {rpc.input_type for rpc in RPCS.values()} | {rpc.output_type for rpc in RPCS.values()}
    seen = set()
    while messages:
        message = messages.pop()
        seen.add(message)
        assert set(schemas[message.full_name]["properties"]) == {field.json_name for field in message.fields}
        inner = {field.message_type for field in message.fields if field.message_type}
        values = {kind.fields_by_name["value"].message_type if kind.GetOptions().map_entry else kind for kind in inner}
        messages |= {kind for kind in values if kind} - seen

    assert sorted(schemas["Error"]["properties"]["code"]["enum"]) == sorted(map(code_name, connect.HTTP_STATUS))
    assert all(schema["description"] for schema in schemas.values())


@pytest.mark.parametrize("path", [path for path in REQUESTS if not path.endswith("loadModel")])
def test_requests_and_replies_conform_to_the_document(path, port, document):
    rpc = RPCS[path]
    conforms(document, rpc.input_type.full_name, json.loads(body_of(REQUESTS[path])))
    conforms(document, rpc.output_type.full_name, post(port, path, REQUESTS[path]).json)


def test_replies_of_a_stream_conform_to_the_document(port, document):
    explain = json.loads(body_of(REQUESTS["/camserve.v1.ExplainService/Explain"]))
    items = [{"requestId": "a", "request": {**explain, "progress": True}}, {"requestId": "b", "request": {}}]
    body = b"".join(json.dumps(item).encode() + b"\n" for item in items)
    replies = lines_of(post(port, STREAM, body, connect.NDJSON))

    for item in items:
        conforms(document, "camserve.v1.ExplainStreamRequest", item)
    for reply in replies:
        conforms(document, "camserve.v1.ExplainStreamResponse", reply)
    assert {"response", "error"} <= {name for reply in replies for name in reply}


@pytest.mark.parametrize("name", WRONG)
def test_errors_conform_to_the_document(name, port, document):
    conforms(document, "Error", post(port, *WRONG[name]).json)


def test_unknown_field_does_not_conform(document):
    with pytest.raises(jsonschema.ValidationError):
        conforms(document, "camserve.v1.ExplainRequest", {"nothing": 1})
