"""Messages that are no messages, and what every refusal may say."""

import io
import logging

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from camserve.v1 import evaluate_pb2, explain_pb2, models_pb2
from camserve_server.api import oip
from camserve_server.core import logs
from robustness import hygiene, nets
from support import serving, wait_until

SERVICES = (
    explain_pb2.DESCRIPTOR.services_by_name["ExplainService"],
    evaluate_pb2.DESCRIPTOR.services_by_name["EvaluateService"],
    models_pb2.DESCRIPTOR.services_by_name["ModelService"],
    oip.SERVICE,
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
RPCS = {f"/{oip.known_as(service.full_name)}/{rpc.name}": rpc for service in SERVICES for rpc in service.methods}
NO_MESSAGES = (b"\xff\xff\xff", b"\x0a", b"\x0a\x05ab", b"\x0f", b"\x00", b"\x0a\x02\xc3\x28")
"""A varint without end, a field without its value, one cut short, a wire type and a field number that there are not,
and text that is no UTF-8 (in all of our messages field 1 is text, save one whose field 1 is a message)."""


@pytest.fixture(scope="module")
def line():
    with (
        serving(models=(nets.TINY,), device="cpu", threads=1) as served,
        grpc.insecure_channel(served.address) as channel,
    ):
        yield channel


@pytest.fixture
def written(monkeypatch):
    """What is logged meanwhile."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logs.TextFormatter())
    logger = logging.getLogger("camserve_server")
    monkeypatch.setattr(logger, "handlers", [handler])
    level = logger.level
    logger.setLevel(logging.INFO)
    yield text
    logger.setLevel(level)


def sent(line, method, *messages, metadata=()):
    """Send bytes as they are; return the replies, or the error."""
    rpc = RPCS[method]
    shape = f"{'stream' if rpc.client_streaming else 'unary'}_{'stream' if rpc.server_streaming else 'unary'}"
    call = getattr(line, shape)(method)
    try:
        replies = call(iter(messages) if rpc.client_streaming else messages[0], timeout=10, metadata=metadata)
        return list(replies) if rpc.server_streaming else [replies]
    except grpc.RpcError as error:
        return error


@pytest.mark.parametrize("method", RPCS)
def test_bytes_that_are_no_message_are_an_invalid_argument_of_every_rpc(line, method):
    kind = oip.known_as(RPCS[method].input_type.full_name)
    for data in NO_MESSAGES[:5]:
        error = sent(line, method, data, metadata=(("x-request-id", "mine"),))

        assert (error.code(), error.details()) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the message is not a {kind}",
        ), data
        assert hygiene.faults(error) == []
        assert dict(error.trailing_metadata())["x-request-id"] == "mine"


def test_text_that_is_no_utf_8_is_an_invalid_argument(line):
    error = sent(line, "/camserve.v1.ExplainService/Explain", NO_MESSAGES[5])

    assert error.details() == "the message is not a camserve.v1.ExplainRequest"


def test_what_came_before_the_broken_message_of_a_stream_is_answered(line):
    sound = explain_pb2.ExplainStreamRequest(request_id="first").SerializeToString()
    call = line.stream_stream("/camserve.v1.ExplainService/ExplainStream")(iter([sound, b"\xff"]), timeout=10)
    reply = explain_pb2.ExplainStreamResponse.FromString(next(call))
    with pytest.raises(grpc.RpcError) as caught:
        next(call)

    assert (reply.request_id, reply.error.message) == ("first", "the image is empty")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert hygiene.faults(caught.value) == []


def test_the_log_has_a_line_for_a_message_that_cannot_be_parsed(line, written):
    sent(line, "/camserve.v1.ExplainService/InspectLayers", b"\xff", metadata=(("x-request-id", "broken"),))

    wait_until(lambda: "request_id=broken" in written.getvalue())  # the line is written after the answer
    assert "InspectLayers code=INVALID_ARGUMENT" in written.getvalue()
    assert "the message is not a camserve.v1.InspectLayersRequest" in written.getvalue()


class Refusal(Exception):
    """A refusal as gRPC's client shows it, made up."""

    def __init__(self, words, request_id="id", inner="id", violation=""):
        super().__init__(words)
        status = status_pb2.Status(code=code_pb2.Code.INVALID_ARGUMENT, message=words)
        status.details.add().Pack(error_details_pb2.RequestInfo(request_id=inner))
        bad = [error_details_pb2.BadRequest.FieldViolation(field="image", description=violation)]
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=bad))
        self._trailers = [("x-request-id", request_id), ("grpc-status-details-bin", status.SerializeToString())]

    def details(self):
        return self.args[0]

    def code(self):
        return grpc.StatusCode.INVALID_ARGUMENT

    def trailing_metadata(self):
        return self._trailers


PLANTED = {
    "cannot open /srv/models/resnet.pth": ["a path"],
    "see ~/models": ["a path"],
    "see ../weights.pth": ["a path"],
    r"cannot open C:\models": ["a path"],
    'File "servicer.py", line 3': ["a traceback"],
    "ValueError: no": ["a traceback"],
    "torch.OutOfMemory": ["a module"],
    "Unexpected <class 'google.protobuf.message.DecodeError'>": ["a traceback", "a module"],
    "camserve_server fell": ["a module"],
    "a lock object at 0x7f21aa00": ["an address in memory"],
    "no answer of 10.0.0.7": ["an address of a machine"],
    "x" * 513: ["more than 512 bytes"],
    "": ["no words"],
}


@pytest.mark.parametrize("words", PLANTED)
def test_what_must_not_be_told_is_seen(words):
    assert hygiene.faults(Refusal(words)) == PLANTED[words]
    if words:
        assert hygiene.faults(Refusal("no", violation=words)) == PLANTED[words]


def test_a_refusal_without_its_id_is_seen_and_one_that_is_as_it_should_be_passes():
    right = Refusal("unknown layer: resnet18 has conv1, layer4.1.conv2; 1 to 5, 0.5 and 1/3 of it (did you mean?)")

    assert hygiene.faults(right) == []
    assert hygiene.field_of(right) == "image"
    assert hygiene.faults(Refusal("no", request_id="")) == ["no request id"]
    assert hygiene.faults(Refusal("no", inner="another")) == ["no request id"]


def test_what_the_caller_said_may_be_said_back():
    echo = 'unknown model "/etc/passwd": the server has tiny'

    assert hygiene.told(echo) == ["a path"]
    assert hygiene.told(echo, sent=["/etc/passwd"]) == []
    assert hygiene.told(f'unknown model "{"/" * 63}…"', sent=["/" * 1000]) == []
