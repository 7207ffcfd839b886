"""The Open Inference Protocol: every list, text and number beyond its limit is refused at once, and by its name."""

import math
import time

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor as Kind

from camserve_server.api import oip
from camserve_server.api.codec.sizes import LISTS
from camserve_server.api.oip.tensors import element
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.core.limits import Limits
from robustness import fields, hygiene, nets
from robustness.cost import counting
from support import serving

LIMITS, MANY = Limits(), 10_000
NUMBERS_ALONE = {"InferTensorContents.uint_contents", "InferTensorContents.fp32_contents"}
"""As many as their tensor's shape says, which is looked at; they are bounded by the size of a message."""


def every(rpc, kind=None, chain=()):
    """Yield the way to every field of an RPC's request."""
    for field in (kind or fields.INFERENCE[rpc].input_type).fields:
        here = (*chain, field)
        yield rpc, here
        inner = field.message_type
        if inner is not None:
            yield from every(rpc, inner.fields_by_name["value"].message_type if fields.is_map(field) else inner, here)


WAYS = [way for rpc in fields.INFERENCE for way in every(rpc)]
TEXTS = [way for way in WAYS if way[1][-1].type == Kind.TYPE_STRING and not way[1][-1].is_repeated]
REPEATED = [way for way in WAYS if way[1][-1].is_repeated]


def shown(way):
    return f"{way[0]} {'.'.join(field.name for field in way[1])}"


def _word(field):
    if fields.is_map(field):
        return f'{field.name}["k"]'
    return f"{field.name}[0]" if field.is_repeated else field.name


def path_of(chain):
    """As a refusal names it."""
    words = [_word(field) for field in chain[:-1]]
    return ".".join([*words, chain[-1].name])


def reached(chain, request):
    """Return the message that has the last field of the chain, made on the way."""
    message = request
    for field in chain[:-1]:
        inner = getattr(message, field.name)
        message = inner["k"] if fields.is_map(field) else inner.add() if field.is_repeated else inner
    return message


def empty(rpc):
    return message_factory.GetMessageClass(fields.INFERENCE[rpc].input_type)()


def too_many(way, count):
    rpc, chain = way
    request = empty(rpc)
    message, field = reached(chain, request), chain[-1]
    items = getattr(message, field.name)
    if fields.is_map(field):
        for number in range(count):
            items[f"k{number}"].SetInParent()
    elif field.message_type is not None:
        items.extend([items.add()] * (count - 1))
    else:
        items.extend([b"x" if field.type == Kind.TYPE_BYTES else 1] * count)
    return request


