"""Requests of the Open Inference Protocol become camserve requests, or are refused with their own field names."""

import asyncio
import dataclasses
import re
import struct
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import text_format

import camserve
from camserve.v1 import explain_pb2
from camserve_server.api import oip
from camserve_server.api.oip import replies, requests, servicer, tensors
from camserve_server.api.oip.statistics import Statistics
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.api.rpc import ServerState
from camserve_server.core.errors import InvalidArgument, NotFound, ServiceError
from camserve_server.core.limits import Limits
from camserve_server.imaging import images
from camserve_server.models.values import UnavailableModel
from robustness import error_checks, nets
from support import PHOTOS, jpeg, serving

PAGE = (Path(__file__).parents[2] / "docs/triton-and-kserve.md").read_text(encoding="utf-8")
LIMITS = Limits()
PHOTO = PHOTOS["rocket"].read_bytes()
PIXELS = np.random.default_rng(3).integers(0, 256, (9, 7, 3), np.uint8)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    labels = tmp_path_factory.mktemp("labels") / "labels.txt"
    labels.write_text("cat\ndog\nowl\n3\nelk")
    models = (f"{nets.TINY}&labels={labels}", "parts=coloured:Colours?size=32", "finder=coloured:Finder?size=32")
    delay = {"max_queue_delay_ms": 0.25}  # real timeout: a batch that does not wait has the same rows in these tests
    with serving(models=models, device="cpu", threads=1, **delay) as running:
        yield running


@pytest.fixture(scope="module")
def line(served):
    with grpc.insecure_channel(served.address) as channel:
        yield channel


def message(*, image=(), raw=None, datatype="BYTES", shape=(1,), **more):
    """Return a request with one image, and with parameters as a client writes them."""
    given = more.pop("parameters", {})
    made = inference_pb2.ModelInferRequest(**more)
    tensor = made.inputs.add(name="image", datatype=datatype, shape=shape)
    if raw is None:
        tensor.contents.bytes_contents.extend(image or [PHOTO])
    else:
        made.raw_input_contents.append(raw)
    for name, value in given.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(made.parameters[name], kind, value)
    return made


def asked(served, **how):
    return requests.read_infer(message(**how), served.pipeline.models, LIMITS)


def refusal(act, kind=ServiceError):
    with pytest.raises(kind) as caught:
        act()
    return caught.value


def call(line, rpc, request, timeout=None):
    answer = getattr(inference_pb2, f"{rpc}Response").FromString
    return line.unary_unary(f"/{oip.NAME}/{rpc}", type(request).SerializeToString, answer)(request, timeout=timeout)


# ------------------------------------------------------------------------------------------------------- requests


def test_default_inference_is_gradcam_of_the_predicted_class(served):
    result = asked(served)

    assert result.template == explain_pb2.ExplainRequest(
        model="tiny",
        methods=[explain_pb2.Method(name="gradcam")],
        rendering=explain_pb2.Rendering(overlay=explain_pb2.IMAGE_FORMAT_JPEG, heatmap=True),
        max_predictions=0,
    )
    assert result.outputs == tuple(replies.OUTPUTS)
    assert result.for_image(b"photo").image == b"photo"


