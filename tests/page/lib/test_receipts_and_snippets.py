"""Receipts, code snippets and links of the page, as the Python client and a shell read them."""

import ast
import base64
import hashlib
import json
import os
import subprocess

import numpy as np
import pytest
from google.protobuf import json_format

import camserve
from camserve._codec.explain import explain_request, with_image
from camserve._codec.parameters import encode_parameter
from camserve._codec.receipts import replay_request
from camserve._codec.results import decode_result
from camserve.v1 import explain_pb2
from page.lib.maps_data import heatmap, signed

PHOTO, OTHER, MASK = b"\xff\xd8\xff a photo", b"\xff\xd8\xff another one", b"\x89PNG\r\n\x1a\n a mask"
TARGETS = {
    "index": {"classIndex": 0},
    "label": {"label": "it's \"quoted\" \\ </script> \u202e\u2028 $HOME `id` ' -- ü"},
    "probability": {"label": "tabby", "softmax": True},
    "contrast": {"contrast": {"why": {"classIndex": 281}, "whyNot": {"label": "tiger cat"}}},
    "finer": {"finer": {"why": {"label": "a"}, "against": [{"classIndex": 1}, {"label": "b"}], "weight": 0.5}},
    "segment": {"segment": {"className": {"label": "cat"}, "region": {"left": 0.5, "right": 90, "bottom": 40}}},
    "detection": {
        "detection": {"className": {"classIndex": 3}, "box": {"left": -1, "top": 2, "right": 3, "bottom": 4}}
    },
    "whole segment": {"segment": {"className": {"label": "cat"}}},
    "any detection": {"detection": {"className": {"label": "dog"}}},
    "similarity": {"similarity": {"image": base64.b64encode(OTHER).decode()}},
    "mask": {"segment": {"className": {"label": "cat"}, "mask": base64.b64encode(MASK).decode()}},
}
METHODS = [
    {"name": "gradcam"},
    {
        "name": "smoothgrad",
        "parameters": {"samples": {"number": 32}, "kind": {"text": "it's"}, "noise": {"number": 0.15}},
    },
    {"name": "layercam", "augmentationSmoothing": True, "eigenSmoothing": True},
    {"name": "saliency", "perChannel": True},
    {"name": "integrated_gradients", "perChannel": True, "inputChannels": [7, 0]},
]
PLAIN = {"overlay": "IMAGE_FORMAT_JPEG", "heatmap": True}
RENDERINGS = {
    "defaults": PLAIN,
    "opaque": {**PLAIN, "alpha": 0},
    "coloured": {**PLAIN, "alpha": 0.25, "colormap": "turbo", "thresholdQuantile": 0.8, "contourLines": 4},
    "signed": {**PLAIN, "sign": "SIGN_ABSOLUTE", "sharedScale": True, "fade": True, "regions": {"draw": True}},
    "one band": {**PLAIN, "bands": [7]},
    "bands": {**PLAIN, "bands": [3, 2, 1], "window": {"centre": 40, "width": 400.5}},
}
INTERVENTIONS = [
    {"layer": "layer4", "channels": [12, 40], "silence": True},
    {"layer": "the 'head'", "input": True, "scale": 0.3},
    {"layer": "a", "clamp": {"minimum": 0, "maximum": 6.5}},
    {"layer": "a", "channels": [0], "clamp": {"maximum": -1}},
    {"layer": "b", "replaceMean": True},
    {"layer": "c", "clipGradient": 0.1},
]
REQUESTS = {
    **{f"target {name}": {"methods": [{"name": "gradcam"}], "targets": [target]} for name, target in TARGETS.items()},
    **{f"rendering {name}": {"rendering": rendering} for name, rendering in RENDERINGS.items()},
    "methods": {"methods": METHODS},
    "interventions": {"interventions": INTERVENTIONS},
    "values": {"valueRange": {"maximum": 4095}},
    "everything": {
        "model": "a 'model'",
        "methods": METHODS,
        "targets": [TARGETS["label"], TARGETS["index"]],
        "layers": ["layer4", "layer3"],
        "fusion": "FUSION_MAX",
        "topK": 3,
        "maxPredictions": 0,
        "classMap": True,
        "rendering": RENDERINGS["signed"],
    },
}
CODE = "0) + attack(#"
REQUESTS = {name: {"rendering": PLAIN, **request} for name, request in REQUESTS.items()}


