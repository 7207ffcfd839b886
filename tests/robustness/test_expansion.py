"""Small messages that would be large in memory are refused before they are parsed, without blocking the event loop."""

import asyncio
import gzip
import threading
import zlib
from dataclasses import replace
from typing import ClassVar

import grpc
import pytest
from google.protobuf.message import DecodeError

from camserve.v1 import explain_pb2, models_pb2
from camserve_server.api import deserialization
from camserve_server.api.codec.footprint import footprint, shape_of
from camserve_server.api.connection_limits import ReceiveLimiter
from camserve_server.api.oip.v2 import inference_pb2
from robustness import error_checks, nets, process_audit
from support import PHOTOS, serving, wait_in_loop_until, wait_until

MIB = 2**20
EXPLAIN, EVALUATE = "/camserve.v1.ExplainService/Explain", "/camserve.v1.EvaluateService/Evaluate"
INFER, HEALTH = "/inference.GRPCInferenceService/ModelInfer", "/grpc.health.v1.Health/Check"
STREAM = "/camserve.v1.ExplainService/ExplainStream"
LIST = "/camserve.v1.ModelService/ListModels"


def delimited(number, content):
    """Encode a field of bytes, text, numbers or a message."""
    length, packed = len(content), bytearray()
    while length > 0x7F:
        packed.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([number << 3 | 2]) + bytes(packed) + bytes([length]) + content


def methods():
    """Return 8 MiB of methods without a name."""
    return delimited(3, b"") * (4 * MIB - 8)


def numbers(count):
    """Return pixels of a ModelInfer request as single numbers, which take 8 bytes each in memory."""
    return delimited(5, delimited(5, delimited(4, b"\1" * count)))


BOMBS = {
    "methods": (EXPLAIN, methods),
    "methods of an evaluation": (EVALUATE, lambda: delimited(1, methods()[: 7 * MIB])),
    "targets": (EXPLAIN, lambda: delimited(4, delimited(3, b"")) * 2 * MIB),
    "layers": (EXPLAIN, lambda: delimited(6, b"") * 4 * MIB),
    "parameters": (EXPLAIN, lambda: delimited(3, delimited(2, b"") * 3 * MIB)),
    "tensors": (INFER, lambda: delimited(5, b"") * 4 * MIB),
    "numbers": (INFER, lambda: numbers(7 * MIB)),
    "unknown fields": (LIST, lambda: delimited(9, b"") * 4 * MIB),
    "health": (HEALTH, lambda: b"\x10\x00" * 4 * MIB),
}
"""Messages of 8 MiB, or slightly less, which gzip packs into 8 kB."""


def refusal(channel, method, data, compression=grpc.Compression.Gzip):
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method)(data, compression=compression)
    return caught.value


@pytest.mark.parametrize("bomb", BOMBS)
def test_message_that_needs_too_much_memory_is_never_parsed(channel, bomb, monkeypatch):
    parsed = []
    parse_message = deserialization.MessageParser.parse

    async def recording(self, data, form, caller):
        def record(plain):
            parsed.append(len(plain))
            return form.parse(plain)

        return await parse_message(self, data, replace(form, parse=record), caller)

    monkeypatch.setattr(deserialization.MessageParser, "parse", recording)
    method, make = BOMBS[bomb]
    error = refusal(channel, method, make())

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().endswith("is the limit") or "which is the limit" in error.details()
    assert error_checks.faults(error) == []
    assert parsed == []


def test_other_calls_are_answered_while_a_large_message_is_counted(channel, monkeypatch):
    counting, go_on = threading.Event(), threading.Event()

    count = deserialization.MessageParser._size

    def blocking_count(self, data, form):
        counting.set()
        assert go_on.wait(60)
        return count(self, data, form)

    monkeypatch.setattr(deserialization.MessageParser, "_size", blocking_count)
    attack = channel.unary_unary(EXPLAIN).future(methods(), compression=grpc.Compression.Gzip)
    assert counting.wait(60)
    responses = [models_pb2.ListModelsResponse.FromString(channel.unary_unary(LIST)(b"")) for _ in range(3)]
    before = attack.done()
    go_on.set()

    assert attack.exception().code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [len(response.models) for response in responses] == [1, 1, 1]
    assert not before


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_ordinary_compressed_request_is_answered(channel, compression):
    request = explain_pb2.ExplainRequest(image=PHOTOS["chelsea"].read_bytes())
    request.rendering.heatmap = True
    call = channel.unary_unary(EXPLAIN)
    replies = [
        explain_pb2.ExplainResponse.FromString(call(request.SerializeToString(), compression=each))
        for each in (compression, grpc.Compression.NoCompression)
    ]

    assert len(replies[0].explanations) == 1
    assert replies[0].explanations[0].heatmap == replies[1].explanations[0].heatmap


