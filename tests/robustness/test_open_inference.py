"""Open Inference Protocol: lists, texts and numbers beyond their limits are refused before any work, and named."""

import math
import threading

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor as Kind

from camserve_server.api import oip
from camserve_server.api.codec.sizes import LISTS
from camserve_server.api.oip.tensors import element
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.core.limits import Limits
from robustness import error_checks, fields, nets
from robustness.cost import counting
from support import serving

LIMITS, MANY = Limits(), 10_000
TENSOR_NUMBERS = {"InferTensorContents.uint_contents", "InferTensorContents.fp32_contents"}
"""Lists of numbers, limited by the tensor's shape and the message's size."""


def field_paths(rpc, kind=None, chain=()):
    """Yield the RPC and the chain of fields to every field of its request."""
    for field in (kind or fields.INFERENCE[rpc].input_type).fields:
        longer = (*chain, field)
        yield rpc, longer
        inner = field.message_type
        if inner is not None:
            yield from field_paths(
                rpc, inner.fields_by_name["value"].message_type if fields.is_map(field) else inner, longer
            )


PATHS = [path for rpc in fields.INFERENCE for path in field_paths(rpc)]
TEXTS = [path for path in PATHS if path[1][-1].type == Kind.TYPE_STRING and not path[1][-1].is_repeated]
REPEATED = [path for path in PATHS if path[1][-1].is_repeated]


def label(path):
    return f"{path[0]} {'.'.join(field.name for field in path[1])}"


def _path_part(field):
    if fields.is_map(field):
        return f'{field.name}["k"]'
    return f"{field.name}[0]" if field.is_repeated else field.name


def path_of(chain):
    """Return the path of a field as errors name it."""
    parts = [_path_part(field) for field in chain[:-1]]
    return ".".join([*parts, chain[-1].name])


def parent_message(chain, request):
    """Return the message that has the last field of the chain, after creating the messages above it."""
    message = request
    for field in chain[:-1]:
        inner = getattr(message, field.name)
        message = inner["k"] if fields.is_map(field) else inner.add() if field.is_repeated else inner
    return message


def empty_request(rpc):
    return message_factory.GetMessageClass(fields.INFERENCE[rpc].input_type)()


def too_many(path, count):
    rpc, chain = path
    request = empty_request(rpc)
    message, field = parent_message(chain, request), chain[-1]
    items = getattr(message, field.name)
    if fields.is_map(field):
        for number in range(count):
            items[f"k{number}"].SetInParent()
    elif field.message_type is not None:
        items.extend([items.add()] * (count - 1))
    else:
        items.extend([b"x" if field.type == Kind.TYPE_BYTES else 1] * count)
    return request


