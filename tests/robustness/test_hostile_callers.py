"""Hostile callers delay a modest one no more than as many honest callers do, whatever protocol they use.

Delay is counted in steps: the turns of others in the threads that decode and draw, and the batches, between the arrival
of a request and its own. So it does not depend on the speed of the machine.
"""

import contextlib
import itertools
import socket
import threading
from functools import partial

import grpc
import numpy as np
import pytest

from camserve.v1 import explain_pb2, explain_pb2_grpc
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.scheduling import Batcher
from camserve_server.scheduling.admission import FairThreads
from http_calls import EXPLAIN, JSON, body_of, head
from robustness import nets
from robustness.http2_flood import NO_WINDOW, Connection
from support import jpeg, serving, wait_until

MODEST, REQUESTS = "127.0.0.1", 6
SMALL = jpeg(np.zeros((32, 32, 3), np.uint8))
LARGE = jpeg(np.zeros((700, 700, 3), np.uint8))
DRAWN = explain_pb2.Rendering(overlay=explain_pb2.IMAGE_FORMAT_PNG, heatmap=True)
EXPLAIN_RPC, INFER_RPC = "camserve.v1.ExplainService/Explain", "inference.GRPCInferenceService/ModelInfer"
FACTOR, THREADS = 3, 2  # of the steps beside honest callers


def inference(count):
    tensor = {"name": "image", "datatype": "BYTES", "shape": [count], "contents": {"bytes_contents": [LARGE] * count}}
    return inference_pb2.ModelInferRequest(inputs=[tensor])


def call_many(connection, rpc, request, count):
    packed = request.SerializeToString()
    for _ in range(count):
        connection.send(rpc, packed)
    return connection


class Repeating:
    """Caller that sends a request whenever one has been answered, with several under way.

    Args:
        address: the server's host and port.
        source: the caller's address.
        request: the request.
        under_way: requests that are under way.
    """

    def __init__(self, address, source, request, under_way):
        self.connection, self._packed = Connection(*address, source=source), request.SerializeToString()
        self.connection.read_on()
        self._ended, self._under_way = False, under_way
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self):
        with contextlib.suppress(OSError):  # the test ends
            for sent in itertools.count(1):
                wait_until(lambda least=2 * (sent - self._under_way): self._ended or self.connection.statuses >= least)
                if self._ended:
                    return
                self.connection.send(EXPLAIN_RPC, self._packed)

    def close(self):
        self._ended = True
        self._thread.join()
        hang_up(self.connection.socket)


def hang_up(connection):
    with contextlib.suppress(OSError):  # the server has
        connection.shutdown(socket.SHUT_RDWR)  # a thread that reads would keep a closed socket open
    connection.close()


def honest(served, source):
    return Repeating(served.address.split(":"), source, explain_pb2.ExplainRequest(image=SMALL), 1)


def unread(served, source):
    """Ask for pictures and never read them."""
    request = explain_pb2.ExplainRequest(image=LARGE, rendering=DRAWN)
    return call_many(Connection(*served.address.split(":"), NO_WINDOW, source), EXPLAIN_RPC, request, 40).socket


def unread_inference(served, source):
    connection = Connection(*served.address.split(":"), NO_WINDOW, source)
    return call_many(connection, INFER_RPC, inference(1), 20).socket


def greedy(served, source):
    """Have many expensive requests under way."""
    method = {"name": "rise", "parameters": {"samples": {"number": 64}}}
    request = explain_pb2.ExplainRequest(image=SMALL, methods=[method])
    return Repeating(served.address.split(":"), source, request, 30)


def huge(served, source):
    """Send messages of the largest size, and read no answer."""
    body = body_of(explain_pb2.ExplainRequest(image=LARGE + bytes(6 << 20)))
    packed = head(EXPLAIN, f"Content-Type: {JSON}", f"Content-Length: {len(body)}") + body
    connection = http(served, source)
    threading.Thread(target=send_all, args=(connection, packed, 5), daemon=True).start()
    return connection


