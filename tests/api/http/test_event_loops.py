"""HTTP has an event loop of its own: only complete requests reach that of calls, and calls end on both."""

import asyncio
import contextlib
import contextvars
import gc
import http.client
import io
import socket
import ssl
import threading
import weakref
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from api.http.test_lifecycle import Running
from api.http.test_streams import encoded
from api.running_server import item, request
from camserve.v1 import explain_pb2
from camserve.web import connect
from camserve_server.api.http.context import StreamContext
from camserve_server.api.http.loops import LoopThread, run_on
from camserve_server.api.rpc import Call, ServerState
from camserve_server.scheduling.admission import Admission
from http_calls import EXPLAIN, JSON, LIST, STREAM, body_of, head, post, read_all
from http_calls import connect as connect_to
from http_calls import request as send
from robustness.authority import Authority
from support import rows_waiting, wait_in_loop_until, wait_until, without_canaries

TYPE, CHUNKED = f"Content-Type: {JSON}", "Transfer-Encoding: chunked"
INCOMPLETE = {
    "nothing": b"",
    "a part of a head": b"POST / HTTP/1.1\r\nHost: loc",
    "headers without an end": b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000,
    "a head": head(EXPLAIN, TYPE, "Content-Length: 100"),
    "a part of a message": head(EXPLAIN, TYPE, "Content-Length: 100") + b"{",
    "a large part of a message": head(EXPLAIN, TYPE, "Content-Length: 1000000") + b" " * 900_000,
    "some tiny chunks": head(EXPLAIN, TYPE, CHUNKED) + b"1\r\n \r\n" * 100,
    "too many tiny chunks": head(EXPLAIN, TYPE, CHUNKED) + b"1\r\n \r\n" * 1000,
    "what is not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a file of the page": head("/openapi.json", method="GET"),
    "a path that is no route": head("/none", method="GET"),
}
CALLER = contextvars.ContextVar("CALLER", default="")


@contextlib.contextmanager
def callbacks_of(served):
    """Count the callbacks of the event loop of calls inside the block, by what ran; the list is complete after it."""
    thread, found, run = served.do(threading.get_ident), Counter(), asyncio.Handle._run

    def counted(handle):
        if threading.get_ident() == thread:
            found[repr(handle._callback)] += 1
        return run(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", counted)
        yield found


@pytest.fixture(scope="module")
def quiet(serve):
    """A server whose event loop runs nothing unless it is called."""
    with without_canaries(), serve() as server:
        yield server


def deliver(port, data):
    """Send bytes and no more; return when the server has dealt with them."""
    with connect_to(port) as connection:
        with contextlib.suppress(OSError):  # the server may have closed the connection
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            read_all(connection)
    assert send(port, "GET", "/").status == 200  # what the end of the connection has caused is over


@pytest.mark.parametrize("name", INCOMPLETE)
def test_bytes_that_are_no_call_do_not_reach_the_event_loop_of_calls(name, quiet):
    with callbacks_of(quiet) as found:
        deliver(quiet.http_port, INCOMPLETE[name])

    assert found == {}


def test_parts_of_a_message_of_a_stream_do_not_reach_the_event_loop_of_calls(quiet, monkeypatch):
    message, reading, receive = encoded(item("a"), connect.NDJSON), threading.Event(), StreamContext._receive_messages
    monkeypatch.setattr(StreamContext, "_receive_messages", lambda context: reading.set() or receive(context))
    with connect_to(quiet.http_port) as connection:
        connection.sendall(head(STREAM, f"Content-Type: {connect.NDJSON}", CHUNKED))
        reading.wait()
        for _ in range(5):
            quiet.do(lambda: None)  # what the call still does before it waits
        with callbacks_of(quiet) as found:
            for byte in message[:-9]:
                connection.sendall(b"1\r\n%c\r\n" % byte)
            deliver(quiet.http_port, b"")
        assert found == {}
        connection.sendall(b"9\r\n%s\r\n0\r\n\r\n" % message[-9:])
        assert b'"response"' in read_until(connection, b"0\r\n\r\n")


def read_until(connection, end):
    received = b""
    while not received.endswith(end):
        received += connection.recv(65536)
    return received


def test_call_and_health_check_reach_the_event_loop_of_calls(quiet):
    """Control of the tests above."""
    for act in (lambda: post(quiet.http_port, LIST, {}), lambda: send(quiet.http_port, "GET", "/health")):
        with callbacks_of(quiet) as found:
            assert act().status == 200
        assert found


def test_tls_handshakes_do_not_reach_the_event_loop_of_calls(serve, tmp_path):
    authority = Authority()
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    context = ssl.create_default_context(cadata=authority.pem.decode())

    def page():
        connection = http.client.HTTPSConnection("127.0.0.1", served.http_port, context=context)
        with contextlib.closing(connection):
            connection.request("GET", "/")
            return connection.getresponse().status

    with without_canaries(), serve(tls_cert=cert, tls_key=key) as served:
        assert page() == 200
        with callbacks_of(served) as found:
            for _ in range(5):
                context.wrap_socket(connect_to(served.http_port), server_hostname="127.0.0.1").close()
                connect_to(served.http_port).close()
            assert page() == 200

    assert found == {}


# --- hanging up, and the end of the server ---


def streamed(port):
    """Send one item of a stream, whose reply does not come."""
    return post(port, STREAM, encoded(item("a"), connect.NDJSON), connect.NDJSON)


async def test_stop_at_once_ends_calls_on_both_event_loops(model):
    before = set(threading.enumerate())
    running = Running(models=(model,))
    pipeline = await running.ready
    pipeline.batcher.pause()
    calls = [running.send(post, EXPLAIN, request()), running.send(streamed)]
    calls = [asyncio.create_task(call) for call in calls]
    await wait_in_loop_until(lambda: pipeline.batcher.waiting == 2)
    assert any(thread.name == "camserve-http" for thread in threading.enumerate())
    running.stop.requested.set()
    running.stop.stop_now.set()
    await running.task

    assert pipeline.batcher.admitted == 0
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "camserve-http"]
    for call in calls:
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            await call


