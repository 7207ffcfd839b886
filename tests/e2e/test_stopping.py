"""A server that is told to stop loses nothing that it accepted, and is gone in time."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc
import numpy as np
import pytest

import camserve

# Imports what a server imports, once; then becomes one server after the other, each a process of its own.
NURSERY = """
import os, sys
from camserve_server import cli, commands, server

for line in sys.stdin:
    log, *arguments = line.split()
    pid = os.fork()
    if not pid:
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
        sys.stdin.close()
        os.close(1)
        sys.argv[1:] = arguments
        cli.main()
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
MODEL = "small=torchvision:mobilenet_v3_small?weights=none&size=64"
PHOTO = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
GRACE, CLIENTS = 5, 24


@pytest.fixture(scope="module")
def nursery():
    command, pipe = [sys.executable, "-c", NURSERY], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.stdin.close()


class Server:
    """One process that serves."""

    def __init__(self, nursery, log):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address, self.log, self._nursery = f"127.0.0.1:{self.port}", log, nursery
        flags = f"--model {MODEL} --address {self.address} --drain-seconds {GRACE} --threads 1 --log-format json"
        nursery.stdin.write(f"{log} serve {flags}\n")
        nursery.stdin.flush()
        self._pid = int(nursery.stdout.readline())

    def stop(self):
        """Tell it to stop; return its exit code, and how long it took to be gone."""
        began = time.monotonic()
        os.kill(self._pid, signal.SIGTERM)
        timer = threading.Timer(GRACE + 10, os.kill, (self._pid, signal.SIGKILL))
        timer.start()
        code = int(self._nursery.stdout.readline())
        timer.cancel()
        return code, time.monotonic() - began

    def calls(self):
        """How its calls of Explain went, by its own log."""
        entries = map(json.loads, self.log.read_text().splitlines())
        return [entry["code"] for entry in entries if entry["message"] == "Explain"]


class Crowd:
    """Callers without patience: each asks again and again, until it is refused."""

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
        give_up = time.monotonic() + 60
        while self.outcomes.count(outcome) < times:
            assert time.monotonic() < give_up, set(self.outcomes)
            time.sleep(0.01)

    def leave(self):
        self._done.set()
        for thread in self._threads:
            thread.join()


def warm(address):
    with camserve.Client(address, retries=0) as client:
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            with contextlib.suppress(camserve.Unavailable):
                if client.health() is camserve.Health.SERVING:
                    return
            time.sleep(0.05)
    pytest.fail("the server did not start")


@contextlib.contextmanager
def stuck(server):
    """Hold calls whose message never comes, a stream on which nothing is asked, and a connection that is silent."""
    never = threading.Event()

    def nothing():
        never.wait()
        yield from ()

    with grpc.insecure_channel(server.address) as channel, socket.create_connection(("127.0.0.1", server.port)):
        rpcs = [*["Explain"] * 5, "ExplainStream"]
        calls = [channel.stream_stream(f"/camserve.v1.ExplainService/{rpc}")(nothing()) for rpc in rpcs]
        try:
            yield calls
        finally:
            never.set()


@pytest.mark.parametrize("number", range(10))
def test_what_was_accepted_when_sigterm_came_is_answered(number, nursery, tmp_path):
    """24 clients without retries: every request that the server completed reached its client, none failed midway.

    In every other round some callers hold on to calls, streams and connections that they do not use.
    """
    server = Server(nursery, tmp_path / "log")
    warm(server.address)
    with stuck(server) if number % 2 else contextlib.nullcontext():
        crowd = Crowd(server.address)
        crowd.until("OK", 30 + 10 * number)
        code, took = server.stop()
        crowd.leave()

    assert code == 0
    assert took <= GRACE + 2
    assert set(crowd.outcomes) == {"OK", "Unavailable"}
    assert server.calls().count("OK") == crowd.outcomes.count("OK")
    assert set(server.calls()) <= {"OK", "UNAVAILABLE"}


@pytest.mark.parametrize("held", [False, True])
def test_sigterm_while_the_models_load_is_taken_at_once_whoever_is_waiting(held, nursery, tmp_path):
    server = Server(nursery, tmp_path / "log")
    crowd = Crowd(server.address, until_refused=False)
    crowd.until("Unavailable", 3 * CLIENTS)
    with stuck(server) if held else contextlib.nullcontext():
        code, took = server.stop()
        crowd.leave()

    assert (code, set(crowd.outcomes)) == (0, {"Unavailable"})
    assert took <= 2
