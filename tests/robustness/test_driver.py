"""Servers and workers with a GPU driver that is slow to start, is too old, or finds no GPU."""

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import fake_cuda
import fork_server as forked_programs
from camserve_server.api import grpc_server
from camserve_server.models import parse
from camserve_server.workers import Setup, Worker, fork_server
from camserve_server.workers import worker as worker_module
from camserve_server.workers.messages import Heartbeat
from camserve_server.workers.replies import serialize
from robustness.forking import running_fork_server
from server_process import server_process
from support import TINY, wait_until

MODEL = "tiny=slow_nets:tiny?size=32"
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def driver(tmp_path):
    return fake_cuda.compile_driver(tmp_path)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "slow_nets.py").write_text(TINY)
    return tmp_path


@pytest.fixture
def messages(monkeypatch):
    """All messages of worker processes."""
    received, handle = [], worker_module._WorkerProcess._handle

    def record(process, message):
        received.append(message)
        handle(process, message)

    monkeypatch.setattr(worker_module._WorkerProcess, "_handle", record)
    return received


@contextlib.contextmanager
def worker(setup):
    started = Worker(setup)
    try:
        yield started
    finally:
        started.close()


def test_worker_lives_and_is_not_ready_while_its_driver_starts(driver, folder, monkeypatch, ended, messages):
    for name, value in driver.environment.items():
        monkeypatch.setenv(name, value)
    setup = Setup("cuda:0", 1, path=(str(folder), *sys.path), log_level="error")
    with running_fork_server(driver.load) as forks, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(fork_server, "_fork_servers", [forks])
        with worker(setup) as started:
            loading = pool.submit(started.load, "tiny", parse(MODEL))
            (child,) = wait_until(lambda: driver.processes("starts"))
            before = len(messages)
            wait_until(lambda: len(messages) >= before + 4 or ended)

            assert not ended
            assert all(isinstance(message, Heartbeat) and not message.ready for message in messages)
            assert not loading.done()
            driver.go()
            wait_until(lambda: ended)  # the driver has reported that there is no GPU
            assert driver.processes("started")[child] == 1
            assert ended[0] == "a worker process ended: the worker could not use its device: exit 69"
            assert not any(isinstance(message, Heartbeat) and message.ready for message in messages)
        assert loading.exception()


def test_worker_that_sends_heartbeats_but_is_never_ready_is_ended(monkeypatch, ended, messages):
    ends = []

    class NeverReady:
        """A process that only sends heartbeats."""

        pid = 1

        def __init__(self, number):
            self.connection, self.ended = Connection(os.dup(number)), threading.Event()
            self.thread = threading.Thread(target=self.send_heartbeats)
            self.thread.start()

        def send_heartbeats(self):
            with contextlib.suppress(OSError):
                while not self.ended.wait(0.01):  # real timeout: it only sends now and then
                    self.connection.send_bytes(serialize(Heartbeat(ready=False)))

        def end(self):
            self.ended.set()
            self.thread.join()
            self.connection.close()
            ends.append(self)
            return -9

    monkeypatch.setattr(fork_server, "begin", NeverReady)
    now = [0.0]
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with worker(Setup("cpu", 1)):
        now[0] = worker_module.START_TIMEOUT
        before = len(messages)
        wait_until(lambda: len(messages) >= before + 2 or ended)
        assert not ended
        now[0] += 1
        wait_until(lambda: ended)

    assert ended[0] == "a worker process ended: the worker was not ready after 300 s"
    assert ends


# --- a server ---


@contextlib.contextmanager
def served(folder, driver, *arguments, forked=True):
    """Start a server with a driver, which may not get ready; yield it."""
    settings = {"ready": False, "forked": forked, "cwd": folder, "environment": driver.environment}
    if forked:
        settings["program"] = f"{driver.load}\n{forked_programs.SERVER}"
    else:
        settings["environment"] = driver.environment | driver.search_path
    with server_process((MODEL,), *arguments, **settings) as server:
        yield server


def serves(server, name=""):
    """Return True if a server reports that a service is ready."""
    with grpc.insecure_channel(server.address) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        return health_pb2_grpc.HealthStub(channel).Check(request).status == SERVING


@pytest.mark.parametrize(
    ("isolation", "forked"),
    [
        ("process", True),
        pytest.param("process", False, marks=pytest.mark.slow),  # no import starts the driver either
        pytest.param("thread", True, marks=pytest.mark.slow),
    ],
)
def test_server_lives_while_a_driver_starts_and_then_serves_from_the_cpu(folder, driver, isolation, forked):
    with served(folder, driver, "--isolation", isolation, forked=forked) as server:
        wait_until(lambda: serves(server, grpc_server.LIVE))
        wait_until(lambda: driver.processes("starts"))
        assert serves(server, grpc_server.LIVE)
        assert not serves(server)
        driver.go()
        wait_until(lambda: serves(server))
        # No process was forked from one in which the driver had started: CUDA would not work there.
        workers = server.workers()
        assert len(workers) == (isolation == "process")
        assert driver.processes("starts") == dict.fromkeys([server.pid, *workers], 1)
        assert server.stop() == 0
    assert "ended" not in server.log


@pytest.mark.parametrize(
    ("version", "message"),
    [
        pytest.param(99_000, "No CUDA GPUs are available", marks=pytest.mark.slow),
        (12_020, "The NVIDIA driver on your system is too old (found version 12020)"),
    ],
)
def test_server_with_a_missing_device_ends_with_the_reason(folder, version, message):
    driver = fake_cuda.compile_driver(folder, version)
    driver.go()
    with served(folder, driver, "--device", "cuda:0") as server:
        assert server.wait() == 2
    assert 'device "cuda:0": torch sees 0 CUDA devices here: ' + message in server.log.replace("\n", " ")
    assert driver.processes("starts") == {server.pid: 1}


@pytest.mark.slow
def test_server_stops_while_a_driver_starts(folder, driver):
    with served(folder, driver) as server:
        wait_until(lambda: serves(server, grpc_server.LIVE))
        wait_until(lambda: driver.processes("starts"))
        assert server.stop() == 0