@pytest.mark.parametrize("path", [EXPLAIN, STREAM])
def test_hanging_up_ends_the_servicers_method_before_the_call_is_done(path, serve, monkeypatch):
    events = []
    for owner, name in ((Call, "end"), (ServerState, "count_sent")):
        monkeypatch.setattr(owner, name, recorded(events, name, getattr(owner, name)))
    message = body_of(request()) if path == EXPLAIN else encoded(item("a"), connect.NDJSON)
    media = JSON if path == EXPLAIN else connect.NDJSON
    with serve() as served:
        served.do(served.pipeline.batcher.pause)
        with connect_to(served.http_port) as connection:
            connection.sendall(head(path, f"Content-Type: {media}", f"Content-Length: {len(message)}") + message)
            wait_until(lambda: rows_waiting(served) == 1)
        wait_until(lambda: "count_sent" in dict(events))
        thread = served.do(threading.get_ident)
        served.do(served.pipeline.batcher.resume)

    assert events == [("end", thread)] * (len(events) - 1) + [("count_sent", thread)]
    assert len(events) > 1


def recorded(events, name, function):
    def call(*args):
        events.append((name, threading.get_ident()))
        return function(*args)

    return call


# --- the memory of a reply ---


def noise():
    """Return a photo that does not become smaller as a PNG: its overlay takes more than the system buffers."""
    packed = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), np.uint8)
    Image.fromarray(pixels).save(packed, "JPEG")
    return packed.getvalue()


@contextlib.contextmanager
def unread(served):
    """Send a request over a connection that does not read its reply yet."""
    drawn = body_of(request(image=noise(), rendering=explain_pb2.Rendering(overlay=explain_pb2.IMAGE_FORMAT_PNG)))
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", served.http_port))
        connection.sendall(head(EXPLAIN, TYPE, f"Content-Length: {len(drawn)}", "Connection: close") + drawn)
        yield connection


@pytest.fixture
def releases(monkeypatch):
    """The threads that have released memory or rows."""
    threads, release = set(), Admission._release
    monkeypatch.setattr(Admission, "_release", lambda *args: threads.add(threading.get_ident()) or release(*args))
    return threads


@pytest.mark.parametrize("reads", [True, False], ids=["read", "hung up"])
def test_memory_of_a_reply_is_held_until_it_is_sent_or_its_caller_hangs_up(reads, serve, releases):
    with serve() as served:
        limit, thread = served.pipeline.replies.limit, served.do(threading.get_ident)
        with unread(served) as connection:
            wait_until(lambda: limit.taken)
            for _ in range(20):
                assert post(served.http_port, EXPLAIN, request()).status == 200
            assert limit.taken
            received = read_all(connection) if reads else b""
        wait_until(lambda: not limit.taken)

    assert received.endswith(b"}") is reads
    assert releases == {thread}


# --- crossing ---


@pytest.fixture
async def other():
    thread = LoopThread("other-loop")
    yield thread.loop
    await thread.close()
    assert not [running for running in threading.enumerate() if running.name == "other-loop"]


async def test_coroutine_runs_on_the_other_loop_with_the_callers_context(other):
    async def work():
        return asyncio.get_running_loop(), CALLER.get()

    CALLER.set("someone")

    assert await run_on(other, work()) == (other, "someone")


async def test_error_of_a_coroutine_is_raised_and_keeps_nothing_in_memory(other):
    kept = []

    async def work():
        message = type("Message", (), {})()
        kept.append(weakref.ref(message))
        raise ValueError("wrong")

    async def call():
        with pytest.raises(ValueError, match="wrong"):
            await run_on(other, work())

    gc.disable()
    try:
        await call()
        await wait_in_loop_until(lambda: kept[0]() is None)
    finally:
        gc.enable()


async def test_cancelled_caller_waits_until_the_coroutine_has_ended(other):
    events, cleanup = [], threading.Event()

    async def work():
        try:
            events.append("began")
            await asyncio.Event().wait()
        finally:
            events.append("cancelled")
            await asyncio.to_thread(cleanup.wait)
            events.append("ended")

    caller = asyncio.create_task(run_on(other, work()))
    await wait_in_loop_until(lambda: events == ["began"])
    caller.cancel()
    await wait_in_loop_until(lambda: events == ["began", "cancelled"])
    assert not caller.done()
    cleanup.set()
    with pytest.raises(asyncio.CancelledError):
        await caller

    assert events == ["began", "cancelled", "ended"]


async def test_coroutine_that_cancels_itself_cancels_its_caller(other):
    async def work():
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        await run_on(other, work())