def too_long(path, length):
    rpc, chain = path
    request = empty_request(rpc)
    setattr(parent_message(chain, request), chain[-1].name, "/x" * (length // 2) + "x" * (length % 2))
    return request


@pytest.fixture(scope="module")
def served():
    with serving(models=(nets.TINY,), device="cpu", threads=1, admin=True) as server:
        yield server


@pytest.fixture(scope="module")
def channel(served):
    with grpc.insecure_channel(served.address) as channel:
        yield channel


@pytest.fixture
def cost(served):
    with counting(served) as counts:
        yield counts


def send(channel, rpc, request):
    """Send a request; return the code, field and faults of its error, or for a stream the message in its reply."""
    packed = request.SerializeToString()
    try:
        if rpc == "ModelStreamInfer":
            (reply,) = channel.stream_stream(fields.METHODS[rpc])(iter([packed]))
            message = inference_pb2.ModelStreamInferResponse.FromString(reply).error_message
            return message, None, error_checks.leaks(message, fields.texts(request))
        channel.unary_unary(fields.METHODS[rpc])(packed)
    except grpc.RpcError as error:
        return error.code().name, error_checks.field_of(error), error_checks.faults(error, fields.texts(request))
    return "OK", None, []


def unexpected(channel, cases):
    """Return the outcomes of the cases that were not refused with their field."""
    bad = {}
    for (rpc, chain), request in cases:
        code, field, wrong = send(channel, rpc, request)
        is_named = field is None and path_of(chain) in code if rpc == "ModelStreamInfer" else field == path_of(chain)
        is_refused = rpc == "ModelStreamInfer" or code == "INVALID_ARGUMENT"
        if not (is_named and is_refused) or wrong:
            bad[label((rpc, chain))] = (code, field, wrong)
    return bad


LISTED = [path for path in REPEATED if path[1][-1].full_name.removeprefix("open_inference.v2.") not in TENSOR_NUMBERS]


def test_table_has_every_list_of_the_protocol_but_tensor_numbers():
    assert {path[1][-1].full_name for path in LISTED} == {name for name in LISTS if name.startswith("open_inference.")}


@pytest.mark.parametrize("count", [None, pytest.param(MANY, marks=pytest.mark.slow)])
def test_too_long_list_is_refused_before_any_work(channel, count, cost):
    """Lists are too long by one element and by thousands."""
    cases = [(path, too_many(path, count or getattr(LIMITS, LISTS[path[1][-1].full_name]) + 1)) for path in LISTED]

    assert len(cases) >= 14
    assert unexpected(channel, cases) == {}
    assert cost() == {}


@pytest.mark.parametrize("length", [LIMITS.text + 1, 1_000_000])
def test_too_long_text_is_refused_before_any_work(channel, length, cost):
    assert len(TEXTS) > 20
    assert unexpected(channel, [(path, too_long(path, length)) for path in TEXTS]) == {}
    assert cost() == {}


def photo(**parameters):
    request = inference_pb2.ModelInferRequest(raw_input_contents=[element(fields.PHOTO)])
    request.inputs.add(name="image", datatype="BYTES", shape=[1])
    for name, (kind, value) in parameters.items():
        setattr(request.parameters[name], kind, value)
    return request


CAPS = {"alpha": 1, "max_side": 16_384, "quality": 100, "samples": 512, "target": 4, "timeout": 2**32 - 1}
LEGAL = {("alpha", 0), ("max_side", 0), ("quality", 0), ("target", 0), ("timeout", 0), ("timeout", 2**31 - 1)}


def out_of_range():
    """Yield invalid values of every numeric parameter, in every kind of value that can hold them."""
    for name, cap in CAPS.items():
        for value in (-1, 0, cap + 1, 2**31 - 1, math.nan, math.inf, -math.inf):
            if (name, value) in LEGAL or (name == "target" and not isinstance(value, int)):
                continue  # a target that is not an integer names no class
            yield name, "int64_param" if isinstance(value, int) else "double_param", value
            if name != "target":
                yield name, "string_param", str(value)


def test_parameter_out_of_range_is_refused_before_any_work(channel, cost):
    bad, count = {}, 0
    for name, kind, value in out_of_range():
        request = photo(method=("string_param", "smoothgrad"), **{name: (kind, value)})
        code, field, wrong = send(channel, "ModelInfer", request)
        count += 1
        is_expected = code in ("INVALID_ARGUMENT", "NOT_FOUND" if name == "target" else "INVALID_ARGUMENT")
        if not is_expected or field != f'parameters["{name}"]' or wrong:
            bad[name, kind, value] = code, field, wrong

    assert count > 50
    assert bad == {}
    assert cost() == {}


def test_shape_without_contents_is_refused_before_any_work(channel, cost):
    for datatype in ("BYTES", "UINT8", "FP32"):
        for shape in ([2**62, 2**62, 3], [2**62, 1], [1, 1 << 40, 1 << 20, 3]):
            request = photo()
            request.inputs[0].datatype = datatype
            request.inputs[0].shape[:] = shape
            code, field, wrong = send(channel, "ModelInfer", request)

            assert (code, field.partition(".")[0], wrong) == ("INVALID_ARGUMENT", "inputs[0]", [])
    assert cost() == {}


def test_pixels_have_the_limits_of_a_photo(channel):
    request = inference_pb2.ModelInferRequest(raw_input_contents=[bytes(3 * 20_000)])
    request.inputs.add(name="image", datatype="UINT8", shape=[1, 20_000, 3])
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(fields.METHODS["ModelInfer"])(request.SerializeToString())

    assert f"{LIMITS.side:,} on a side are accepted" in caught.value.details()
    assert error_checks.field_of(caught.value) == "inputs[0]"


STREAM_INFER = f"/{oip.NAME}/ModelStreamInfer"


def test_idle_stream_ends():
    settings = {"idle_seconds": 0.1}  # real timeout: the stream sends nothing until the server has ended it
    ended = threading.Event()
    with (
        serving(models=(nets.TINY,), device="cpu", threads=1, **settings) as served,
        grpc.insecure_channel(served.address) as channel,
    ):
        replies = channel.stream_stream(STREAM_INFER)(iter(ended.wait, True))
        with pytest.raises(grpc.RpcError) as caught:
            next(replies)
        ended.set()

    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "the stream was idle for 0.1 s",
    )
    assert error_checks.faults(caught.value) == []


def test_invalid_message_ends_a_stream(channel):
    with pytest.raises(grpc.RpcError) as caught:
        next(channel.stream_stream(STREAM_INFER)(iter([b"\xff"])))

    assert caught.value.details() == "the message is not a inference.ModelInferRequest"
    assert error_checks.faults(caught.value) == []
