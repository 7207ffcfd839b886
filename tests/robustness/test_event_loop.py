"""No message holds the event loop: nothing runs there whose cost is not small, whatever a caller sends.

The times are of the processor, and compared with those of fixed work on the same machine, so that neither its speed nor
other programs change the outcome.
"""

import asyncio
import contextlib
import gc
import statistics
import threading
import time

import grpc
import pytest
from google.protobuf import json_format

from http_calls import post
from robustness import fields, largest
from support import serving

LOOPS = 1_300_000  # turns of an empty loop: about 20 ms on a Xeon of 2023
TRIES = 5


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    labels = tmp_path_factory.mktemp("labels") / "numbers.txt"
    labels.write_text("".join(f"{number}\n" for number in range(5)))
    models = tuple(spec.format(labels=labels) for spec in fields.MODELS)
    with serving(models=models, device="cpu", threads=1, http_address="0", admin=True) as server:
        yield server


@pytest.fixture(scope="module")
def channel(served):
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(served.address, unlimited) as channel:
        yield channel


class Callbacks:
    """Processor time of the callbacks of one event loop.

    Attributes:
        worst: seconds of the longest one, and what it was.
    """

    def __init__(self, loop):
        self.worst = (0.0, "")
        self._loop = loop
        self._call(lambda: setattr(self, "thread", threading.get_ident()))

    def _call(self, function):
        """Call a function in the loop, and wait until it has returned."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (function(), done.set()))
        done.wait()

    def worst_of(self, call):
        """Return the seconds of the longest callback of a call, and what it was."""
        self.worst = (0.0, "")
        call()
        self._call(lambda: None)  # the answer may arrive before the callback that sent it has ended
        return self.worst

    @contextlib.contextmanager
    def timed(self):
        run = asyncio.Handle._run

        def timed_run(handle):
            if threading.get_ident() != self.thread:
                return run(handle)
            began, what = time.thread_time(), handle._callback
            run(handle)
            if (took := time.thread_time() - began) > self.worst[0]:
                self.worst = (took, repr(what)[:300])
            return None

        gc.collect()
        gc.freeze()  # a collection of everything that torch has made is not a caller's work
        asyncio.Handle._run = timed_run
        try:
            yield
        finally:
            asyncio.Handle._run = run
            gc.unfreeze()


def yardstick():
    """Return the processor time of fixed work, in seconds."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        for _ in range(LOOPS):
            pass
        times.append(time.thread_time() - began)
    return statistics.median(times)


def send(channel, rpc, packed):
    """Send a message; its answer does not matter."""
    try:
        if RPC_STREAMS[rpc]:
            list(channel.stream_stream(fields.METHODS[rpc])(iter([packed])))
        else:
            channel.unary_unary(fields.METHODS[rpc])(packed)
    except grpc.RpcError:
        pass


RPC_STREAMS = {name: name.endswith(("Stream", "StreamInfer")) for name in largest.RPCS}


def too_long(callbacks, cases, call):
    """Return the cases that hold the loop for longer than the yardstick, each time that they are sent."""
    found = {}
    for label, packed in cases:
        for _ in range(TRIES):
            seconds, what = callbacks.worst_of(lambda packed=packed: call(packed))
            bound = yardstick()  # at the same time: beside other programs, the processor time of both is longer
            if seconds <= bound:
                break
        else:
            found[label] = f"{1e3 * seconds:.0f} ms of {1e3 * bound:.0f}: {what}"
    return found


def packed(cases):
    return ((label, request.SerializeToString()) for label, request in cases)


@pytest.mark.slow
@pytest.mark.parametrize("rpc", largest.RPCS)
def test_no_large_field_holds_the_loop(served, channel, rpc):
    callbacks = Callbacks(served.loop)
    with callbacks.timed():
        assert too_long(callbacks, packed(largest.requests(rpc)), lambda message: send(channel, rpc, message)) == {}


def test_no_valid_request_that_asks_for_much_holds_the_loop(served, channel):
    callbacks = Callbacks(served.loop)
    with callbacks.timed():
        assert too_long(callbacks, packed(largest.valid()), lambda message: send(channel, "Explain", message)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("rpc", fields.RPCS)
def test_no_large_field_in_json_holds_the_loop(served, rpc):
    callbacks = Callbacks(served.loop)
    requests = largest.requests(rpc, files=False, variants=1)
    cases = ((label, json_format.MessageToJson(request).encode()) for label, request in requests)
    with callbacks.timed():
        assert too_long(callbacks, cases, lambda body: post(served.http_port, fields.METHODS[rpc], body)) == {}


def test_planted_work_on_the_loop_is_found(served, channel, monkeypatch):
    def slow(_request, _models, _limits):
        for _ in range(3 * LOOPS):
            pass
        raise ValueError

    monkeypatch.setattr("camserve_server.api.codec.read_explanation", slow)
    callbacks = Callbacks(served.loop)
    with callbacks.timed():
        found = too_long(callbacks, packed(largest.valid()), lambda message: send(channel, "Explain", message))

    assert len(found) == len(list(largest.valid()))