def test_compressed_stream_is_answered(channel):
    items = [explain_pb2.ExplainStreamRequest(request_id=str(number)) for number in range(3)]
    call = channel.stream_stream(STREAM)
    replies = call((item.SerializeToString() for item in items), compression=grpc.Compression.Gzip)

    assert sorted(explain_pb2.ExplainStreamResponse.FromString(reply).request_id for reply in replies) == [
        "0",
        "1",
        "2",
    ]


@pytest.mark.parametrize(
    "broken", [gzip.compress(b"x" * 1000)[:-20], b"\x1f\x8b", gzip.compress(b"\xff"), b"\x78\x9c\xff"]
)
def test_invalid_compressed_message_is_refusal(channel, broken):
    error = refusal(channel, EXPLAIN, broken, grpc.Compression.NoCompression)

    assert (error.code(), error.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "the message is not a camserve.v1.ExplainRequest",
    )


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_message_above_the_limit_once_unpacked_is_refusal(channel, pack):
    error = refusal(channel, EXPLAIN, pack(bytes(17 * MIB)), grpc.Compression.NoCompression)

    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error_checks.faults(error) == []


class RecordingParser(deserialization.MessageParser):
    """Parser whose messages are bytes, and which records how many bytes are reserved."""

    instances: ClassVar[list["RecordingParser"]] = []

    def __init__(self, *args):
        super().__init__(*args)
        self.instances.append(self)

    @property
    def taken(self):
        return self._memory.taken


async def test_all_messages_together_stay_within_the_memory_budget():
    parser, form, highest = RecordingParser(2000, 10_000), deserialization.Form({}, bytes), 0
    done = []

    async def parse(size):
        nonlocal highest
        message, release = await parser.parse(delimited(1, bytes(size)), form, "a")
        highest = max(highest, parser.taken)
        await asyncio.sleep(0)
        done.append(len(message))
        release()

    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(parse(900 + number))

    assert len(done) == 6
    assert 5000 < highest <= 10_000
    assert parser.taken == 0


async def test_one_callers_messages_leave_memory_for_another_callers():
    parser, form = RecordingParser(1000, 6000), deserialization.Form({}, bytes)

    async def send(caller):
        return await parser.parse(delimited(1, bytes(600)), form, caller)

    greedy = [asyncio.ensure_future(send("a")) for _ in range(6)]
    await asyncio.sleep(0)  # each takes its memory at once, or waits for it
    modest = await send("b")

    assert [task.done() for task in greedy].count(True) == 2
    assert len(modest[0]) == 603


async def test_message_waits_until_there_is_memory_for_it():
    parser, form = RecordingParser(1000, 4000), deserialization.Form({}, bytes)
    _, release = await parser.parse(delimited(1, bytes(1600)), form, "a")
    second = asyncio.ensure_future(parser.parse(delimited(1, bytes(700)), form, "a"))
    await wait_in_loop_until(lambda: parser._memory._waiting["a"])
    before = second.done()
    release()
    message, release = await second

    assert not before
    assert len(message) == 703
    release()
    assert parser.taken == 0


def packed(parser, form, caller):
    """Send a compressed message, which is parsed in the thread that callers share."""
    return asyncio.ensure_future(parser.parse(gzip.compress(delimited(1, caller.encode())), form, caller))


async def test_callers_take_turns_in_the_thread_that_parses_large_messages():
    """Memory is reserved for each of the messages that wait for their turn."""
    order, started, go = [], threading.Event(), threading.Event()

    def parse(data):
        order.append(data[2:].decode())
        started.set()
        go.wait(60)

    parser, form = RecordingParser(MIB, 64 * MIB), deserialization.Form({}, parse)
    greedy = [packed(parser, form, "greedy") for _ in range(5)]
    await asyncio.to_thread(started.wait, 60)
    modest = packed(parser, form, "modest")
    await asyncio.sleep(0)
    taken = parser.taken
    go.set()
    releases = [release for _, release in await asyncio.gather(*greedy, modest)]

    assert order == ["greedy", "modest", *["greedy"] * 4]
    assert 0 < taken == parser.taken
    for release in releases:
        release()
    assert parser.taken == 0


async def test_messages_that_need_more_than_was_reserved_do_not_block_each_other():
    """Control: all that is reserved at first leaves too little memory for any one of the messages."""
    parser, taken = RecordingParser(MIB, 6 * MIB), []
    form = deserialization.Form({}, lambda _data: taken.append(parser.taken))

    async def send(caller):
        _, release = await parser.parse(delimited(1, b"") * 8000, form, caller)
        release()

    await asyncio.gather(*(send(str(number % 4)) for number in range(16)))

    assert len(taken) == 16
    assert max(taken) <= 6 * MIB
    assert parser.taken == 0


class Sender:
    """Context of a stream of 100 empty messages."""

    def __init__(self):
        self._left = 100

    async def read(self):
        self._left -= 1
        return b"" if self._left else grpc.aio.EOF

    def peer(self):
        return "ipv4:127.0.0.1:1"


