"""HTTP against hostile callers: slow, oversized, malformed and smuggled requests, floods, and random mutants."""

import contextlib
import gzip
import itertools
import json
import random
import signal
import socket
import struct
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import h11
import pytest
from google.protobuf import json_format

from camserve._codec.json_messages import InvalidJson, _unique, from_json
from camserve._codec.protocol import RPCS, message_class
from camserve.v1 import explain_pb2
from camserve.web import connect
from camserve_server.api import deserialization, tokens
from camserve_server.api.http import forms, protocol
from http_calls import EXPLAIN, JSON, LIST, STREAM, body_of, exchange, head, post, request, statuses
from http_calls import connect as connect_to
from robustness import mutations, nets
from server_process import server_process
from support import PHOTOS, serving, wait_until

MIB = 2**20
HEALTH_REQUEST = head("/health", "Connection: close", method="GET")
TYPE = f"Content-Type: {JSON}"
CHUNKED = "Transfer-Encoding: chunked"


@contextlib.contextmanager
def http_server(**settings):
    with serving(**{"models": (nets.TINY,), "device": "cpu", "threads": 1, "http_address": "0", **settings}) as served:
        yield served


@pytest.fixture(scope="module")
def served():
    with http_server(max_message_mib=1) as server:
        yield server


@pytest.fixture(autouse=True)
def _patient():
    """Let callers be late, as on a busy machine, except in tests of a timeout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "HANDSHAKE_TIMEOUT", 600)
        patch.setattr(protocol, "LINGER_TIMEOUT", 600)
        yield


@pytest.fixture
def port(served):
    """Port of a server that still answers after the test, and then holds no memory of messages."""
    yield served.http_port
    assert request(served.http_port, "GET", "/health").status == 200


@pytest.fixture
def parsed(monkeypatch):
    """The sizes of the JSON messages that are parsed."""
    sizes, parse = [], from_json
    monkeypatch.setattr(connect, "from_json", lambda data, message: sizes.append(len(data)) or parse(data, message))
    return sizes


def error_of(received):
    """Return the status and the error of the only response in what a connection received."""
    (status,) = statuses(received)
    return status, json.loads(received.partition(b"\r\n\r\n")[2])


# --- size ---


def test_oversized_message_is_refused_by_its_length_alone(port):
    """The caller waits for "100 Continue" before it sends the message, and gets the refusal instead."""
    length = f"Content-Length: {2 * MIB}"
    status, error = error_of(exchange(port, head(EXPLAIN, TYPE, length, "Expect: 100-continue", "Connection: close")))

    assert (status, error["code"]) == (413, "resource_exhausted")


def test_caller_that_sends_an_oversized_message_at_once_sees_the_refusal(port):
    response = post(port, EXPLAIN, b" " * 3 * MIB)

    assert (response.status, response.json["code"]) == (413, "resource_exhausted")


def test_oversized_message_in_chunks_is_refused_at_its_limit(port):
    part = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    status, error = error_of(exchange(port, head(EXPLAIN, TYPE, CHUNKED), *([part] * 30), b"0\r\n\r\n"))

    assert (status, error["code"]) == (413, "resource_exhausted")


def test_message_in_many_small_chunks_is_refused_after_few_of_them(port, monkeypatch):
    """Each chunk takes time on the event loop, whatever its size; an answer after the refusal would be none of ours."""
    events, following = [], h11.Connection.next_event
    monkeypatch.setattr(h11.Connection, "next_event", lambda self: events.append(following(self)) or events[-1])
    received = exchange(port, head(EXPLAIN, TYPE, CHUNKED), *[b"1\r\n \r\n" * 1000] * 400)

    assert statuses(received) in ([400], [])  # the caller may still be sending when the connection is closed
    assert sum(isinstance(event, h11.Data) for event in events) <= protocol.FREE_CHUNKS + 6000 // protocol.MIN_CHUNK


def test_message_in_some_small_chunks_is_accepted(port):
    body = json.dumps({}).encode()
    parts = [b"1\r\n%c\r\n" % byte for byte in b" " * 200 + body]

    assert statuses(exchange(port, head(LIST, TYPE, CHUNKED, "Connection: close"), *parts, b"0\r\n\r\n")) == [200]


def test_compressed_message_that_unpacks_beyond_the_limit_is_refused(port, parsed):
    bomb = gzip.compress(b" " * 40 * MIB)
    response = post(port, EXPLAIN, bomb, content_encoding="gzip")

    assert (response.status, response.json["code"]) == (429, "resource_exhausted")
    assert parsed == []


class ComparedName(str):
    """A name in a JSON object that counts how often names are compared."""

    __slots__ = ()
    compared: ClassVar = []

    def __eq__(self, other):
        self.compared.append(other)
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_repeated_name_is_found_without_comparing_all_names_with_each_other(monkeypatch):
    monkeypatch.setattr(ComparedName, "compared", [])
    names = [ComparedName(f"name {number}") for number in range(2000)]
    with pytest.raises(InvalidJson, match='"name 1999" is given twice'):
        _unique([(name, 0) for name in [*names, ComparedName("name 1999")]])

    assert len(ComparedName.compared) <= 2 * len(names)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 10**6,
        b'{"methods":[' + b"{}," * 300_000 + b"{}]}",
        b'{"layers":[' + b'"",' * 300_000 + b'""]}',
        gzip.compress(b'{"methods":[' + b"{}," * 300_000 + b"{}]}"),
    ],
)
def test_json_with_too_many_values_is_refused_before_it_is_parsed(body, port, parsed):
    response = post(port, EXPLAIN, body)

    assert (response.status, response.json["code"]) == (400, "invalid_argument")
    assert response.json["message"] == "the message has more than 32,768 fields, which is the limit"
    assert parsed == []


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 30_000,
        b'{"a":' * 30_000,
        b'{"rendering":' * 500 + b"{}" + b"}" * 500,
        b'{"maxPredictions":' + b"9" * 900_000 + b"}",
        b'{"rendering":{"alpha":' + b"9" * 900_000 + b"e5}}",
        b'{"model":"' + b"\\u00e9" * 100_000 + b'"}',
        '{"model":"é"}'.encode("utf-16"),
        b'\xef\xbb\xbf{"model":""}',
        b'{"model":"\xff"}',
        b'{"model":NaN}',
        b'{"rendering":{"alpha":1' + b"0" * 400 + b"}}",
        b'{"rendering":{"overlay":1e400}}',
        b'{"rendering":{"overlay":"\\ud800"}}',
        b'{"interventions":[{"scale":1' + b"0" * 400 + b"}]}",
        b'{"\\ud800":1}',
        b'{"rendering":{"\\ud800":1,"\\ud800":1}}',
        b'{"methods":[{"parameters":{"\\ud800":"x"}}]}',
        b'{"a":1,"a":2}',
        b'{"topK":1,"top_k":2}',
        b'{"methods":["gradcam"]}',
        b'{"methods":{}}',
        b'{"image":5}',
        b'{"image":"data:image/jpeg;base64,AAAA"}',
        b"[]",
        b"null",
        b"",
    ],
    ids=lambda body: body[:24].decode("ascii", "replace"),
)
def test_malformed_json_is_an_invalid_argument(body, port):
    response = post(port, EXPLAIN, body)

    assert (response.status, response.json["code"]) == (400, "invalid_argument")
    assert len(response.json["message"]) <= 512


@pytest.mark.parametrize("count", [0, 1, 100, 30_000])
def test_json_message_takes_no_more_memory_than_estimated(count):
    """An element of a list has at least one byte of its own, which is counted."""
    body = json.dumps({"layers": [""] * count}).encode()
    estimate = forms.count_json(body, {}, deserialization.MAX_FIELDS)

    assert estimate >= from_json(body, explain_pb2.ExplainRequest()).ByteSize() + 158 * count


def test_headers_have_a_limit(port):
    long = head("/health", "X-Padding: " + "x" * 20_000, "Connection: close", method="GET")
    many = head("/health", *["X: y"] * 2000, "Connection: close", method="GET")
    endless = b"GET /health HTTP/1.1\r\nX: " + b"x" * 200_000

    assert statuses(exchange(port, long)) == [431]
    assert statuses(exchange(port, many)) == [431]
    assert statuses(exchange(port, endless)) == [400]


# --- time ---


@pytest.mark.parametrize(
    "sent", [b"", b"POST / HTTP/1.1\r\nHost: loc", HEALTH_REQUEST.replace(b"close", b"x") + b"GET"]
)
def test_connection_whose_headers_do_not_arrive_is_closed(sent, port, monkeypatch):
    monkeypatch.setattr(protocol, "HANDSHAKE_TIMEOUT", 0.1)  # real timeout: an earlier end is accepted too

    assert set(statuses(exchange(port, sent))) <= {200}


def test_call_whose_message_does_not_arrive_ends(monkeypatch):
    monkeypatch.setattr(protocol, "LINGER_TIMEOUT", 0.1)  # real timeout: the caller sends nothing more
    with http_server(idle_seconds=0.1) as served:  # real timeout: the message never arrives
        for lines in ((TYPE, "Content-Length: 100"), (TYPE, CHUNKED)):
            status, error = error_of(exchange(served.http_port, head(EXPLAIN, *lines)))
            assert (status, error["code"]) == (504, "deadline_exceeded")
            assert error["message"] == "the call's message did not arrive within 0.1 s"


def test_idle_connection_is_closed():
    with http_server(connection_idle_seconds=0.1) as served:  # real timeout: it begins after the response
        assert statuses(exchange(served.http_port, head("/health", method="GET"))) == [200]


def test_connection_whose_caller_does_not_read_is_closed(port, monkeypatch):
    monkeypatch.setattr(protocol, "STALL_TIMEOUT", 0.1)  # real timeout: the caller reads nothing, however slow it is
    requests = itertools.repeat(head("/openapi.json", method="GET") * 100)
    with connect_to(port) as connection, pytest.raises(ConnectionError):
        any(map(connection.sendall, requests))  # blocks until the server has closed the connection


def test_stuck_messages_leave_room_for_other_messages_of_their_caller(port):
    with contextlib.ExitStack() as stack:
        for _ in range(2 * deserialization.MAX_RECEIVING):
            connection = stack.enter_context(connect_to(port))
            connection.sendall(head(EXPLAIN, TYPE, "Content-Length: 100") + b"{")

        assert post(port, LIST, {}).status == 200


def test_connections_beyond_the_limit_are_closed():
    with http_server(max_connections=3) as served, contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect_to(served.http_port)) for _ in range(3)]
        for connection in held:
            connection.sendall(head("/health", method="GET"))
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
        assert exchange(served.http_port, HEALTH_REQUEST) == b""
        held[0].close()
        wait_until(lambda: statuses(exchange(served.http_port, HEALTH_REQUEST)) == [200])


# --- what is not HTTP, or is read differently by others ---

SMUGGLED = HEALTH_REQUEST
BODY = b"5\r\n{    \r\n0\r\n\r\n"
MALFORMED = {
    "length and chunks": head(LIST, TYPE, "Content-Length: 4", CHUNKED) + b"0\r\n\r\n",
    "chunks and length": head(LIST, TYPE, CHUNKED, "Content-Length: 400") + b"0\r\n\r\n",
    "two lengths": head(LIST, TYPE, "Content-Length: 2", "Content-Length: 60") + b"{}",
    "list of lengths": head(LIST, TYPE, "Content-Length: 2, 60") + b"{}",
    "signed length": head(LIST, TYPE, "Content-Length: +2") + b"{}",
    "negative length": head(LIST, TYPE, "Content-Length: -2") + b"{}",
    "hexadecimal length": head(LIST, TYPE, "Content-Length: 0x2") + b"{}",
    "long length": head(LIST, TYPE, "Content-Length: " + "9" * 40) + b"{}",
    "other coding": head(LIST, TYPE, "Transfer-Encoding: gzip") + BODY,
    "two codings": head(LIST, TYPE, "Transfer-Encoding: gzip, chunked") + BODY,
    "coding twice": head(LIST, TYPE, CHUNKED, CHUNKED) + BODY,
    "misspelt coding": head(LIST, TYPE, "Transfer-Encoding: xchunked") + BODY,
    "coding with a control character": head(LIST, TYPE, "Transfer-Encoding: \x0bchunked") + BODY,
    "space before the colon": head(LIST, TYPE, "Transfer-Encoding : chunked") + BODY,
    "control character in a name": head(LIST, TYPE, "Transfer\0-Encoding: chunked") + BODY,
    "carriage return in a value": head(LIST, TYPE, "X: a\rContent-Length: 60") + BODY,
    "chunk size with a sign": head(LIST, TYPE, CHUNKED) + b"+2\r\n{}\r\n0\r\n\r\n",
    "chunk size with a prefix": head(LIST, TYPE, CHUNKED) + b"0x2\r\n{}\r\n0\r\n\r\n",
    "negative chunk size": head(LIST, TYPE, CHUNKED) + b"-2\r\n{}\r\n0\r\n\r\n",
    "chunk size that is too long": head(LIST, TYPE, CHUNKED) + b"0" * 30 + b"2\r\n{}\r\n0\r\n\r\n",
    "no chunk size": head(LIST, TYPE, CHUNKED) + b"\r\n{}\r\n0\r\n\r\n",
    "chunk without an end": head(LIST, TYPE, CHUNKED) + b"2\r\n{}0\r\n\r\n",
    "two hosts": head("/health", "Host: 127.0.0.1", method="GET"),
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "space in the target": b"GET /he alth HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "control character in the target": b"GET /\x00health HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_request_is_refused_and_nothing_after_it_is_read(name, port):
    received = exchange(port, MALFORMED[name] + SMUGGLED)

    assert all(400 <= status < 502 for status in statuses(received))
    assert len(statuses(received)) <= 1
    assert b"SERVING" not in received


def test_folded_header_is_one_header(port):
    """A header within the continuation of another one has no effect."""
    received = exchange(port, head("/health", "X: a\r\n Transfer-Encoding: chunked", "Connection: close", method="GET"))

    assert statuses(received) == [200]


def test_chunk_extensions_and_trailers_are_ignored(port):
    chunks = b'2;a="b"\r\n{}\r\n0;c\r\nAuthorization: x\r\nContent-Length: 5\r\n\r\n'
    received = exchange(port, head(LIST, TYPE, CHUNKED) + chunks + SMUGGLED)

    assert statuses(received) == [200, 200]


def test_pipelined_requests_are_answered_in_order(port):
    calls = [head(LIST, TYPE, "Content-Length: 2") + b"{}", head("/nothing", method="GET"), HEALTH_REQUEST]

    assert statuses(exchange(port, b"".join(calls))) == [200, 404, 200]


@pytest.mark.parametrize(
    "path",
    [
        "//",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/..\\..\\secrets",
        "/%00index.html",
        "/index.html%00.js",
        "/lib/",
        "/lib",
        "/lib/../index.html",
        "/.//index.html",
        "/index.html/",
        "/camserve.v1.ExplainService//Explain",
        "/camserve.v1.ExplainService/Explain/",
        "/camserve.v1.ExplainService/explain",
        "/camserve.v1.ExplainService",
        "/grpc.health.v1.Health/Check",
        "/inference.GRPCInferenceService/ServerLive",
        "http://localhost/index.html",
        "*",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_path_that_is_no_route_is_not_found(path, method, port):
    received = exchange(port, head(path, "Content-Length: 0", "Connection: close", method=method))

    assert statuses(received) in ([404], [400])
    assert b"<html" not in received


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "OPTIONS", "DELETE", "TRACE", "CONNECT", "PATCH", "get"])
def test_other_methods_are_not_allowed(method, port):
    received = exchange(port, head(EXPLAIN, "Content-Length: 0", "Connection: close", method=method))

    assert statuses(received) == [405]
    assert b"allow: POST\r\n" in received


# --- floods, and random mutants ---


def test_caller_that_hangs_up_at_any_moment_leaves_nothing(served, port):
    body = json.dumps({"image": "AAAA", "rendering": {"overlay": "IMAGE_FORMAT_JPEG"}}).encode()
    whole = head(EXPLAIN, TYPE, f"Content-Length: {len(body)}") + body
    for length in range(0, len(whole) + 1, 7):
        with connect_to(port) as connection:
            connection.sendall(whole[:length])
    wait_until(lambda: served.do(lambda: served.pipeline.batcher.admitted) == 0)

    assert post(port, LIST, {}).status == 200


def test_connection_that_was_reset_before_it_is_accepted_is_no_call():
    """The server is suspended meanwhile, as on a busy machine."""
    resets = struct.pack("ii", 1, 0)  # socket(7): SO_LINGER
    folder = Path(__file__).parents[1]  # has the package of the model
    with server_process((nets.TINY,), "--http-address", 0, forked=True, cwd=folder) as server:
        assert request(server.http_port, "GET", "/health").status == 200
        server.send_signal(signal.SIGSTOP)
        for _ in range(5):
            with connect_to(server.http_port) as connection:
                connection.sendall(head(LIST, TYPE, "Content-Length: 2") + b"{}")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, resets)
        server.send_signal(signal.SIGCONT)
        for _ in range(5):
            assert post(server.http_port, LIST, {}).status == 200

    assert server.log.count("ListModels") == 5
    assert "Traceback" not in server.log


def test_greedy_caller_causes_no_refusal_of_a_modest_one(tmp_path):
    """Tokens identify the callers. No row is computed meanwhile, so that the queue stays full."""
    created = {name: tokens.new(name, ("explain",)) for name in ("greedy", "modest")}
    path = tmp_path / "tokens"
    path.write_text("".join(f"{known.line()}\n" for _, known in created.values()))
    image = json_format.MessageToDict(explain_pb2.ExplainRequest(image=PHOTOS["rocket"].read_bytes()))
    codes = Counter()
    with http_server(max_queue_rows=8, tokens_file=str(path)) as served, ThreadPoolExecutor(12) as callers:
        batcher = served.pipeline.batcher

        def ask(caller):
            headers = {"authorization": f"Bearer {created[caller][0]}"}
            codes[caller, post(served.http_port, EXPLAIN, image, **headers).status] += 1

        served.do(batcher.pause)
        calls = [callers.submit(ask, "greedy") for _ in range(10)]
        wait_until(lambda: codes["greedy", 429] == 2)
        calls += [callers.submit(ask, "modest") for _ in range(2)]
        wait_until(lambda: served.do(batcher._admission._waiting.total) == 2)
        served.do(batcher.resume)
        for call in calls:
            call.result()

    assert codes == {("greedy", 200): 8, ("greedy", 429): 2, ("modest", 200): 2}


MUTANTS = 150
REFUSALS = {400, 403, 404, 405, 413, 415, 429, 431, 501}


def valid_posts():
    """Return the path and the JSON of valid messages."""
    paths = {rpc.name: path for path, rpc in RPCS.items()}
    valid = [(paths[rpc], data) for rpc, data in mutations.requests() if rpc in paths]
    messages = [(path, message_class(RPCS[path].input_type).FromString(data)) for path, data in valid]
    return [(path, body_of(message)) for path, message in messages]


def test_random_mutants_of_messages_are_answered(served, port):
    chance, posts, found = random.Random(5), valid_posts(), Counter()
    others = [body for _, body in posts]
    for number in range(MUTANTS):
        path, body = posts[number % len(posts)]
        media = connect.NDJSON if path == STREAM else JSON
        found[post(port, path, mutations.mutate(chance, body, others), media).status] += 1

    assert set(found) <= {200, *REFUSALS}
    assert found[400] > MUTANTS / 10
    wait_until(lambda: served.do(lambda: served.pipeline.batcher.admitted) == 0)


@pytest.fixture
def impatient(monkeypatch):
    """A server that soon ends what does not continue."""
    limit = 0.2  # real timeout: the test accepts that any request is ended
    monkeypatch.setattr(protocol, "HANDSHAKE_TIMEOUT", limit)
    monkeypatch.setattr(protocol, "LINGER_TIMEOUT", limit)
    with http_server(idle_seconds=limit, connection_idle_seconds=limit) as served:
        yield served


def test_random_mutants_of_heads_are_answered_or_end(impatient):
    """After most mutants, the server waits for the rest of a head or of a message, which does not come."""
    chance, posts, calls = random.Random(5), valid_posts(), []
    with ThreadPoolExecutor(32) as callers:
        for number in range(MUTANTS):
            path, body = posts[number % len(posts)]
            whole = head(path, TYPE, f"Content-Length: {len(body)}", "Connection: close")
            calls.append(callers.submit(exchange, impatient.http_port, mutations.mutate(chance, whole, [whole]) + body))
    answers = [statuses(call.result()) for call in calls]

    assert max(map(len, answers)) <= 2
    assert {status for answer in answers for status in answer} <= {200, 504, *REFUSALS}
    wait_until(lambda: impatient.do(lambda: impatient.pipeline.batcher.admitted) == 0)


class RecordingParser(deserialization.MessageParser):
    """Parser that shows how many bytes are reserved."""

    instances: ClassVar[list["RecordingParser"]] = []

    def __init__(self, *args):
        super().__init__(*args)
        self.instances.append(self)

    @property
    def taken(self):
        return self._memory.taken


def test_calls_always_release_the_memory_of_their_messages(monkeypatch):
    monkeypatch.setattr(deserialization, "MessageParser", RecordingParser)
    RecordingParser.instances.clear()
    item = b'{"requestId":"a","request":{}}\n'
    with http_server() as served:
        (parser,) = RecordingParser.instances
        for body in (b"{}", b"{", gzip.compress(b"{}"), body_of(explain_pb2.ExplainRequest(image=b"x" * MIB))):
            post(served.http_port, EXPLAIN, body)
        post(served.http_port, STREAM, item * 40, connect.NDJSON)
        post(served.http_port, STREAM, item * 40 + b"{", connect.NDJSON)
        served.do(served.pipeline.batcher.pause)
        body = body_of(explain_pb2.ExplainRequest(image=PHOTOS["rocket"].read_bytes()))
        with connect_to(served.http_port) as connection:
            connection.sendall(head(EXPLAIN, TYPE, f"Content-Length: {len(body)}") + body)
            wait_until(lambda: parser.taken > len(body) / 2)
        wait_until(lambda: parser.taken == 0)
        served.do(served.pipeline.batcher.resume)