STYLES = [
    ({"opacity": 0.5, "sign": None, "colormap": None, "threshold": None, "scale": "map"}, False, PLAIN),
    ({"opacity": 0, "fade": False, "contourLines": 0}, False, RENDERINGS["opaque"]),
    (
        {"opacity": 0.25, "colormap": "turbo", "threshold": {"quantile": 0.8}, "contourLines": 4},
        False,
        RENDERINGS["coloured"],
    ),
    ({"opacity": 0.5, "sign": "absolute", "scale": "shared", "fade": True}, True, RENDERINGS["signed"]),
]


@pytest.mark.parametrize(("style", "marked", "rendering"), STYLES)
def test_style_of_the_page_becomes_a_rendering_of_the_server(js, style, marked, rendering):
    found = js("return snippets.renderingOf(style, { regions: marked })", style=style, marked=marked)

    assert found == rendering


def message(request):
    return json_format.ParseDict(request, explain_pb2.ExplainRequest())


def filled(request):
    """Return a request with its defaults filled in, as the Python client sends them."""
    request.top_k = request.top_k if request.HasField("top_k") else 1
    request.max_predictions = request.max_predictions if request.HasField("max_predictions") else 5
    if not request.methods:
        request.methods.add(name="gradcam")
    request.rendering.alpha = request.rendering.alpha if request.rendering.HasField("alpha") else 0.5
    request.rendering.profile = request.rendering.profile or explain_pb2.PROFILE_PAPER
    rendering = request.rendering
    sign = rendering.sign or (explain_pb2.SIGN_BOTH if rendering.profile == explain_pb2.PROFILE_SIGNED else 0)
    rendering.colormap = rendering.colormap or ("coolwarm" if sign == explain_pb2.SIGN_BOTH else "jet")
    for target in request.targets:
        if target.WhichOneof("kind") == "finer":
            target.finer.weight = target.finer.weight if target.finer.HasField("weight") else 1
    if request.rendering.HasField("regions") and not request.rendering.regions.HasField("max_regions"):
        request.rendering.regions.max_regions = 8
    return request


class FakeClient:
    """Client that keeps the request instead of sending it."""

    def __init__(self, address, **options):
        self.address, self.options, self.sent = address, options, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def explain(self, image, **options):
        request = explain_request(**options)
        FakeClient.last = (self, with_image(request, image))
        return camserve.Result((), (), "", "", None, None)


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Folder with a photo and another one, whose names need quotes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it's a photo.jpg").write_bytes(PHOTO)
    (tmp_path / "other.jpg").write_bytes(OTHER)
    (tmp_path / "mask.png").write_bytes(MASK)
    return {"photo": "it's a photo.jpg", "other": "other.jpg", "token": True}


@pytest.mark.parametrize("name", REQUESTS)
def test_python_snippet_sends_the_same_request(js, photos, monkeypatch, name):
    code = js(
        "return snippets.asPython(request, { ...photos, address: 'here:1' })", request=REQUESTS[name], photos=photos
    )
    monkeypatch.setattr(camserve, "Client", FakeClient)
    monkeypatch.setenv("CAMSERVE_TOKEN", "a token")
    exec(compile(code, "snippet", "exec"), {})  # noqa: S102 -- our own code
    client, sent = FakeClient.last

    expected = filled(message({**REQUESTS[name], "image": base64.b64encode(PHOTO).decode()}))
    assert filled(sent) == expected
    assert (client.address, client.options) == ("here:1", {"token": "a token"})


CURL = """#!/bin/sh
cat >"$FOLDER/body"
printf '%s\\n' "$@" >"$FOLDER/arguments"
"""


def with_code(value):
    """Yield copies of a JSON value, in each of which one key or one part is code instead."""
    if isinstance(value, dict):
        for name, part in value.items():
            others = {key: each for key, each in value.items() if key != name}
            yield {**others, CODE: part}
            yield from ({**value, name: each} for each in with_code(part))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from ([*value[:index], each, *value[index + 1 :]] for each in with_code(part))
    yield CODE


