"""Reflection: too long requests, hostile names and idle streams."""

import asyncio

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2

from camserve_server.api import health, reflection
from camserve_server.core import errors
from robustness import error_checks
from support import StoppedClock

METHOD = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
Request = reflection_pb2.ServerReflectionRequest
NAMES = ("", ".", "..", "\0", "../../etc/passwd", "x." * 1000, "é" * 1000, "camserve.v1.ExplainService.", "a\nb")
NUMBERS = (-1, 0, 1, 19_000, 2**29, 2**31 - 1)
KINDS = ("google.protobuf.FieldOptions", "camserve.v1.ExplainRequest", "camserve.v1.ExplainService", *NAMES)
EXTENSIONS = [{"containing_type": kind, "extension_number": number} for kind in KINDS for number in NUMBERS]
HOSTILE = (
    Request(),
    Request(host="x" * 1000),
    *(Request(**{field: name}) for name in NAMES for field in ("file_by_filename", "file_containing_symbol")),
    *(Request(all_extension_numbers_of_type=name) for name in KINDS),
    *(Request(file_containing_extension=extension) for extension in EXTENSIONS),
)


@pytest.fixture(scope="module")
def reflect(channel):
    """The reflection call of a server."""
    return channel.stream_stream(METHOD)


def send(reflect, *requests):
    replies = reflect(iter([request.SerializeToString() for request in requests]))
    return [reflection_pb2.ServerReflectionResponse.FromString(reply) for reply in replies]


def test_hostile_requests_are_answered_without_internals(reflect):
    replies = send(reflect, *HOSTILE)

    assert [reply.original_request for reply in replies] == list(HOSTILE)
    messages = [reply.error_response.error_message for reply in replies if reply.HasField("error_response")]
    assert len(messages) > len(HOSTILE) // 2
    assert [text for text in messages if error_checks.leaks(text)] == []


def test_too_long_request_is_refused_after_earlier_ones_are_answered(reflect):
    for field in ("file_by_filename", "file_containing_symbol", "all_extension_numbers_of_type", "host"):
        long = Request(**{field: "x" * health.MAX_MESSAGE_BYTES}).SerializeToString()
        replies, received = reflect(iter([Request(list_services="").SerializeToString(), long])), []
        with pytest.raises(grpc.RpcError) as caught:
            received.extend(replies)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_checks.faults(caught.value) == []
        assert len(received) == 1


async def requests(count):
    """Yield `count` requests, and then wait for ever."""
    for _ in range(count):
        yield Request(list_services="")
    await asyncio.Event().wait()


async def test_idle_stream_is_ended():
    servicer = reflection.ReflectionServicer(("any",), descriptor_pool.Default(), idle=60)
    answers = servicer.ServerReflectionInfo(requests(3), None)
    with StoppedClock() as clock:
        for _ in range(3):
            assert (await anext(answers)).list_services_response.service
            clock.advance(59)
        waiting = asyncio.ensure_future(anext(answers))
        await asyncio.sleep(0)
        clock.advance(60)
        with pytest.raises(errors.Unavailable, match="idle for 60 s"):
            await waiting


def test_many_streams_of_requests_do_not_block_another(reflect):
    """All requests are answered, also one that is sent while the others are in progress."""
    streams = [reflect(iter([request.SerializeToString() for request in HOSTILE])) for _ in range(8)]
    assert len(send(reflect, Request(list_services=""))) == 1
    assert {len(list(replies)) for replies in streams} == {len(HOSTILE)}