def test_every_parameter_is_decoded_into_its_field(served):
    given = {
        "method": "smoothgrad",
        "samples": 3,
        "noise": 0.25,
        "target": "owl",
        "texts": "an owl\na cat",
        "layer": "0",
        "interventions": '[{"layer": "0", "channels": [1], "silence": true}, {"layer": "1", "scale": 0.5}]',
        "augmentation_smoothing": True,
        "eigen_smoothing": False,
        "input_channel": 2,
        "overlay": "png",
        "colormap": "turbo",
        "alpha": 0.25,
        "max_side": 64,
        "quality": 70,
        "profile": "captum",
        "timeout": 1_500_000,
        "priority": 3,
        "triton_whatever": "ignored",
    }
    result = asked(served, parameters=given, outputs=[{"name": "overlay"}])

    assert result.timeout == 1.5
    assert result.template == explain_pb2.ExplainRequest(
        model="tiny",
        methods=[
            explain_pb2.Method(
                name="smoothgrad",
                parameters={"samples": explain_pb2.Parameter(number=3), "noise": explain_pb2.Parameter(number=0.25)},
                augmentation_smoothing=True,
                per_channel=True,
                input_channels=[2],
            )
        ],
        targets=[explain_pb2.Target(label="owl")],
        layers=["0"],
        texts=["an owl", "a cat"],
        interventions=[
            explain_pb2.Intervention(layer="0", channels=[1], silence=True),
            explain_pb2.Intervention(layer="1", scale=0.5),
        ],
        rendering=explain_pb2.Rendering(
            overlay=explain_pb2.IMAGE_FORMAT_PNG,
            colormap="turbo",
            alpha=0.25,
            max_side=64,
            quality=70,
            profile=explain_pb2.PROFILE_CAPTUM,
        ),
        max_predictions=0,
    )


def test_numbers_and_flags_may_be_strings(served):
    texts = {"alpha": "0.25", "max_side": "64", "eigen_smoothing": "true", "target": "2", "timeout": "90"}
    values = {"alpha": 0.25, "max_side": 64, "eigen_smoothing": True, "target": 2, "timeout": 90}

    assert asked(served, parameters=texts) == asked(served, parameters=values)


NAMES = {name: explain_pb2.ClassName(label=name) for name in ("cat", "dog")} | {
    "3": explain_pb2.ClassName(class_index=3)
}
TARGETS = {
    "owl": explain_pb2.Target(label="owl"),
    "3": explain_pb2.Target(class_index=3),
    "cat vs dog": explain_pb2.Target(contrast=explain_pb2.Contrast(why=NAMES["cat"], why_not=NAMES["dog"])),
    "3 vs dog": explain_pb2.Target(contrast=explain_pb2.Contrast(why=NAMES["3"], why_not=NAMES["dog"])),
    "probability:3": explain_pb2.Target(class_index=3, softmax=True),
    "probability: cat": explain_pb2.Target(label="cat", softmax=True),
    "text:an owl, asleep": explain_pb2.Target(text="an owl, asleep"),
    "finer:cat": explain_pb2.Target(finer=explain_pb2.Finer(why=NAMES["cat"])),
}


@pytest.mark.parametrize("text", TARGETS)
def test_target_has_the_syntax_of_the_command_line(served, text):
    assert list(asked(served, parameters={"target": text}).template.targets) == [TARGETS[text]]


def test_class_of_a_segmentation_or_detector_becomes_its_kind_of_target(served):
    segment = asked(served, model_name="parts", parameters={"target": 1}).template.targets
    targets = asked(served, model_name="finder", parameters={"target": "1"}).template.targets

    assert list(segment) == [explain_pb2.Target(segment={"class_name": {"class_index": 1}})]
    assert list(targets) == [explain_pb2.Target(detection={"class_name": {"class_index": 1}})]


def test_outputs_that_were_not_requested_are_not_computed(served):
    question = asked(served, outputs=[{"name": "label"}, {"name": "score"}, {"name": "label"}])

    assert question.outputs == ("label", "score")
    assert question.template.rendering == explain_pb2.Rendering()


# ------------------------------------------------------------------------------------------------------- tensors


def files_of(**how):
    return tensors.read_images(message(**how), LIMITS)


def test_files_may_be_raw_with_length_prefixes_or_in_contents():
    raw = tensors.element(b"one") + tensors.element(b"") + tensors.element(b"three")

    assert files_of(raw=raw, shape=(3, 1)) == [b"one", b"", b"three"]
    assert files_of(image=[b"one", b"two"], shape=(2,)) == [b"one", b"two"]


def decoded(file):
    return images.decode(file, LIMITS)