def test_nothing_in_a_link_or_receipt_becomes_code_of_the_python_snippet(js):
    hostile = [each for request in REQUESTS.values() for each in with_code(request) if each != CODE]
    snippets = js(
        """return requests.map((request) => {
            try {
              return snippets.asPython(request);
            } catch {
              return ""; // a value of a type that the page does not let in
            }
        })""",
        requests=hostile,
    )
    names = {
        node.id if isinstance(node, ast.Name) else ast.unparse(node.value)
        for text in filter(None, snippets)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Name | ast.Attribute)
    }

    assert sum(map(bool, snippets)) > len(hostile) // 2
    assert names <= {"camserve", "client", "result", "explanation", "print", "float", "result.explanations"}


@pytest.mark.parametrize("name", REQUESTS)
def test_curl_snippet_sends_the_same_request(js, photos, tmp_path, name):
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "curl"
    fake.write_text(CURL)
    fake.chmod(0o755)
    code = js(
        "return snippets.asCurl(request, { ...photos, address: 'http://here:1/' })",
        request=REQUESTS[name],
        photos=photos,
    )
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment = {"PATH": path, "FOLDER": str(tmp_path), "CAMSERVE_TOKEN": "a token"}
    subprocess.run(["sh", "-c", code], check=True, cwd=tmp_path, env=environment)

    sent = json.loads((tmp_path / "body").read_bytes())
    assert message(sent) == message({**REQUESTS[name], "image": base64.b64encode(PHOTO).decode()})
    assert (tmp_path / "arguments").read_text().splitlines() == [
        "--fail-with-body",
        "--data-binary",
        "@-",
        "-H",
        "Content-Type: application/json",
        "-H",
        "Authorization: Bearer a token",
        "http://here:1/camserve.v1.ExplainService/Explain",
    ]


MAP = signed(3, 2)


def response(
    score=0.1,
    *,
    target=None,
    values=MAP,
    fusion=explain_pb2.FUSION_UNSPECIFIED,
    parameters=(),
    optional=None,
    channel=None,
):
    explanation = explain_pb2.Explanation(
        method="смуз",
        layer="a + b" if fusion else "",
        score=score,
        verdict=explain_pb2.VERDICT_OK,
        fusion=fusion,
        resolved_target=target or explain_pb2.Target(class_index=0),
        augmentation_smoothing=True,
        input_channel=channel,
    )
    if values is not None:
        explanation.heatmap.CopyFrom(json_format.ParseDict(heatmap(values), explain_pb2.Heatmap()))
    for name, value in parameters:
        explanation.parameters[name].CopyFrom(encode_parameter(name, value))
    receipt = explain_pb2.Receipt(
        source="timm:tiny",
        weights="default",
        digest="ab" * 32,
        precision="float32",
        device="cpu",
        image_sha256="01" * 32,
        input_sha256="23" * 32,
        versions={"torch": "2.14.1"},
    )
    if optional:
        receipt.MergeFrom(json_format.ParseDict(optional, explain_pb2.Receipt()))
    return explain_pb2.ExplainResponse(model="tiny", explanations=[explanation], receipt=receipt)


TARGET_MESSAGES = [json_format.ParseDict(target, explain_pb2.Target()) for target in TARGETS.values()]
RESPONSES = [
    *(response(score) for score in (0.1, 3.0, -0.0, 1e-7, 1e30, 123456789, 1.5e-5, float("nan"), float("-inf"))),
    *(response(target=target) for target in TARGET_MESSAGES),
    response(values=None),
    response(fusion=explain_pb2.FUSION_MEAN),
    response(parameters=[("samples", 32), ("noise", 0.15), ("kind", "it's"), ("odd", float("inf"))][:1]),
    response(parameters=[("kind", "it's")]),
    response(parameters=[("odd", float("inf"))]),
    response(channel=0),
    response(channel=11),
    response(optional={"interventions": INTERVENTIONS}),
    response(optional={"valueRange": {"maximum": 4095.5}, "texts": ["a cat", "ein Hund"]}),
]


