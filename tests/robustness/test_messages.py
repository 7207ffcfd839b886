"""Invalid messages, and the checks of error messages."""

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
from robustness import error_checks
from support import wait_until

SERVICES = (
    explain_pb2.DESCRIPTOR.services_by_name["ExplainService"],
    evaluate_pb2.DESCRIPTOR.services_by_name["EvaluateService"],
    models_pb2.DESCRIPTOR.services_by_name["ModelService"],
    oip.SERVICE,
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
RPCS = {f"/{oip.known_as(service.full_name)}/{rpc.name}": rpc for service in SERVICES for rpc in service.methods}
INVALID = (b"\xff\xff\xff", b"\x0a", b"\x0a\x05ab", b"\x0f", b"\x00", b"\x0a\x02\xc3\x28")
"""A varint without end, a field without a value, a truncated field, an unknown wire type, the field number 0, and text
that is not UTF-8. In all of our messages but one, field 1 is text; in that one it is a message."""


@pytest.fixture
def log_text(monkeypatch):
    """The server's log as text."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logs.TextFormatter())
    logger = logging.getLogger("camserve_server")
    monkeypatch.setattr(logger, "handlers", [handler])
    level = logger.level
    logger.setLevel(logging.INFO)
    yield text
    logger.setLevel(level)


def send(channel, method, *messages, metadata=()):
    """Send bytes without serializing them; return the replies or the error."""
    rpc = RPCS[method]
    shape = f"{'stream' if rpc.client_streaming else 'unary'}_{'stream' if rpc.server_streaming else 'unary'}"
    call = getattr(channel, shape)(method)
    try:
        replies = call(iter(messages) if rpc.client_streaming else messages[0], metadata=metadata)
        return list(replies) if rpc.server_streaming else [replies]
    except grpc.RpcError as error:
        return error


@pytest.mark.parametrize("method", RPCS)
def test_invalid_bytes_are_refused_by_every_rpc(channel, method):
    kind = oip.known_as(RPCS[method].input_type.full_name)
    for data in INVALID[:5]:
        error = send(channel, method, data, metadata=(("x-request-id", "custom-id"),))

        assert (error.code(), error.details()) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the message is not a {kind}",
        ), data
        assert error_checks.faults(error) == []
        assert dict(error.trailing_metadata())["x-request-id"] == "custom-id"


def test_text_that_is_not_utf_8_is_refused(channel):
    error = send(channel, "/camserve.v1.ExplainService/Explain", INVALID[5])

    assert error.details() == "the message is not a camserve.v1.ExplainRequest"


def test_messages_before_an_invalid_one_of_a_stream_are_answered(channel):
    valid = explain_pb2.ExplainStreamRequest(request_id="first").SerializeToString()
    call = channel.stream_stream("/camserve.v1.ExplainService/ExplainStream")(iter([valid, b"\xff"]))
    reply = explain_pb2.ExplainStreamResponse.FromString(next(call))
    with pytest.raises(grpc.RpcError) as caught:
        next(call)

    assert (reply.request_id, reply.error.message) == ("first", "the image is empty")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_checks.faults(caught.value) == []


def test_invalid_message_is_logged(channel, log_text):
    send(channel, "/camserve.v1.ExplainService/InspectLayers", b"\xff", metadata=(("x-request-id", "broken"),))

    wait_until(lambda: "request_id=broken" in log_text.getvalue())  # the line is written after the answer
    assert "InspectLayers code=INVALID_ARGUMENT" in log_text.getvalue()
    assert "the message is not a camserve.v1.InspectLayersRequest" in log_text.getvalue()


class Refusal(Exception):
    """An error as gRPC's client raises it, with planted faults."""

    def __init__(self, message, request_id="id", inner="id", violation=""):
        super().__init__(message)
        status = status_pb2.Status(code=code_pb2.Code.INVALID_ARGUMENT, message=message)
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
    "": ["no message"],
}


@pytest.mark.parametrize("message", PLANTED)
def test_leaks_in_an_error_message_are_detected(message):
    assert error_checks.faults(Refusal(message)) == PLANTED[message]
    if message:
        assert error_checks.faults(Refusal("no", violation=message)) == PLANTED[message]


def test_missing_request_id_is_detected_and_a_valid_error_passes():
    valid = Refusal("unknown layer: resnet18 has conv1, layer4.1.conv2; 1 to 5, 0.5 and 1/3 of it (did you mean?)")

    assert error_checks.faults(valid) == []
    assert error_checks.field_of(valid) == "image"
    assert error_checks.faults(Refusal("no", request_id="")) == ["no request id"]
    assert error_checks.faults(Refusal("no", inner="another")) == ["no request id"]


def test_error_may_repeat_the_callers_text():
    echo = 'unknown model "/etc/passwd": the server has tiny'

    assert error_checks.leaks(echo) == ["a path"]
    assert error_checks.leaks(echo, sent=["/etc/passwd"]) == []
    assert error_checks.leaks(f'unknown model "{"/" * 63}…"', sent=["/" * 1000]) == []