@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("count", [None, 1, 2])
def test_pixels_are_decoded_from_any_layout(planes, count):
    array = PIXELS if count is None else np.stack([PIXELS + np.uint8(place) for place in range(count)])
    sent = np.ascontiguousarray(np.moveaxis(array, -1, -3)) if planes else array
    for datatype, values in (("UINT8", sent), ("FP32", (sent / np.float32(255)).astype("<f4"))):
        result = files_of(raw=values.tobytes(), datatype=datatype, shape=sent.shape)

        assert len(result) == (count or 1)
        for file, image in zip(result, array.reshape(-1, *PIXELS.shape), strict=True):
            np.testing.assert_array_equal(decoded(file), image)


def typed(datatype, field, values, shape=PIXELS.shape):
    made = inference_pb2.ModelInferRequest()
    tensor = made.inputs.add(name="image", datatype=datatype, shape=shape)
    getattr(tensor.contents, field).extend(values)
    return made


def test_pixels_may_be_sent_one_by_one():
    whole = typed("UINT8", "uint_contents", PIXELS.ravel().tolist())
    floats = typed("FP32", "fp32_contents", (PIXELS.ravel() / 255).tolist())
    for made in (whole, floats):
        (file,) = tensors.read_images(made, LIMITS)
        np.testing.assert_array_equal(decoded(file), PIXELS)


def test_many_values_are_read_in_parts(monkeypatch):
    monkeypatch.setattr(tensors, "_CHUNK", 10)
    (file,) = tensors.read_images(typed("UINT8", "uint_contents", PIXELS.ravel().tolist()), LIMITS)

    np.testing.assert_array_equal(decoded(file), PIXELS)


def two_inputs():
    made = message()
    made.inputs.add(name="image", datatype="BYTES", shape=[1])
    return made


def named(name):
    made = message()
    made.inputs[0].name = name
    return made


def shared(name="shared_memory_region"):
    made = message()
    made.inputs[0].parameters[name].string_param = "region"
    return made


def both():
    made = message(raw=tensors.element(PHOTO))
    made.inputs[0].contents.bytes_contents.append(PHOTO)
    return made


