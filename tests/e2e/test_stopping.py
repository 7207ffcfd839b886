"""A server that gets SIGTERM answers all accepted calls, and ends in time."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

import camserve
import fork_server
from camserve_server.api import grpc_server
from camserve_server.api.rpc import ServerState
from support import children, wait_until

MODEL = "small=torchvision:mobilenet_v3_small?weights=none&size=64"
PHOTO = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
WHITE = np.full((32, 32, 3), 255, np.uint8)
DRAIN_TIMEOUT, CLIENTS = 5, 24  # seconds, callers
STOP_TIMEOUT = 100  # seconds until a server that does not stop is killed; less than pytest's own timeout
HANGS = """
import time
from pathlib import Path

from torch import nn


class Net(nn.Sequential):
    def forward(self, x):
        if float(x.detach().mean((1, 2, 3)).max()) > 2:
            (Path(__file__).parent / "hangs").touch()
            time.sleep(3600)
        return super().forward(x)


def net():
    return Net(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
"""


class Server:
    """Server in a process."""

    def __init__(self, log, model=MODEL, drain=DRAIN_TIMEOUT):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address, self.log = f"127.0.0.1:{self.port}", log
        flags = f"--model {model} --address {self.address} --drain-seconds {drain} --threads 1 --log-format json"
        with log.open("w") as file:
            self._process = fork_server.start(
                fork_server.SERVER, "serve", *flags.split(), cwd=log.parent, stdout=file, stderr=file
            )

    def listens(self):
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def stop(self):
        """Send SIGTERM; return the exit code once the process has ended."""
        self._process.terminate()
        try:
            return self._process.wait(STOP_TIMEOUT)
        finally:
            self._process.kill()

    @property
    def worker(self):
        """The id of the worker process, a child of the fork server."""
        (fork_server,) = children(self._process.pid)
        (worker,) = children(fork_server)
        return worker

    def entries(self):
        """Return the entries of the log."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def calls(self):
        """Return the status codes of the Explain calls in the log."""
        return [entry["code"] for entry in self.entries() if entry["message"] == "Explain"]


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
                    time.sleep(0.02)

    def until(self, outcome, times):
        wait_until(lambda: self.outcomes.count(outcome) >= times)

    def leave(self):
        self._done.set()
        for thread in self._threads:
            thread.join()


def warm(address):
    with camserve.Client(address, retries=0) as client:
        wait_until(lambda: serves(client))


def serves(client):
    with contextlib.suppress(camserve.Unavailable):
        return client.health() is camserve.Health.SERVING
    return False


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


@pytest.mark.parametrize("number", range(6))
def test_accepted_calls_are_answered_after_sigterm(number, tmp_path):
    """24 clients without retries get the response of every request that the server completed.

    In every other round, other callers hold unused calls, streams and connections.
    """
    server = Server(tmp_path / "log")
    warm(server.address)
    with stuck(server) if number % 2 else contextlib.nullcontext():
        callers = Callers(server.address)
        callers.until("OK", 30 + 10 * number)
        code = server.stop()
        callers.leave()

    assert code == 0
    assert set(callers.outcomes) == {"OK", "Unavailable"}
    assert server.calls().count("OK") == callers.outcomes.count("OK")
    assert set(server.calls()) <= {"OK", "UNAVAILABLE"}


@pytest.mark.parametrize("with_unused_calls", [False, True])
def test_sigterm_ends_a_server_that_is_loading_models(with_unused_calls, tmp_path):
    """The models load for an hour, and a stop must not wait for callers that keep an unused connection open."""
    (tmp_path / "loading_nets.py").write_text("import time\n\ndef net():\n    time.sleep(3600)\n")
    server = Server(tmp_path / "log", "loading_nets:net?size=32", drain=3600)
    callers = Callers(server.address, until_refused=False)
    callers.until("Unavailable", 3 * CLIENTS)
    if with_unused_calls:
        wait_until(server.listens)
    with stuck(server) if with_unused_calls else contextlib.nullcontext():
        code = server.stop()
        callers.leave()

    assert (code, set(callers.outcomes)) == (0, {"Unavailable"})


def test_accepted_calls_are_answered_if_a_worker_dies_at_the_stop(tmp_path):
    server = Server(tmp_path / "log", drain=240)
    warm(server.address)
    callers = Callers(server.address)
    callers.until("OK", CLIENTS)
    os.kill(server.worker, signal.SIGKILL)
    code = server.stop()
    callers.leave()

    assert code == 0
    assert set(callers.outcomes) <= {"OK", "Unavailable", "Internal"}
    assert callers.outcomes.count("Internal") <= 1  # a request may be alone when its worker is killed
    assert server.calls().count("OK") == callers.outcomes.count("OK")


async def test_calls_that_arrived_while_the_server_was_descheduled_are_answered():
    """The event loop is blocked, as on a busy machine; gRPC delivers a call of that time a little later."""
    loop, state, events = asyncio.get_running_loop(), ServerState(1), []

    def deliver_call():
        events.append("call")
        state.arrived += 1

    def block_loop():
        time.sleep(0.3)
        loop.call_later(0.02, deliver_call)

    loop.call_later(0.05, block_loop)
    await grpc_server._wait_until_quiet(state, 60)
    events.append("finished")

    assert events == ["call", "finished"]


def test_server_that_stops_with_calls_unanswered_exits_with_1(tmp_path):
    (tmp_path / "hanging_nets.py").write_text(HANGS)
    server = Server(tmp_path / "log", "hangs=hanging_nets:net?size=32", drain=1)
    warm(server.address)
    with camserve.Client(server.address, retries=0, timeout=60) as client, ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(client.explain, WHITE, overlay=None) for _ in range(3)]
        wait_until((tmp_path / "hangs").exists)
        code = server.stop()
        errors = [call.exception(60) for call in calls]

    assert code == 1
    assert all(isinstance(error, camserve.CamserveError) for error in errors)
    accepted = [error for error in errors if error.reason != "DRAINING"]  # a slow machine may send some too late
    assert accepted
    assert [entry["lost"] for entry in server.entries() if "lost" in entry] == [len(accepted)]
