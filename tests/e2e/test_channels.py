"""Models of one and of twelve channels on a whole server: the plain model's numbers, over every protocol."""

import base64
import io
import json
import struct
import zlib

import grpc
import numpy as np
import pytest
import tifffile
import timm
import torch
from click.testing import CliRunner

import camserve
import http_calls
from camserve.cli import main
from camserve_server import Explainer
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.models import load, parse
from methods.tools import error_ratio
from support import serving

CHANNELS = {"grey": 1, "bands": 12}
SPECS = {
    "grey": "grey=timm:test_resnet?weights=none&size=64&channels=1&mean=0.4&std=0.25&accelerate=false",
    "bands": "bands=timm:test_resnet?weights=none&size=64&channels=12&mean=0.4&std=0.25&accelerate=false",
}
TOP = {"uint8": 255, "uint16": 65535, "float32": 1}
CLASS = 3


@pytest.fixture(scope="module")
def served():
    with serving(models=tuple(SPECS.values()), device="cpu", threads=1, http_address="127.0.0.1:0") as server:
        yield server


@pytest.fixture(scope="module")
def client(served):
    with camserve.Client(served.address, retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def modules():
    return {name: load(parse(spec)).module for name, spec in SPECS.items()}


def noise(name, dtype):
    values = np.random.default_rng(5).random((64, 64, CHANNELS[name])) * (TOP[dtype] + 0.99 * (dtype != "float32"))
    return values.astype(dtype)


def plain(module, values, dtype):
    """Return the logits and Grad-CAM of the plain model for an array of its input's size, in this precision."""
    module = module.to(dtype)
    layer = module.get_submodule("layer4")
    unit = torch.from_numpy(values.astype(np.float64)).to(dtype) / TOP[values.dtype.name]
    outputs = []
    with layer.register_forward_hook(lambda _module, _args, output: outputs.append(output.requires_grad_()) or output):
        logits = module(((unit.permute(2, 0, 1) - 0.4) / 0.25)[None])
    (gradient,) = torch.autograd.grad(logits[0, CLASS], outputs[0])
    heatmap = (gradient.mean((2, 3), keepdim=True) * outputs[0]).sum(1)[0]
    module.float()
    return logits[0].detach().numpy(), heatmap.detach().numpy()


def whole_photo(name):
    """Return the options of a request whose photo is not cropped: the models keep the middle of larger ones."""
    return {"model": name, "methods": ["gradcam"], "targets": [CLASS], "overlay": "png", "max_predictions": 1000}


def enlarged(values, name, served):
    """Return the array in the middle of a larger one, of which the model keeps exactly this part, without a resize."""
    resize = served.pipeline.models[name].preprocess.resize
    border = round((resize - 64) / 2)
    return np.pad(values, ((border, resize - 64 - border), (border, resize - 64 - border), (0, 0)))


@pytest.mark.parametrize("dtype", TOP)
@pytest.mark.parametrize("name", CHANNELS)
def test_predictions_and_maps_are_as_exact_as_the_plain_models(name, dtype, served, client, modules):
    values = noise(name, dtype)
    result = client.explain(enlarged(values, name, served), **whole_photo(name))

    exact, single = plain(modules[name], values, torch.float64), plain(modules[name], values, torch.float32)
    logits = np.zeros(len(exact[0]))
    for prediction in result.predictions:
        logits[prediction.class_index] = prediction.score
    assert error_ratio(logits, single[0], exact[0]) <= 1
    assert error_ratio(result.explanations[0].heatmap, single[1], exact[1]) <= 1
    assert result.explanations[0].image.mode == "RGB"


def tiff(values, **options):
    file = io.BytesIO()
    planes = {"planarconfig": "contig"} if values.shape[2] > 1 else {}
    tifffile.imwrite(file, values if planes else values[:, :, 0], photometric="minisblack", **planes, **options)
    return file.getvalue()


def npy(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


@pytest.mark.parametrize("name", CHANNELS)
def test_http_and_the_command_line_return_the_same_map(name, served, client, tmp_path):
    values = noise(name, "uint16")
    expected = client.explain(values, **whole_photo(name)).explanations[0].heatmap
    file = tmp_path / "photo.tif"
    file.write_bytes(tiff(values))

    body = {
        "model": name, "image": base64.b64encode(file.read_bytes()).decode(), "rendering": {"heatmap": True},
        "targets": [{"classIndex": CLASS}],
    }  # fmt: skip
    reply = http_calls.post(served.http_port, http_calls.EXPLAIN, body)
    data = base64.b64decode(reply.json["explanations"][0]["heatmap"]["data"])
    assert np.array_equal(np.frombuffer(data, "<f4").reshape(expected.shape), expected)

    arguments = ["explain", str(file), "-o", str(tmp_path / "out"), "--server", served.address, "--model", name]
    done = CliRunner().invoke(main, [*arguments, "--target", str(CLASS), "--heatmaps", "--bands", "0"])
    assert done.exit_code == 0, done.output
    (saved,) = (tmp_path / "out").glob("*.npy")
    assert np.array_equal(np.load(saved), expected)


PARTS = camserve.Method("input_x_gradient", per_channel=True)


def gradient_of(module, values, dtype):
    """Return the plain model's gradient times its input for an array of its input's size, [C,H,W]."""
    module = module.to(dtype)
    unit = torch.from_numpy(values.astype(np.float64)).to(dtype) / TOP[values.dtype.name]
    image = ((unit.permute(2, 0, 1) - 0.4) / 0.25)[None].requires_grad_()
    (gradient,) = torch.autograd.grad(module(image)[0, CLASS], image)
    module.float()
    return (image * gradient)[0].detach().numpy()


@pytest.fixture(scope="module", params=CHANNELS)
def parts(request, served, client, modules):
    """An array, the server's map of each of its channels, and those of the plain model in float32 and float64."""
    values = enlarged(noise(request.param, "uint16"), request.param, served)
    options = whole_photo(request.param) | {"methods": [PARTS, "input_x_gradient"]}
    result = client.explain(values, **options)
    module, seen = modules[request.param], noise(request.param, "uint16")
    return request.param, values, result, [gradient_of(module, seen, each) for each in (torch.float32, torch.float64)]


def test_each_channel_has_a_map_as_exact_as_the_plain_models(parts):
    _, _, result, (single, exact) = parts
    *found, whole = result.explanations

    assert [each.input_channel for each in found] == list(range(len(exact)))
    assert whole.input_channel is None
    assert {each.verdict for each in found} == {camserve.Verdict.OK}
    assert len({each.overlay for each in found}) == len(found)
    for each, *expected in zip(found, single, exact, strict=True):
        assert error_ratio(each.heatmap, *expected) <= 1
    added = sum(each.heatmap.astype(np.float64) for each in found)
    assert error_ratio(added, single.sum(0), exact.sum(0)) <= 1
    assert error_ratio(whole.heatmap, single.sum(0), exact.sum(0)) <= 1


def test_map_of_a_channel_is_replayed_alone(parts, client):
    name, values, result, _ = parts
    channel = CHANNELS[name] - 1
    receipt = camserve.Receipt.from_json(result.explanations[channel].receipt.to_json())
    replay = client.replay(receipt, values)

    assert receipt.input_channel == channel
    assert replay.same
    assert replay.explanation.input_channel == channel
    other = camserve.Receipt.from_json(result.explanations[-1].receipt.to_json())
    assert other.input_channel is None


def test_maps_of_channels_are_the_same_over_every_protocol(parts, served, tmp_path):
    name, values, result, _ = parts
    expected = [each.heatmap.tobytes() for each in result.explanations[:-1]]
    file = tmp_path / "photo.tif"
    file.write_bytes(tiff(values))

    body = {
        "model": name, "image": base64.b64encode(file.read_bytes()).decode(), "rendering": {"heatmap": True},
        "targets": [{"classIndex": CLASS}], "methods": [{"name": "input_x_gradient", "perChannel": True}],
    }  # fmt: skip
    reply = http_calls.post(served.http_port, http_calls.EXPLAIN, body).json
    assert [base64.b64decode(each["heatmap"]["data"]) for each in reply["explanations"]] == expected
    assert [each["inputChannel"] for each in reply["explanations"]] == list(range(len(expected)))

    arguments = ["explain", str(file), "-o", str(tmp_path / "out"), "--server", served.address, "--model", name]
    arguments += ["--method", "input_x_gradient:per_channel", "--bands", "0", "--target", str(CLASS), "--heatmaps"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    for index, data in enumerate(expected):
        (saved,) = (tmp_path / "out").glob(f"photo.input_x_gradient-channel_{index}.*.npy")
        assert np.load(saved).tobytes() == data

    assert infer(served.address, file.read_bytes(), name, len(expected) - 1) == expected[-1]


def infer(address, image, model, channel):
    """Return the map of one channel over the Open Inference Protocol."""
    request = inference_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="image", datatype="BYTES", shape=[1]).contents.bytes_contents.append(image)
    request.parameters["method"].string_param = "input_x_gradient"
    request.parameters["target"].int64_param = CLASS
    request.parameters["input_channel"].int64_param = channel
    request.outputs.add(name="heatmap")
    with grpc.insecure_channel(address) as line:
        decode = inference_pb2.ModelInferResponse.FromString
        send = line.unary_unary("/inference.GRPCInferenceService/ModelInfer", type(request).SerializeToString, decode)
        return send(request, timeout=60).raw_output_contents[0]


def test_stream_estimate_and_description_know_maps_of_channels(client):
    values = noise("bands", "uint8")
    some = camserve.Method("integrated_gradients", {"steps": 4}, per_channel=[7, 0])
    (streamed,) = client.explain_many([values], model="bands", methods=[some], targets=[CLASS, 1])
    cost = client.estimate_cost(model="bands", methods=[some], targets=[CLASS, 1])

    found = streamed.explanations
    places = [(each.input_channel, each.target.class_index, each.completeness_error) for each in found]
    assert places == [(channel, target, None) for channel in (7, 0) for target in (CLASS, 1)]
    assert cost.explanations == len(found)
    flags = {method.name: method.per_channel for method in client.methods()}
    assert (flags["integrated_gradients"], flags["gradcam"], flags["fullgrad"]) == (True, False, False)


def test_maps_of_channels_are_not_evaluated(client):
    with pytest.raises(camserve.FailedPrecondition, match="all channels of a pixel") as caught:
        client.evaluate(noise("bands", "uint8"), model="bands", methods=[PARTS])

    assert list(caught.value.fields) == ["explain.methods[0].per_channel"]


def test_every_one_of_16_bits_reaches_the_model(client):
    values = noise("bands", "uint16")
    nearly = values.copy()
    nearly[30, 31, 7] ^= 1

    first, second = (client.explain(each, model="bands").explanations[0].receipt for each in (values, nearly))

    assert first.input_sha256 != second.input_sha256


def test_value_range_replaces_the_range_of_the_type_and_is_replayed(client):
    values = (noise("bands", "uint16") >> 4).astype(np.uint16)
    as_floats = values.astype(np.float32) / 4095

    ranged = client.explain(values, model="bands", value_range=(0, 4095))
    floats = client.explain(as_floats, model="bands")

    assert ranged.predictions[0].class_index == floats.predictions[0].class_index
    assert ranged.predictions[0].score == pytest.approx(floats.predictions[0].score, rel=1e-4)
    receipt = camserve.Receipt.from_json(ranged.explanations[0].receipt.to_json())
    assert receipt.value_range == (0, 4095)
    assert client.replay(receipt, values).same


def test_other_calls_take_arrays_too(client):
    values = noise("bands", "float32")

    assert client.features(values, model="bands", rank="activation").image.mode == "RGB"
    assert len(client.inspect(values, model="bands", layers=["layer4"]).layers) == 1
    assert client.evaluate(values, model="bands", metrics=["deletion"]).readings


@pytest.mark.parametrize("dtype", ["uint16", pytest.param("float32", marks=pytest.mark.slow)])
def test_explainer_takes_twelve_channels(modules, dtype):
    values = noise("bands", dtype)
    options = {"size": 64, "crop": "whole", "mean": [0.4] * 12, "std": [0.25] * 12}
    with Explainer(modules["bands"], **options) as explainer:
        result = explainer.explain(values, methods=["gradcam", PARTS], targets=[CLASS], overlay=None)
    found, *parts = (each.heatmap for each in result.explanations)

    exact, single = (plain(modules["bands"], values, dtype)[1] for dtype in (torch.float64, torch.float32))
    assert error_ratio(found, single, exact) <= 1
    exact, single = (gradient_of(modules["bands"], values, dtype) for dtype in (torch.float64, torch.float32))
    assert error_ratio(parts, single, exact) <= 1


def test_weights_of_rgb_are_adapted_as_by_timm(tmp_path):
    """The same values in all channels then give the same outputs, for one channel and for multiples of three."""
    rgb = load(parse("net=torchvision:squeezenet1_1?weights=none&size=32&accelerate=false")).module
    torch.save(rgb.state_dict(), tmp_path / "rgb.pth")
    grey = torch.rand(1, 1, 32, 32, dtype=torch.float64)
    for channels in (1, 4, 12):
        spec = f"net=torchvision:squeezenet1_1?weights={tmp_path}/rgb.pth&size=32&channels={channels}&accelerate=false"
        adapted = load(parse(spec)).module.double()

        found, expected = adapted(grey.expand(1, channels, 32, 32)), rgb.double()(grey.expand(1, 3, 32, 32))
        assert torch.equal(
            adapted.features[0].weight.float(), timm.models.adapt_input_conv(channels, rgb.float().features[0].weight)
        )

        assert channels == 4 or torch.allclose(found, expected, rtol=1e-5)


def with_nan(name):
    values = noise(name, "float32")
    values[5, 6, -1] = np.nan
    return values


def bomb(name):
    """Return a TIFF whose only strip inflates to 16 MB."""
    file = tiff(np.zeros((64, 64, CHANNELS[name]), np.uint8), compression="zlib", rowsperstrip=64)
    (page,) = tifffile.TiffFile(io.BytesIO(file)).pages
    strip = page.tags["StripByteCounts"]
    inflating = zlib.compress(bytes(16 << 20))
    place = page.tags["StripOffsets"].offset + 8
    file = bytearray(file.ljust(len(file) + len(file) % 2, b"\0"))
    struct.pack_into("<I", file, strip.offset + 8, len(inflating))
    struct.pack_into("<I", file, place, len(file))
    return bytes(file) + inflating


REFUSED = {
    "channels": (lambda _: npy(np.zeros((8, 8, 2), np.uint16)), "the image has 2 channels, and the model takes"),
    "nan": (lambda name: npy(with_nan(name)), "the image has pixels that are NaN or infinite"),
    "nan in a TIFF": (lambda name: tiff(with_nan(name)), "the image has pixels that are NaN or infinite"),
    "bomb": (bomb, "the TIFF file is truncated or broken"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("name", CHANNELS)
def test_file_that_does_not_fit_is_refused_over_grpc_and_http(name, make, words, client, served):
    file = make(name)
    with pytest.raises(camserve.InvalidArgument, match=words) as caught:
        client.explain(file, model=name)
    body = {"model": name, "image": base64.b64encode(file).decode()}
    reply = http_calls.post(served.http_port, http_calls.EXPLAIN, body)

    assert list(caught.value.fields) == ["image"]
    assert (reply.status, reply.json["code"]) == (400, "invalid_argument")
    assert words in reply.json["message"]


def test_model_shows_its_channels(client):
    assert {model.name: model.input_channels for model in client.models()} == CHANNELS


def test_receipt_without_a_value_range_is_as_older_clients_write_it(client):
    receipt = client.explain(noise("grey", "uint8"), model="grey").explanations[0].receipt

    assert "value_range" not in json.loads(receipt.to_json())
