"""A server that gets SIGTERM answers all accepted calls, and ends in time."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

import camserve
from camserve_server.api import grpc_server
from camserve_server.api.rpc import ServerState
from server_process import server_process
from support import StoppedClock, wait_until

MODEL = "holding=holding_nets:net?size=32"
PHOTO = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
WHITE = np.full((32, 32, 3), 255, np.uint8)
CLIENTS = 24
IN_FLIGHT = re.compile(r"^camserve_calls_in_flight (\S+)$", re.MULTILINE)
HOLDS = """
import time
from pathlib import Path

from torch import nn

FOLDER = Path(__file__).parent


class Net(nn.Sequential):
    def forward(self, x):
        if float(x.detach().mean((1, 2, 3)).max()) > 2:  # a white photo takes until the test ends it
            (FOLDER / "entered").touch()
            while not (FOLDER / "open").exists():
                time.sleep(0.01)  # real timeout: only a pause between two looks at the file
        return super().forward(x)


def net():
    return Net(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
"""


@contextlib.contextmanager
def serving(folder, model=MODEL, *, drain=600, ready=True):
    """Serve the model in a process; the block must stop it."""
    (folder / "holding_nets.py").write_text(HOLDS)
    flags = ("--drain-seconds", drain, "--threads", "1", "--metrics-address", "0", "--log-format", "json")
    with server_process((model,), *flags, ready=ready, forked=True, cwd=folder) as server:
        yield server


def listens(server):
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", server.port)):
        return True
    return False


def codes(server):
    """Return the status codes of the Explain calls in the log."""
    return [entry["code"] for entry in server.entries("Explain")]


def in_flight(server):
    """Return the number of calls that the server has accepted and not answered."""
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics") as answer:
        return float(IN_FLIGHT.search(answer.read().decode())[1])


class Callers:
    """Callers without retries: each sends requests until one is refused."""

    def __init__(self, address, *, until_refused=True):
        self.outcomes, self._done, self._until_refused = [], threading.Event(), until_refused
        self._threads = [threading.Thread(target=self._work, args=(address,)) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _work(self, address):
        with camserve.Client(address, retries=0) as client:
            while not self._done.is_set():
                try:
                    client.explain(PHOTO, overlay=None)
                    self.outcomes.append("OK")
                except camserve.CamserveError as error:
                    self.outcomes.append(type(error).__name__)
                    if self._until_refused:
                        return
                    time.sleep(0.02)  # real timeout: only a pause, so that the server gets the processor

    def until(self, outcome, times):
        wait_until(lambda: self.outcomes.count(outcome) >= times)

    def leave(self):
        self._done.set()
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def stuck(server):
    """Hold calls that never send their message, an unused stream and an unused connection."""
    never = threading.Event()

    def no_messages():
        never.wait()
        yield from ()

    with grpc.insecure_channel(server.address) as channel, socket.create_connection(("127.0.0.1", server.port)):
        rpcs = [*["Explain"] * 5, "ExplainStream"]
        calls = [channel.stream_stream(f"/camserve.v1.ExplainService/{rpc}")(no_messages()) for rpc in rpcs]
        try:
            yield calls
        finally:
            never.set()


@pytest.mark.parametrize("with_unused_calls", [pytest.param(False, marks=pytest.mark.slow), True])
def test_accepted_calls_are_answered_after_sigterm(with_unused_calls, tmp_path):
    """The calls wait for the model when the signal comes; unused calls, streams and connections are open, too."""
    with (
        serving(tmp_path) as server,
        camserve.Client(server.address, retries=0, timeout=600) as client,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        calls = [pool.submit(client.explain, WHITE, overlay=None) for _ in range(CLIENTS)]
        wait_until(lambda: in_flight(server) == CLIENTS)
        with stuck(server) if with_unused_calls else contextlib.nullcontext():
            server.send_signal()
            wait_until(lambda: server.entries("draining"))
            with pytest.raises(camserve.Unavailable, match="draining"):
                client.explain(PHOTO)
            (tmp_path / "open").touch()
            results = [call.result() for call in calls]
            code = server.wait()

    assert code == 0
    assert [len(result.explanations) for result in results] == [1] * CLIENTS
    assert codes(server).count("OK") == CLIENTS


def test_calls_that_arrive_during_a_stop_are_answered_or_unavailable(tmp_path):
    """24 clients without retries send requests until one is refused."""
    with serving(tmp_path) as server:
        callers = Callers(server.address)
        callers.until("OK", 2 * CLIENTS)
        code = server.stop()
        callers.leave()

    assert code == 0
    assert set(callers.outcomes) == {"OK", "Unavailable"}
    assert callers.outcomes.count("OK") <= codes(server).count("OK")  # a response is logged before the process ends
    assert set(codes(server)) <= {"OK", "UNAVAILABLE"}


@pytest.mark.parametrize("with_unused_calls", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sigterm_ends_a_server_that_is_loading_models(with_unused_calls, tmp_path):
    """The models load for an hour, and a stop must not wait for callers that keep an unused connection open."""
    (tmp_path / "loading_nets.py").write_text("import time\n\ndef net():\n    time.sleep(3600)\n")
    with serving(tmp_path, "loading_nets:net?size=32", drain=3600, ready=False) as server:
        callers = Callers(server.address, until_refused=False)
        callers.until("Unavailable", 3 * CLIENTS)
        if with_unused_calls:
            wait_until(lambda: listens(server))
        with stuck(server) if with_unused_calls else contextlib.nullcontext():
            code = server.stop()
            callers.leave()

    assert (code, set(callers.outcomes)) == (0, {"Unavailable"})


def test_accepted_calls_are_answered_if_a_worker_dies_at_the_stop(tmp_path):
    with serving(tmp_path) as server:
        callers = Callers(server.address)
        callers.until("OK", CLIENTS)
        (worker,) = server.workers()
        os.kill(worker, signal.SIGKILL)
        code = server.stop()
        callers.leave()

    assert code == 0
    assert set(callers.outcomes) <= {"OK", "Unavailable", "Internal"}
    assert callers.outcomes.count("Internal") <= 1  # a request may be alone when its worker is killed
    assert callers.outcomes.count("OK") <= codes(server).count("OK")


async def test_calls_that_arrived_while_the_server_was_descheduled_are_answered():
    """The event loop is blocked, as on a busy machine; gRPC delivers a call of that time a little later."""
    state = ServerState(1)
    with StoppedClock() as clock:
        stopping = asyncio.ensure_future(grpc_server._wait_until_quiet(state, 60, lambda: 0))

        async def check(times):
            """Let the server look for new calls several times."""
            for _ in range(times):
                clock.advance(1.01 * grpc_server.DRAIN_CHECK_INTERVAL)
                for _ in range(5):
                    await asyncio.sleep(0)

        await check(5)
        clock.advance(0.3)  # more than ten checks take; the loop was blocked
        await check(2)
        state.arrived += 1
        await check(grpc_server.QUIET_CHECKS)
        assert not stopping.done()
        await check(1)
        assert stopping.done()


async def test_call_refused_while_replies_are_delivered_is_not_lost():
    """A reply is on its way at the first look, a call is refused at the second, a ping is answered after the third."""
    state, deliveries = ServerState(1), [1, 0, 1]
    with StoppedClock() as clock:
        stopping = asyncio.ensure_future(grpc_server._wait_until_quiet(state, 60, lambda: deliveries.pop(0)))
        await asyncio.sleep(0)
        assert deliveries == [0, 1]
        state.unsent = 1
        clock.advance(1.01 * grpc_server.DELIVERY_CHECK_INTERVAL)
        await asyncio.sleep(0)
        state.unsent = 0
        while not stopping.done():
            clock.advance(1.01 * grpc_server.DRAIN_CHECK_INTERVAL)
            await asyncio.sleep(0)

    assert (await stopping, deliveries) == (0, [1])


def test_server_that_stops_with_calls_unanswered_exits_with_1(tmp_path):
    drain = 1  # real timeout: it has to expire, as the model never answers
    with (
        serving(tmp_path, drain=drain) as server,
        camserve.Client(server.address, retries=0, timeout=600) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        calls = [pool.submit(client.explain, WHITE, overlay=None) for _ in range(3)]
        wait_until(lambda: in_flight(server) == 3)
        code = server.stop()
        errors = [call.exception() for call in calls]

    assert code == 1
    assert all(isinstance(error, camserve.CamserveError) for error in errors)
    assert [entry["lost"] for entry in server.entries() if "lost" in entry] == [3]