@pytest.mark.parametrize("index", range(len(RESPONSES)))
def test_receipt_is_that_of_the_python_client(js, index):
    expected = decode_result(RESPONSES[index]).explanations[0].receipt
    found = js("return receipt.receiptText(reply, 0)", reply=json_format.MessageToDict(RESPONSES[index]))

    assert json.loads(found) == json.loads(expected.to_json())
    assert json.loads(camserve.Receipt.from_json(found).to_json()) == json.loads(found)


SEGMENT = explain_pb2.Segment(class_name=explain_pb2.ClassName(class_index=3), mask=b"")
FILES = {"similarity": {"similarity": explain_pb2.Similarity()}, "mask": {"segment": SEGMENT}}


@pytest.mark.parametrize("kind", FILES)
def test_receipt_has_the_file_of_the_requests_target(js, kind):
    resolved = explain_pb2.Target(**FILES[kind])
    requested = [TARGETS["index"], TARGETS[kind]]
    reply = response(target=resolved)
    reply.explanations.insert(0, reply.explanations[0])
    targets = [json_format.ParseDict(target, explain_pb2.Target()) for target in requested]
    expected = decode_result(reply, targets).explanations[1].receipt.to_json()

    found = js(
        "return receipt.receiptText(reply, 1, { targets })", reply=json_format.MessageToDict(reply), targets=requested
    )

    assert json.loads(found) == json.loads(expected)


def test_response_without_a_receipt_has_none(js):
    assert js("return receipt.receiptText({ explanations: [{}] }, 0)") is None


@pytest.mark.parametrize("index", range(len(RESPONSES)))
def test_receipt_becomes_the_request_of_the_python_client(js, index):
    stored = decode_result(RESPONSES[index]).explanations[0].receipt
    expected = replay_request(camserve.Receipt.from_json(stored.to_json()))

    found = message(js("return receipt.requestOf(receipt.readReceipt(text))", text=stored.to_json()))

    for name in ("model", "methods", "targets", "layers", "fusion", "texts", "value_range", "interventions"):
        assert getattr(found, name) == getattr(expected, name)


BROKEN = {
    "not JSON": (lambda _text: "{", "it is not JSON"),
    "a list": (lambda _text: "[]", "it is not a JSON object"),
    "another version": (
        lambda text: text.replace("receipt 1", "receipt 2"),
        'the receipt has the format "camserve receipt 2"',
    ),
    "another file": (lambda _text: "{}", 'its "format" is not "camserve receipt 1"'),
    "a missing field": (lambda text: text.replace('"method"', '"other"'), 'the receipt has no "method"'),
    "a wrong field": (
        lambda text: text.replace('"layers": []', '"layers": "a"'),
        '"layers" of the receipt must be a list of names',
    ),
    "a wrong range": (
        lambda text: text.replace('"layers"', '"value_range": [1], "layers"'),
        '"value_range" of the receipt must be two numbers',
    ),
    "an intervention without a change": (
        lambda text: text.replace('"layers"', '"interventions": [{"layer": "a"}], "layers"'),
        '"interventions" of the receipt must be a list of interventions',
    ),
    "another map": (
        lambda text: text.replace('"width": 2', '"width": 3'),
        '"heatmap" of the receipt must be null or a map',
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_receipt_is_refused_with_the_fault(js, name):
    breaks, fault = BROKEN[name]
    text = breaks(decode_result(RESPONSES[0]).explanations[0].receipt.to_json())
    found = js("try { receipt.readReceipt(text); return ''; } catch (error) { return error.message; }", text=text)

    assert fault in found
    with pytest.raises(camserve.InvalidArgument):
        camserve.Receipt.from_json(text)


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 1000, 200_000])
def test_sha256_is_that_of_hashlib(js, size):
    data = np.random.default_rng(size).bytes(size)

    assert (
        js("return sha256.sha256(maps.bytesOf(data))", data=base64.b64encode(data).decode())
        == hashlib.sha256(data).hexdigest()
    )
