"""Streams over HTTP, with one JSON message on each line and with the envelopes of the Connect protocol."""

import contextlib
import json
import struct

import pytest
from google.protobuf import json_format

from api.running_server import item, smoothgrad
from camserve.v1 import explain_pb2
from camserve.web import connect
from camserve_server.api import auth, tokens
from http_calls import STREAM, body_of, exchange, head, post, statuses
from http_calls import connect as connect_to
from support import rows_waiting, wait_until

FRAMINGS = (connect.NDJSON, connect.CONNECT_JSON, connect.CONNECT_PROTO)


def encoded(message, media_type):
    """Return a message of a stream, in its frame."""
    if media_type == connect.NDJSON:
        return json.dumps(json.loads(body_of(message))).encode() + b"\n"
    data = message.SerializeToString() if media_type == connect.CONNECT_PROTO else body_of(message)
    return struct.pack(">BI", 0, len(data)) + data


def decoded(body, media_type):
    """Return the replies of a stream, and its end: the dict of an end-of-stream message or of a `streamError`."""
    if media_type == connect.NDJSON:
        lines = [json.loads(line) for line in body.splitlines()]
        end = lines.pop() if lines and "streamError" in lines[-1] else {}
        return [json_format.ParseDict(line, explain_pb2.ExplainStreamResponse()) for line in lines], end
    replies = []
    while body:
        flags, length = struct.unpack_from(">BI", body)
        data, body = body[5 : 5 + length], body[5 + length :]
        if flags == connect.END_OF_STREAM:
            assert not body
            return replies, json.loads(data)
        reply = explain_pb2.ExplainStreamResponse()
        proto = media_type == connect.CONNECT_PROTO
        replies.append(reply.FromString(data) if proto else json_format.Parse(data, reply))
    raise AssertionError("the stream has no end")


def stream(port, media_type, *messages, **headers):
    response = post(port, STREAM, b"".join(encoded(each, media_type) for each in messages), media_type, **headers)
    assert (response.status, response.headers["content-type"]) == (200, media_type)
    return decoded(response.body, media_type)


@pytest.mark.parametrize("media_type", FRAMINGS)
def test_replies_of_a_stream_equal_those_of_grpc(media_type, port, channel):
    messages = [item("a", rendering=explain_pb2.Rendering(heatmap=True)), item("b", top_k=2), item("c", model="none")]
    call = channel.stream_stream(STREAM)(iter([each.SerializeToString() for each in messages]), timeout=60)
    expected = {reply.request_id: reply for reply in map(explain_pb2.ExplainStreamResponse.FromString, call)}
    replies, end = stream(port, media_type, *messages)

    assert end == {}
    assert sorted(reply.request_id for reply in replies) == ["a", "b", "c"]
    for reply in replies:
        for each in (reply, expected[reply.request_id]):
            each.response.ClearField("timing") if each.WhichOneof("outcome") == "response" else None
        assert reply == expected[reply.request_id]


@pytest.mark.parametrize("media_type", FRAMINGS)
def test_progress_is_sent_before_the_reply(media_type, port):
    message = item("a", methods=[smoothgrad(40)], progress=True)
    replies, _ = stream(port, media_type, message)
    outcomes = [reply.WhichOneof("outcome") for reply in replies]
    rows = [reply.progress.rows_done for reply in replies[:-1]]

    assert outcomes == ["progress"] * len(rows) + ["response"]
    assert rows == sorted(rows)
    assert len(rows) > 0
    assert replies[0].progress.rows_total >= 40


@pytest.mark.parametrize("media_type", FRAMINGS)
def test_stream_without_messages_ends_without_replies(media_type, port):
    assert stream(port, media_type) == ([], {})


@pytest.mark.parametrize("media_type", FRAMINGS)
def test_invalid_message_ends_the_stream_after_the_earlier_replies(media_type, port):
    wrong = b"{\n" if media_type == connect.NDJSON else struct.pack(">BI", 0, 1) + b"\xff"
    response = post(port, STREAM, encoded(item("a"), media_type) + wrong, media_type)
    replies, end = decoded(response.body, media_type)
    error = end.get("streamError") or end["error"]

    assert [reply.WhichOneof("outcome") for reply in replies] == ["response"]
    assert error["code"] == "invalid_argument"


@pytest.mark.parametrize("media_type", [connect.CONNECT_JSON, connect.CONNECT_PROTO])
def test_stream_that_ends_within_a_message_is_refused(media_type, port):
    response = post(port, STREAM, encoded(item("a"), media_type)[:-1], media_type)

    assert decoded(response.body, media_type)[1]["error"]["message"] == "the stream ended within a message"


def test_refused_stream_of_lines_is_an_ordinary_error(port):
    response = post(port, STREAM, b"{}", connect.NDJSON, connect_timeout_ms="x")

    assert (response.status, response.json["code"]) == (400, "invalid_argument")