async def test_empty_messages_of_a_stream_take_memory_until_they_are_answered():
    parser, received = RecordingParser(4096, 12 * deserialization.ITEM_MEMORY), []
    limits = deserialization.MessageLimits(parser, *(ReceiveLimiter(4) for _ in range(3)))
    parse = explain_pb2.ExplainStreamRequest.FromString

    async def behaviour(requests, _context):
        async for item in requests:
            received.append(item)  # noqa: PERF401 -- it is read while it grows

    stream = deserialization.Deserialization(None, limits, STREAM, parse).writing_stream(behaviour)
    call = asyncio.ensure_future(stream(None, Sender()))
    await wait_in_loop_until(lambda: parser._memory._waiting.total() or call.done())
    before = len(received)
    received[0].release()
    await wait_in_loop_until(lambda: len(received) > before or call.done())
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)

    assert before == 8  # a caller may hold twice what it leaves free
    assert len(received) == 9
    assert parser.taken == 0


async def test_invalid_message_holds_no_memory():
    parser = RecordingParser(1000, 4000)

    def parse(_data):
        raise DecodeError

    for data in (b"\x0a\x01x", gzip.compress(b"\x0a\x01x")):
        with pytest.raises(DecodeError):
            await parser.parse(data, deserialization.Form({}, parse), "a")

    assert parser.taken == 0


def test_calls_and_streams_always_release_the_memory_of_their_messages(monkeypatch):
    monkeypatch.setattr(deserialization, "MessageParser", RecordingParser)
    RecordingParser.instances.clear()
    valid = [explain_pb2.ExplainStreamRequest(request_id=str(number)).SerializeToString() for number in range(40)]
    with (
        serving(models=(nets.TINY,), device="cpu", threads=1) as served,
        grpc.insecure_channel(served.address) as channel,
    ):
        refusal(channel, EXPLAIN, b"")
        assert len(list(channel.stream_stream(STREAM)(iter(valid)))) == 40
        with pytest.raises(grpc.RpcError):
            list(channel.stream_stream(STREAM)(iter([*valid, b"\xff"])))
        cancelled = channel.stream_stream(STREAM)(iter(valid))
        next(cancelled)
        cancelled.cancel()
        (reply,) = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter([b""]))
        (parser,) = RecordingParser.instances
        wait_until(lambda: parser.taken == 0)

    assert inference_pb2.ModelStreamInferResponse.FromString(reply).error_message


LARGE = {
    "methods": ("ExplainRequest", lambda: delimited(3, b"") * (MIB // 16)),
    "parameters": ("ExplainRequest", lambda: delimited(3, delimited(2, b"")) * (MIB // 32)),
    "targets": ("ExplainRequest", lambda: delimited(4, delimited(3, b"")) * (MIB // 32)),
    "layers": ("ExplainRequest", lambda: delimited(6, b"") * (MIB // 16)),
    "tensors": ("ModelInferRequest", lambda: delimited(5, delimited(5, b"")) * (MIB // 32)),
    "numbers": ("ModelInferRequest", lambda: numbers(4 * MIB)),
    "metrics": ("EvaluateRequest", lambda: delimited(2, b"") * (MIB // 16)),
}
"""Messages that take much memory: the name of their type, and a function that makes them."""


@pytest.fixture(scope="module")
def memory_of_messages(tmp_path_factory):
    """The bytes that each message takes in a process of its own, and the estimate."""
    folder = tmp_path_factory.mktemp("messages")
    for name, (kind, make) in LARGE.items():
        (folder / f"{name}.{kind}").write_bytes(make())
    return process_audit.run_module("parsing", folder)


@pytest.mark.parametrize("name", LARGE)
def test_message_takes_no_more_memory_than_estimated(memory_of_messages, name):
    """The constants are those of the installed release of protobuf."""
    taken, estimate = memory_of_messages[f"{name}.{LARGE[name][0]}"]

    assert MIB < taken <= estimate


def test_memory_of_a_kept_message_is_measured(memory_of_messages):
    """Control: a message that is kept twice takes more than the estimate."""
    taken, estimate = memory_of_messages["control"]

    assert taken > estimate


@pytest.mark.parametrize("data", [b"\x0b\x0c", b"\x0a", b"\x0a\x05ab", b"\xff" * 11, b"\x1a\x02\x0a\x05", b"\x0d\x01"])
def test_invalid_message_is_not_counted(data):
    with pytest.raises(DecodeError):
        footprint(data, shape_of(explain_pb2.ExplainRequest.DESCRIPTOR), 100)


def test_fields_are_counted_to_the_limit_and_no_further():
    shape = shape_of(explain_pb2.ExplainRequest.DESCRIPTOR)
    data = delimited(3, b"") * 10

    assert footprint(data, shape, 10)
    assert footprint(data, shape, 9) is None