def send_all(connection, packed, count):
    with contextlib.suppress(OSError):  # the test closes it
        for _ in range(count):
            connection.sendall(packed)


def cancelled(served, source):
    connection = Connection(*served.address.split(":"), source=source)
    connection.call(250, cancel=True)  # all callers together: fewer than gRPC keeps, whatever the event loop does
    return connection.socket


def half_open(served, source):
    """Open calls whose messages never arrive."""
    connection = Connection(*served.address.split(":"), source=source)
    connection.call(90, cancel=False)
    return connection.socket


def http(served, source, *parts):
    connection = socket.create_connection(("127.0.0.1", served.http_port), source_address=(source, 0))
    for part in parts:
        connection.sendall(part)
    return connection


def unread_http(served, source):
    body = body_of(explain_pb2.ExplainRequest(image=LARGE, rendering=DRAWN))
    lines = (f"Content-Type: {JSON}", f"Content-Length: {len(body)}")
    connection = http(served, source)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.sendall(head(EXPLAIN, *lines) + body)
    return connection


def slow_http(served, source):
    """Send the head of a request without its body."""
    return http(served, source, head(EXPLAIN, f"Content-Type: {JSON}", "Content-Length: 1000"))


KINDS = (unread, unread_inference, greedy, huge, cancelled, half_open, unread_http, slow_http)


@pytest.fixture(scope="module")
def served():
    with serving(models=(nets.TINY,), device="cpu", threads=THREADS, http_address="0", max_message_mib=8) as server:
        yield server


@pytest.fixture
def foreign_steps(monkeypatch):
    """The numbers of steps of others before each step of the modest caller."""
    steps, order, submit, run = [], [], FairThreads.submit, Batcher.submit

    def counted_submit(threads, caller, step):
        arrived = len(order)

        def counted_step():
            if caller == MODEST:
                steps.append(sum(each != MODEST for each in order[arrived:]))
            order.append(caller)
            step()

        submit(threads, caller, counted_step)

    async def counted_run(batcher, *given):
        arrived = batcher.stats.batches
        result = await run(batcher, *given)
        if getattr(given[-1], "caller", "") == MODEST:
            steps.append(batcher.stats.batches - arrived - 1)
        return result

    monkeypatch.setattr(FairThreads, "submit", counted_submit)
    monkeypatch.setattr(Batcher, "submit", counted_run)
    return steps


def ask_beside(served, others, steps):
    """Let the modest caller ask beside others; return the largest number of foreign steps."""
    steps.clear()
    request = explain_pb2.ExplainRequest(image=SMALL, rendering=DRAWN)
    with contextlib.ExitStack() as stack, grpc.insecure_channel(served.address) as channel:
        for number, kind in enumerate(others):
            caller = kind(served, f"127.0.0.{number + 2}")
            stack.callback(caller.close if isinstance(caller, Repeating) else partial(hang_up, caller))
        explain = explain_pb2_grpc.ExplainServiceStub(channel).Explain
        for _ in range(REQUESTS):
            assert explain(request).explanations[0].overlay.data
    return max(steps)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4, 16])
def test_modest_caller_is_answered_as_beside_honest_ones(served, foreign_steps, count):
    beside_honest = ask_beside(served, [honest] * count, foreign_steps)
    beside_hostile = {kind.__name__: ask_beside(served, [kind] * count, foreign_steps) for kind in KINDS}
    mixed = itertools.islice(itertools.cycle(KINDS), count)
    beside_hostile["a mixture"] = ask_beside(served, mixed, foreign_steps)

    # Callers take turns, two threads work, and a worker has two batches.
    bound = max(FACTOR * beside_honest, count + 2 * THREADS)
    assert {kind: most for kind, most in beside_hostile.items() if most > bound} == {}