def test_replies_arrive_while_the_caller_still_sends(port):
    """The caller sends its next message only after it has the reply to the one before."""
    with connect_to(port) as connection:
        connection.sendall(head(STREAM, f"Content-Type: {connect.NDJSON}", "Transfer-Encoding: chunked"))
        received = b""
        for name in ("a", "b", "c"):
            message = encoded(item(name), connect.NDJSON)
            connection.sendall(f"{len(message):x}\r\n".encode() + message + b"\r\n")
            while f'"requestId":"{name}","response"'.encode() not in received:
                received += connection.recv(65536)
        connection.sendall(b"0\r\n\r\n")
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(65536)


def test_stream_is_cancelled_when_its_caller_hangs_up(serve):
    with serve() as served:
        served.do(served.pipeline.batcher.pause)
        with connect_to(served.http_port) as connection:
            body = encoded(item("a"), connect.NDJSON)
            connection.sendall(head(STREAM, f"Content-Type: {connect.NDJSON}", f"Content-Length: {len(body)}") + body)
            wait_until(lambda: rows_waiting(served) == 1)
        wait_until(lambda: rows_waiting(served) == 0)
        served.do(served.pipeline.batcher.resume)
        post(served.http_port, STREAM, encoded(item("b"), connect.NDJSON), connect.NDJSON)

        assert served.pipeline.batcher.stats.rows == 1


def test_deadline_ends_a_stream(serve):
    with serve() as served:
        served.do(served.pipeline.batcher.pause)
        response = post(
            served.http_port, STREAM, encoded(item("a"), connect.CONNECT_JSON), connect.CONNECT_JSON,
            connect_timeout_ms="50",  # real timeout: no batch runs before it
        )  # fmt: skip
        wait_until(lambda: rows_waiting(served) == 0)
        served.do(served.pipeline.batcher.resume)

    assert decoded(response.body, connect.CONNECT_JSON)[1]["error"]["code"] == "deadline_exceeded"


def test_idle_stream_ends(serve):
    with serve(idle_seconds=0.1) as served:  # real timeout: no message ever comes
        received = exchange(
            served.http_port, head(STREAM, f"Content-Type: {connect.NDJSON}", "Transfer-Encoding: chunked")
        )

    assert statuses(received) == [503]
    assert b"the stream was idle for 0.1 s" in received


def test_stream_has_the_limit_of_a_message(serve):
    with serve(max_message_mib=1) as served:
        long = encoded(item("a", image=bytes(2**20 + 2**16)), connect.NDJSON)
        lines = post(served.http_port, STREAM, long, connect.NDJSON)
        envelope = post(served.http_port, STREAM, struct.pack(">BI", 0, 2**31), connect.CONNECT_PROTO)

    assert lines.status == 413
    assert decoded(envelope.body, connect.CONNECT_PROTO)[1]["error"]["code"] == "resource_exhausted"


def test_token_of_a_stream_is_checked_with_each_message(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(auth, "RECHECK_INTERVAL", 0.0)
    secret, token = tokens.new("someone", ("explain",))
    path = tmp_path / "tokens"
    path.write_text(token.line())
    with serve(tokens_file=str(path)) as served, connect_to(served.http_port) as connection:
        lines = f"Content-Type: {connect.NDJSON}", "Transfer-Encoding: chunked", f"Authorization: Bearer {secret}"
        message = encoded(item("a"), connect.NDJSON)
        chunk = f"{len(message):x}\r\n".encode() + message + b"\r\n"
        connection.sendall(head(STREAM, *lines) + chunk)
        received = b""
        while b'"response"' not in received:
            received += connection.recv(65536)
        path.write_text("")
        connection.sendall(chunk)
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                received += part

    assert received.count(b'"response"') == 1
    assert b'{"streamError":{"code":"unauthenticated"' in received


def test_messages_of_any_size_of_parts_are_split_alike():
    messages = [b'{"a":1}', b"{}", b'{"b":[1,2]}']
    for splitter, data in (
        (connect.Lines, b"\n\n".join(messages) + b"\r\n"),
        (connect.Envelopes, b"".join(map(connect.envelope, messages))),
    ):
        for size in range(1, len(data) + 1):
            split = splitter(20)
            parts = [data[start : start + size] for start in range(0, len(data), size)]
            assert [each for part in parts for each in split.feed(part)] + list(split.end()) == messages


@pytest.mark.parametrize("empty", [b"\n", b"\r\n", b" \n"])
@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_empty_lines_between_messages_are_limited(size, empty):
    def split(data):
        lines = connect.Lines(20)
        return [each for at in range(0, len(data), size) for each in lines.feed(data[at : at + size])]

    most = empty * connect.MAX_EMPTY_LINES

    assert split((b"{}\n" + most) * 3) == [b"{}"] * 3
    with pytest.raises(connect.InvalidFrame, match="more than 500 empty lines in a row"):
        split(b"{}\n" + most + empty)


def test_stream_of_line_ends_is_refused(serve):
    with serve() as served:
        response = post(served.http_port, STREAM, b"\n" * (1 << 20), connect.NDJSON)

    assert response.status == 400
    assert b"empty lines" in response.body