def too_long(way, length):
    rpc, chain = way
    request = empty(rpc)
    setattr(reached(chain, request), chain[-1].name, "/x" * (length // 2) + "x" * (length % 2))
    return request


@pytest.fixture(scope="module")
def served():
    with serving(models=(nets.TINY,), device="cpu", threads=1, admin=True) as one:
        yield one


@pytest.fixture(scope="module")
def line(served):
    with grpc.insecure_channel(served.address) as channel:
        yield channel


@pytest.fixture
def cost(served):
    with counting(served) as counted:
        yield counted


def answered(line, rpc, request):
    """Return the refusal of a request; for a stream, the error message in its answer."""
    packed = request.SerializeToString()
    try:
        if rpc == "ModelStreamInfer":
            (reply,) = line.stream_stream(fields.METHODS[rpc])(iter([packed]), timeout=60)
            said = inference_pb2.ModelStreamInferResponse.FromString(reply).error_message
            return said, None, hygiene.told(said, fields.texts(request))
        line.unary_unary(fields.METHODS[rpc])(packed, timeout=60)
    except grpc.RpcError as error:
        return error.code().name, hygiene.field_of(error), hygiene.faults(error, fields.texts(request))
    return "OK", None, []


def wrongly_refused(line, cases):
    """Return those that were not refused, by their field."""
    bad = {}
    for (rpc, chain), request in cases:
        code, field, wrong = answered(line, rpc, request)
        as_must = field is None and path_of(chain) in code if rpc == "ModelStreamInfer" else field == path_of(chain)
        refused = rpc == "ModelStreamInfer" or code == "INVALID_ARGUMENT"
        if not (as_must and refused) or wrong:
            bad[shown((rpc, chain))] = (code, field, wrong)
    return bad


LISTED = [way for way in REPEATED if way[1][-1].full_name.removeprefix("open_inference.v2.") not in NUMBERS_ALONE]


def test_the_table_holds_every_list_of_the_protocol_but_a_tensors_numbers():
    assert {way[1][-1].full_name for way in LISTED} == {name for name in LISTS if name.startswith("open_inference.")}


@pytest.mark.parametrize("count", [None, MANY])
def test_too_long_list_is_refused_before_any_work(line, count, cost):
    """By one, and by far."""
    cases = [(way, too_many(way, count or getattr(LIMITS, LISTS[way[1][-1].full_name]) + 1)) for way in LISTED]

    assert len(cases) >= 14
    assert wrongly_refused(line, cases) == {}
    assert cost() == {}


@pytest.mark.parametrize("length", [LIMITS.text + 1, 1_000_000])
def test_too_long_text_is_refused_before_any_work(line, length, cost):
    assert len(TEXTS) > 20
    assert wrongly_refused(line, [(way, too_long(way, length)) for way in TEXTS]) == {}
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
    """Yield every number of the parameters at every value that it must not have, in every kind that can hold it."""
    for name, cap in CAPS.items():
        for value in (-1, 0, cap + 1, 2**31 - 1, math.nan, math.inf, -math.inf):
            if (name, value) in LEGAL or (name == "target" and not isinstance(value, int)):
                continue  # a target that is no whole number is not even a class
            yield name, "int64_param" if isinstance(value, int) else "double_param", value
            if name != "target":
                yield name, "string_param", str(value)


def test_parameter_out_of_range_is_refused_before_any_work(line, cost):
    bad, count = {}, 0
    for name, kind, value in out_of_range():
        request = photo(method=("string_param", "smoothgrad"), **{name: (kind, value)})
        code, field, wrong = answered(line, "ModelInfer", request)
        count += 1
        known = code in ("INVALID_ARGUMENT", "NOT_FOUND" if name == "target" else "INVALID_ARGUMENT")
        if not known or field != f'parameters["{name}"]' or wrong:
            bad[name, kind, value] = code, field, wrong

    assert count > 50
    assert bad == {}
    assert cost() == {}


def test_shape_without_contents_is_refused_before_any_work(line, cost):
    for datatype in ("BYTES", "UINT8", "FP32"):
        for shape in ([2**62, 2**62, 3], [2**62, 1], [1, 1 << 40, 1 << 20, 3]):
            request = photo()
            request.inputs[0].datatype = datatype
            request.inputs[0].shape[:] = shape
            code, field, wrong = answered(line, "ModelInfer", request)

            assert (code, field.partition(".")[0], wrong) == ("INVALID_ARGUMENT", "inputs[0]", [])
    assert cost() == {}


def test_pixels_have_the_limits_of_a_photo(line):
    request = inference_pb2.ModelInferRequest(raw_input_contents=[bytes(3 * 20_000)])
    request.inputs.add(name="image", datatype="UINT8", shape=[1, 20_000, 3])
    with pytest.raises(grpc.RpcError) as caught:
        line.unary_unary(fields.METHODS["ModelInfer"])(request.SerializeToString(), timeout=10)

    assert f"{LIMITS.side:,} on a side are accepted" in caught.value.details()
    assert hygiene.field_of(caught.value) == "inputs[0]"


def test_a_stream_that_nobody_uses_is_ended_and_a_message_that_is_none_too():
    with (
        serving(models=(nets.TINY,), device="cpu", threads=1, idle_seconds=0.3) as served,
        grpc.insecure_channel(served.address) as channel,
    ):
        asked = channel.stream_stream(f"/{oip.NAME}/ModelStreamInfer")
        hold = iter(lambda: time.sleep(5), None)
        with pytest.raises(grpc.RpcError) as caught:
            next(asked(hold, timeout=10))
        idle = caught.value
        with pytest.raises(grpc.RpcError) as caught:
            next(asked(iter([b"\xff"]), timeout=10))

    assert (idle.code(), idle.details()) == (grpc.StatusCode.UNAVAILABLE, "the stream was idle for 0.3 s")
    assert caught.value.details() == "the message is not a inference.ModelInferRequest"
    assert hygiene.faults(caught.value) == []
