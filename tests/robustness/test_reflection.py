"""Reflection: questions that are too long, hostile names, streams that are opened and not used."""

import asyncio

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2

from camserve_server.api import health, reflection
from camserve_server.core import errors
from robustness import error_checks, nets
from support import serving

ASK = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
Question = reflection_pb2.ServerReflectionRequest
NAMES = ("", ".", "..", "\0", "../../etc/passwd", "x." * 1000, "é" * 1000, "camserve.v1.ExplainService.", "a\nb")
NUMBERS = (-1, 0, 1, 19_000, 2**29, 2**31 - 1)
KINDS = ("google.protobuf.FieldOptions", "camserve.v1.ExplainRequest", "camserve.v1.ExplainService", *NAMES)
EXTENSIONS = [{"containing_type": kind, "extension_number": number} for kind in KINDS for number in NUMBERS]
HOSTILE = (
    Question(),
    Question(host="x" * 1000),
    *(Question(**{field: name}) for name in NAMES for field in ("file_by_filename", "file_containing_symbol")),
    *(Question(all_extension_numbers_of_type=name) for name in KINDS),
    *(Question(file_containing_extension=one) for one in EXTENSIONS),
)


@pytest.fixture(scope="module")
def line():
    with (
        serving(models=(nets.TINY,), device="cpu", threads=1) as served,
        grpc.insecure_channel(served.address) as channel,
    ):
        yield channel.stream_stream(ASK)


def asked(line, *questions):
    replies = line(iter([one.SerializeToString() for one in questions]), timeout=60)
    return [reflection_pb2.ServerReflectionResponse.FromString(reply) for reply in replies]


def test_every_hostile_question_is_answered_and_nothing_of_the_inside_told(line):
    replies = asked(line, *HOSTILE)

    assert [one.original_request for one in replies] == list(HOSTILE)
    told = [one.error_response.error_message for one in replies if one.HasField("error_response")]
    assert len(told) > len(HOSTILE) // 2
    assert [text for text in told if error_checks.leaks(text)] == []


def test_a_question_that_is_too_long_is_refused_after_those_before_it_are_answered(line):
    for field in ("file_by_filename", "file_containing_symbol", "all_extension_numbers_of_type", "host"):
        long = Question(**{field: "x" * health.MAX_MESSAGE_BYTES}).SerializeToString()
        replies, answered = line(iter([Question(list_services="").SerializeToString(), long]), timeout=60), []
        with pytest.raises(grpc.RpcError) as caught:
            answered.extend(replies)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_checks.faults(caught.value) == []
        assert len(answered) == 1


async def questions(asks):
    """Ask so often, and then nothing for ever."""
    for _ in range(asks):
        yield Question(list_services="")
    await asyncio.Event().wait()


async def test_a_stream_without_questions_is_ended():
    servicer = reflection.ReflectionServicer(("any",), descriptor_pool.Default(), idle=0.05)
    answers = servicer.ServerReflectionInfo(questions(3), None)
    for _ in range(3):
        assert (await anext(answers)).list_services_response.service
    with pytest.raises(errors.Unavailable):
        await anext(answers)


def test_many_questions_on_many_streams_leave_the_others_their_turn(line):
    """One that is asked while they are answered has its answer; so has each of theirs."""
    many = [line(iter([one.SerializeToString() for one in HOSTILE]), timeout=60) for _ in range(20)]
    assert len(asked(line, Question(list_services=""))) == 1
    assert {len(list(replies)) for replies in many} == {len(HOSTILE)}