PLAIN = PIXELS.tobytes()
WRONG = {
    "no input": (inference_pb2.ModelInferRequest, "inputs", "send one input, image"),
    "two inputs": (two_inputs, "inputs", "send one input, image"),
    "another name": (lambda: named("pixels"), "inputs[0].name", 'unknown input "pixels": the only input is image'),
    "shared memory": (shared, "inputs[0].parameters", 'has no parameter "shared_memory_region"'),
    "shared size": (
        lambda: shared("shared_memory_byte_size"),
        "inputs[0].parameters",
        "shared memory is not supported",
    ),
    "both places": (both, "raw_input_contents", "then no input may have contents"),
    "another kind": (
        lambda: message(datatype="FP64"),
        "inputs[0].datatype",
        'BYTES (files), UINT8 or FP32 (pixels), not "FP64"',
    ),
    "no shape": (lambda: message(shape=()), "inputs[0].shape", "the shape [] has no elements"),
    "nothing": (lambda: message(shape=(0,)), "inputs[0].shape", "the shape [0] has no elements"),
    "less than nothing": (lambda: message(shape=(-1, 1)), "inputs[0].shape", "the shape [-1, 1] has no elements"),
    "files in a square": (lambda: message(shape=(1, 2)), "inputs[0].shape", "[N] or [N,1], not [1, 2]"),
    "nine files": (lambda: message(shape=(9,)), "inputs[0].shape", "9 images, and 8 is the limit"),
    "a bare file": (lambda: message(raw=PHOTO), "inputs[0]", "each file follows its length"),
    "too few files": (lambda: message(shape=(2,)), "inputs[0]", "1 of the 2 files of its shape"),
    "two million empty files": (
        lambda: message(raw=bytes(8_000_000)),
        "inputs[0]",
        "more than the 1 files of its shape",
    ),
    "a plane": (
        lambda: message(raw=bytes(63), datatype="UINT8", shape=(9, 7)),
        "inputs[0].shape",
        "[N,H,W,3] or [N,3,H,W], for one image also without N, and not [9, 7]",
    ),
    "four colours": (lambda: message(raw=bytes(24), datatype="UINT8", shape=(2, 3, 4)), "inputs[0].shape", "[2, 3, 4]"),
    "too few pixels": (
        lambda: message(raw=PLAIN[1:], datatype="UINT8", shape=PIXELS.shape),
        "inputs[0]",
        "188 values do not fill the shape [9, 7, 3]",
    ),
    "half a number": (
        lambda: message(raw=bytes(755), datatype="FP32", shape=PIXELS.shape),
        "inputs[0]",
        "188.75 values do not fill",
    ),
    "a huge shape": (
        lambda: message(raw=PLAIN, datatype="UINT8", shape=(2**62, 2**62, 3)),
        "inputs[0]",
        "189 values do not fill the shape",
    ),
    "beyond a byte": (
        lambda: typed("UINT8", "uint_contents", [256] * 189),
        "inputs[0].contents",
        "UINT8 values are 0 to 255",
    ),
    "normalised": (
        lambda: message(raw=np.full(189, -1.5, "<f4").tobytes(), datatype="FP32", shape=PIXELS.shape),
        "inputs[0]",
        "not normalised",
    ),
    "not a number": (
        lambda: message(raw=np.full(189, np.nan, "<f4").tobytes(), datatype="FP32", shape=PIXELS.shape),
        "inputs[0]",
        "FP32 pixels are RGB values of 0 to 1",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_tensor_is_refused_with_a_reason(what):
    make, field, words = WRONG[what]
    error = refusal(lambda: tensors.read_images(make(), LIMITS), InvalidArgument)

    assert error.field == field
    assert words in error.message


def test_nine_images_of_pixels_are_refused():
    error = refusal(lambda: files_of(raw=bytes(9 * 12), datatype="UINT8", shape=(9, 2, 2, 3)), InvalidArgument)

    assert error.message == "9 images, and 8 is the limit"


# -------------------------------------------------------------------------------------------------- invalid requests

REFUSED = {
    "grdcam": ({"method": "grdcam"}, 'parameters["method"]', '(did you mean "gradcam"?)'),
    "no text": ({"method": 3}, 'parameters["method"]', "method is a text"),
    "alpha": ({"alpha": 1.5}, 'parameters["alpha"]', 'parameters["alpha"] is 0 to 1, not 1.5'),
    "alpha's kind": ({"alpha": "half"}, 'parameters["alpha"]', "alpha is a number"),
    "a flag for a number": ({"alpha": True}, 'parameters["alpha"]', "alpha is a number"),
    "a number for a flag": ({"eigen_smoothing": 1}, 'parameters["eigen_smoothing"]', "true or false"),
    "a fraction": ({"max_side": 64.5}, 'parameters["max_side"]', "max_side is a whole number"),
    "below zero": ({"quality": -1}, 'parameters["quality"]', "quality is a whole number, 0 or more"),
    "no number": ({"quality": float("nan")}, 'parameters["quality"]', "quality is a whole number"),
    "endless": ({"max_side": float("inf")}, 'parameters["max_side"]', "max_side is a whole number"),
    "quality": ({"quality": 101}, 'parameters["quality"]', 'parameters["quality"] is 0 to 100'),
    "overlay": ({"overlay": "jpg"}, 'parameters["overlay"]', 'one of jpeg, png, webp (did you mean "jpeg"?)'),
    "profile": ({"profile": "captm"}, 'parameters["profile"]', '(did you mean "captum"?)'),
    "colormap": ({"colormap": "jett"}, 'parameters["colormap"]', "jet"),
    "target": ({"target": "oul"}, 'parameters["target"]', '(did you mean "owl"?)'),
    "index": ({"target": 5}, 'parameters["target"]', "there is no class 5"),
    "huge index": ({"target": "9" * 30}, 'parameters["target"]', "a label, or a class's index"),
    "negative index": ({"target": -1}, 'parameters["target"]', "target is a whole number"),
    "same classes": ({"target": "cat vs cat"}, 'parameters["target"]', "two different classes"),
    "layer": ({"layer": "9"}, 'parameters["layer"]', "unknown layer"),
    "range": ({"method": "smoothgrad", "samples": 0}, 'parameters["samples"]', 'parameters["samples"] is 1 to'),
    "choice": (
        {"method": "gradcam_plus_plus", "variant": "papr"},
        'parameters["variant"]',
        '(did you mean "paper"?)',
    ),
    "of no method": ({"samples": 3}, "parameters", 'there is no parameter "samples"'),
    "misspelt": ({"methd": "gradcam"}, "parameters", '(did you mean "method"?)'),
    "misspelt of its own": ({"method": "smoothgrad", "sampels": 3}, "parameters", '(did you mean "samples"?)'),
    "timeout": ({"timeout": -5}, 'parameters["timeout"]', "timeout is a whole number"),
    "a number too long": ({"interventions": '[{"scale":1%s}]' % ("0" * 400)}, 'parameters["interventions"]', "as JSON"),
    "an unpaired surrogate": ({"interventions": '[{"layer":"\\ud800"}]'}, 'parameters["interventions"]', "as JSON"),
    "channel": ({"method": "saliency", "input_channel": 3}, 'parameters["input_channel"]', "is 0 to 2, not 3"),
    "channel of a cam": ({"method": "gradcam", "input_channel": 0}, 'parameters["input_channel"]', "has no map"),
    "eigen": ({"method": "saliency", "eigen_smoothing": True}, 'parameters["eigen_smoothing"]', "principal component"),
}


def field_of(error):
    assert error_checks.faults(error) == []
    return error_checks.field_of(error)


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_parameter_is_refused_by_its_name(line, what):
    given, field, words = REFUSED[what]
    with pytest.raises(grpc.RpcError) as caught:
        call(line, "ModelInfer", message(parameters=given))

    assert field_of(caught.value) == field
    assert words in caught.value.details()
    assert caught.value.code().name in ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION")


def test_parameter_without_a_value_is_refused(served):
    made = message()
    made.parameters["alpha"].SetInParent()

    error = refusal(lambda: requests.read_infer(made, served.pipeline.models, LIMITS), InvalidArgument)
    assert (error.field, error.message) == ('parameters["alpha"]', "alpha is a number")


def test_unknown_output_and_output_in_shared_memory_are_refused(served):
    unknown = refusal(lambda: asked(served, outputs=[{"name": "label"}, {"name": "overlai"}]), NotFound)
    kept = message(outputs=[{"name": "overlay"}])
    kept.outputs[0].parameters["shared_memory_region"].string_param = "region"

    assert (unknown.field, "overlay" in unknown.message) == ("outputs[1].name", True)
    error = refusal(lambda: requests.read_infer(kept, served.pipeline.models, LIMITS), InvalidArgument)
    assert error.field == "outputs[0].parameters"
    assert "shared memory is not supported" in error.message


def test_output_as_a_classification_is_refused_with_a_message(served):
    made = message(outputs=[{"name": "score"}])
    made.outputs[0].parameters["classification"].int64_param = 3

    error = refusal(lambda: requests.read_infer(made, served.pipeline.models, LIMITS), InvalidArgument)
    assert error.field == "outputs[0].parameters"
    assert "class_id, label and score are outputs" in error.message


BY_KSERVE = """
model_name: "tiny"
parameters { key: "binary_data_output" value { bool_param: true } }
inputs {
  name: "image" datatype: "UINT8" shape: [1, 2, 2, 3]
  parameters { key: "binary_data_size" value { int64_param: 12 } }
}
outputs { name: "label" parameters { key: "binary_data" value { bool_param: true } } }
raw_input_contents: "\\000\\001\\002\\003\\004\\005\\006\\007\\010\\011\\012\\013"
"""
"""Request of kserve 0.21 from an InferInput with set_data_from_numpy and a RequestedOutput with binary_data."""


def test_request_of_the_kserve_sdk_is_answered(line):
    result = call(line, "ModelInfer", text_format.Parse(BY_KSERVE, inference_pb2.ModelInferRequest()))

    assert [output.name for output in result.outputs] == ["label"]
    (file,) = tensors.read_images(text_format.Parse(BY_KSERVE, inference_pb2.ModelInferRequest()), LIMITS)
    np.testing.assert_array_equal(decoded(file), np.arange(12).reshape(2, 2, 3))


def test_score_of_a_probability_is_the_probability(line):
    def score(target):
        made = message(parameters={"target": target}, outputs=[{"name": "score"}])
        return struct.unpack("<f", call(line, "ModelInfer", made).raw_output_contents[0])[0]

    logits = np.array([score(index) for index in range(5)])
    expected = np.exp(logits[1]) / np.exp(logits).sum()
    assert abs(score("probability:dog") - expected) < 1e-6
    assert abs(score("dog vs cat") - (logits[1] - logits[0])) < 1e-6


def test_error_names_the_index_of_the_invalid_image(line):
    with pytest.raises(grpc.RpcError) as caught:
        call(line, "ModelInfer", message(image=[PHOTO, b"no image", PHOTO], shape=(3,)))

    assert caught.value.details() == "image 2 of 3: not a JPEG, PNG, WebP, BMP, TIFF or NPY file"
    assert field_of(caught.value) == "inputs[0]"


def test_unavailable_version_and_unknown_model_are_not_found(line):
    for request, field in (
        (message(model_name="tiny", model_version="2"), "model_version"),
        (message(model_name="tny"), "model_name"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(line, "ModelInfer", request)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert field_of(caught.value) == field
    with pytest.raises(grpc.RpcError) as caught:
        call(line, "ModelMetadata", inference_pb2.ModelMetadataRequest(name="tiny", version="x"))
    assert field_of(caught.value) == "version"


def test_load_is_refused_if_disabled_and_unknown_parameters_are_named(line):
    def load(**given):
        request = inference_pb2.RepositoryModelLoadRequest(model_name="tiny")
        for name, value in given.items():
            request.parameters[name].string_param = value
        with pytest.raises(grpc.RpcError) as caught:
            call(line, "RepositoryModelLoad", request)
        return caught.value.code().name, field_of(caught.value), caught.value.details()

    assert load()[0] == "FAILED_PRECONDITION"
    assert load(sha256="x")[:2] == ("INVALID_ARGUMENT", 'parameters["sha256"]')
    assert load(config="{}")[1:] == (
        "parameters",
        'unknown parameter "config": the parameters of a load are the texts weights and sha256',
    )
    for request in (
        inference_pb2.RepositoryModelUnloadRequest(repository_name="r", model_name="tiny"),
        inference_pb2.RepositoryIndexRequest(repository_name="r"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(line, type(request).DESCRIPTOR.name.removesuffix("Request"), request)
        assert field_of(caught.value) == "repository_name"
    with pytest.raises(grpc.RpcError) as caught:
        call(line, "RepositoryModelUnload", inference_pb2.RepositoryModelUnloadRequest())
    assert field_of(caught.value) == "model_name"
    assert caught.value.details() == "name the model"


def test_error_that_begins_with_a_field_names_the_field_of_the_protocol():
    result = refusal(lambda: raise_within(InvalidArgument.of_field("rendering.alpha", "is 0 to 1, not 2")))
    other = refusal(lambda: raise_within(InvalidArgument("name the model", field="name")))

    assert (result.field, result.message) == ('parameters["alpha"]', 'parameters["alpha"] is 0 to 1, not 2')
    assert (other.field, other.message) == ("model_name", "name the model")


def raise_within(error):
    with requests.convert_fields():
        raise error


# --------------------------------------------------------------------------------------------------------- responses


def test_response_equals_that_of_the_camserve_api(served, line):
    given = {"method": "hirescam", "target": "owl", "overlay": "png", "colormap": "turbo"}
    result = call(line, "ModelInfer", message(id="mine", parameters=given))
    with camserve.Client(served.address) as client:
        ours = client.explain(
            PHOTO, methods="hirescam", targets="owl", overlay="png", colormap="turbo", heatmap=True
        ).explanations[0]
    values = dict(zip([output.name for output in result.outputs], result.raw_output_contents, strict=True))

    assert (result.id, result.model_name, result.model_version) == ("mine", "tiny", "1")
    assert values["overlay"] == tensors.element(ours.overlay)
    assert values["heatmap"] == ours.heatmap.astype("<f4").tobytes()
    assert values["label"] == tensors.element(b"owl")
    assert struct.unpack("<q", values["class_id"]) == (2,)
    assert struct.unpack("<f", values["score"]) == (pytest.approx(ours.score, rel=1e-7),)
    assert values["verdict"] == tensors.element(ours.verdict.encode())
    assert [list(output.shape) for output in result.outputs] == [
        [1, 1],
        [1, *ours.heatmap.shape],
        [1, 1],
        [1, 1],
        [1, 1],
        [1, 1],
    ]


@pytest.mark.parametrize("model", ["parts", "finder"])
def test_segmentation_and_a_detector_are_explained(line, model):
    image = np.zeros((64, 64, 3), np.uint8)
    image[16:40, 16:40] = (255, 0, 0)
    result = call(line, "ModelInfer", message(image=[jpeg(image)], model_name=model, parameters={"target": 1}))

    assert struct.unpack("<q", result.raw_output_contents[2]) == (1,)


@pytest.mark.parametrize(
    ("microseconds", "seconds"),
    [(100_000, 60), (None, 0.05)],  # real timeout: no batch runs before it
)
def test_deadline_is_the_timeout_of_the_message_or_of_the_call(served, line, microseconds, seconds):
    given = {"timeout": microseconds} if microseconds else {}
    served.do(served.pipeline.batcher.pause)
    with pytest.raises(grpc.RpcError) as caught:
        call(line, "ModelInfer", message(parameters=given), timeout=seconds)
    served.do(served.pipeline.batcher.resume)

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert microseconds is None or "the deadline" in caught.value.details() or "the timeout" in caught.value.details()


def test_model_config_has_the_maximum_queue_delay(line):
    config = call(line, "ModelConfig", inference_pb2.ModelConfigRequest(name="tiny")).config

    assert config.dynamic_batching.max_queue_delay_microseconds == 250
    assert (config.max_batch_size, config.model_transaction_policy.decoupled) == (LIMITS.images, False)


def test_internal_error_in_a_stream_does_not_expose_its_message(line, monkeypatch):
    def broken(*_):
        raise RuntimeError("secret")

    ask = line.stream_stream(
        f"/{oip.NAME}/ModelStreamInfer",
        inference_pb2.ModelInferRequest.SerializeToString,
        inference_pb2.ModelStreamInferResponse.FromString,
    )
    with monkeypatch.context() as patch:
        patch.setattr(servicer, "infer_response", broken)
        (answer,) = ask(iter([message(id="x")]))

    assert answer.error_message.startswith("internal error; the server's log has more under request id ")
    assert answer.infer_response.id == "x"


def test_statistics_of_a_version_start_at_zero_and_count_failures(served):
    model = served.pipeline.models["tiny"]
    result = Statistics()
    timing = explain_pb2.Timing(decode_ms=1, queue_ms=2, compute_ms=3, render_ms=4, batch_rows=4)
    answer = explain_pb2.ExplainResponse(timing=timing)
    for _ in range(4):
        result.count_success(model, 0.5, [answer, answer])
    result.count_failure(model, 0.25)
    statistics = result.of(model)

    assert (statistics.inference_count, statistics.execution_count) == (8, 2)
    stats = statistics.inference_stats
    assert (stats.success.count, stats.success.ns, stats.fail.count, stats.fail.ns) == (4, 2e9, 1, 0.25e9)
    stages = (stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output)
    assert [(stage.count, stage.ns) for stage in stages] == [(4, 8e6), (4, 4e6), (4, 12e6), (4, 16e6)]
    assert result.of(dataclasses.replace(model, version=2)).inference_count == 0


def test_responses_of_an_old_version_do_not_reset_new_statistics(served):
    old = dataclasses.replace(served.pipeline.models["tiny"], version=1)
    new = dataclasses.replace(old, version=2)
    result, answer = Statistics(), explain_pb2.ExplainResponse(timing=explain_pb2.Timing(batch_rows=1))
    result.count_success(old, 0.5, [answer])
    for _ in range(3):  # a reload: the two end in turn
        result.count_success(new, 0.5, [answer])
        result.count_success(old, 0.5, [answer])
        result.count_failure(old, 0.5)

    assert (result.of(new).version, result.of(new).inference_count) == ("2", 3)
    assert result.of(new).inference_stats.fail.count == 0
    assert (result.of(old).version, result.of(old).inference_count) == ("1", 0)


def test_statistics_without_a_name_are_those_of_all_models(line):
    model_stats = call(line, "ModelStatistics", inference_pb2.ModelStatisticsRequest()).model_stats

    assert [each.name for each in model_stats] == ["tiny", "parts", "finder"]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("loading", ("LOADING", "")),
        ("failed", ("UNAVAILABLE", "it could not be loaded; the server's log says why")),
        ("unloading", ("UNLOADING", "it completes accepted requests")),
        ("unloaded", ("UNAVAILABLE", "unloaded")),
    ],
)
def test_index_has_the_reason_why_a_model_is_unavailable(state, expected):
    index = replies.index_of(UnavailableModel("net", "timm:net", state))

    assert (index.name, index.version, index.state, index.reason) == ("net", "", *expected)


def test_server_is_live_but_not_ready_until_models_are_loaded():
    class Context:
        def time_remaining(self):
            return None

        def invocation_metadata(self):
            return ()

        def peer(self):
            return "unix:"

        def set_trailing_metadata(self, _trailers):
            pass

        def add_done_callback(self, _callback):
            pass

    async def ask():
        asked = oip.InferenceServicer(ServerState(1), lambda: False, 0)
        live = await asked.ServerLive(inference_pb2.ServerLiveRequest(), Context())
        ready = await asked.ServerReady(inference_pb2.ServerReadyRequest(), Context())
        model = await asked.ModelReady(inference_pb2.ModelReadyRequest(name="tiny"), Context())
        return live.live, ready.ready, model.ready

    assert asyncio.run(ask()) == (True, False, False)


def test_reflection_lists_the_service_by_its_wire_name():
    pool = oip.pool_of(["grpc.health.v1.Health"])
    service = pool.FindServiceByName("inference.GRPCInferenceService")

    assert {rpc.name for rpc in service.methods} == {rpc.name for rpc in oip.SERVICE.methods}
    assert service.methods_by_name["ModelInfer"].input_type.full_name == "inference.ModelInferRequest"
    fields = pool.FindMessageTypeByName("inference.ModelInferRequest").fields
    assert [(field.name, field.number) for field in fields] == [
        (field.name, field.number) for field in inference_pb2.ModelInferRequest.DESCRIPTOR.fields
    ]
    with pytest.raises(KeyError):
        pool.FindMessageTypeByName("open_inference.v2.ModelInferRequest")


# ----------------------------------------------------------------------------------------------------- documentation


def table(name):
    text = re.search(rf"<!-- {name}:.*?-->\n(.*?)\n<!-- /{name} -->", PAGE, re.DOTALL).group(1)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()[2:]]


def test_documentation_page_lists_every_parameter():
    assert [row[0].strip("`") for row in table("parameters")] == list(requests._WRITERS)


def test_documentation_page_lists_every_output_with_type_and_shape():
    results = [[cell.strip("`") for cell in row[:3]] for row in table("outputs")]

    assert results == [
        [name, each.datatype, str(["N", *each.dims]).replace("'", "").replace(" ", "")]
        for name, each in replies.OUTPUTS.items()
    ]
