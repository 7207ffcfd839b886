"""A server among several, whose supervisor is the test."""

import contextlib
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

import camserve
import fork_server
from camserve_server.app import control, sharing
from camserve_server.app import server as app_server
from camserve_server.app.reserved_port import reserve
from camserve_server.core import config
from support import TINY, alive, children, wait_until

PROGRAM = "import sys; from camserve_server.app import start; start.run_among_several(sys.argv[1])"
PHOTO = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)


class Server:
    """A server process and its control messages."""

    def __init__(self, folder, *, early=False, **flags):
        self._reserved = contextlib.ExitStack()
        self.address = self._reserved.enter_context(reserve("127.0.0.1:0"))  # as the supervisor does
        given = {"address": self.address, "models": ("tiny=link_nets:tiny?size=32",), "threads": 2, **flags}
        settings = sharing.share(config.load(flags=given, environment={}), 2, cores=2)
        (folder / "link_nets.py").write_text(TINY)
        self._socket, theirs = socket.socketpair()
        self._lines = self._socket.makefile("rb")
        self.log = folder / "log"
        with theirs, self.log.open("w") as log:
            number = theirs.fileno()
            self.process = fork_server.start(PROGRAM, number, cwd=folder, stdout=log, stderr=log, pass_fds=(number,))
        self.send("start", settings=settings.model_dump(mode="json"), process=1, processes=2, early=early)

    def send(self, kind, **values):
        self._socket.sendall(control.encode(kind, **values))

    def receive(self, kind):
        message = control.decode(next(self._lines))
        assert message["kind"] == kind, message
        return message

    def ask(self, kind, **values):
        self.send(kind, id=7, **values)
        reply = self.receive("reply")
        assert reply.pop("id") == 7
        return reply

    def listens(self):
        host, port = self.address.split(":")
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, int(port))):
            return True
        return False

    def open(self):
        self.receive("warm")
        self.send("open")
        self.receive("serving")

    def close(self):
        self._lines.close()
        self._socket.close()
        self._reserved.close()


@pytest.fixture
def start(tmp_path):
    """Start a server with these settings; it is killed at the end."""
    with contextlib.ExitStack() as stack:

        def begin(**flags):
            server = Server(tmp_path, **flags)
            stack.callback(server.close)
            stack.callback(server.process.wait)
            stack.callback(server.process.kill)
            return server

        yield begin


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_server_opens_its_port_only_when_the_supervisor_lets_it(isolation, start):
    server = start(isolation=isolation)
    server.receive("warm")
    before = server.listens()
    server.send("open")
    server.receive("serving")
    with camserve.Client(server.address, retries=0) as client:
        assert client.health() is camserve.Health.SERVING
        assert client.explain(PHOTO).explanations
        server.send("stop")
        code = server.process.wait(60)

    assert (before, code) == (False, 0)
    entries = server.log.read_text().splitlines()
    assert len(entries) > 3
    assert all("process=1" in entry for entry in entries)


def test_server_of_a_first_start_refuses_calls_until_it_is_told_to_accept_them(start):
    server = start(early=True)
    server.receive("warm")
    with camserve.Client(server.address, retries=0) as client:
        before = client.health()
        with pytest.raises(camserve.Unavailable, match="the server is starting") as caught:
            client.explain(PHOTO)
        server.send("open")
        server.receive("serving")
        assert client.health() is camserve.Health.SERVING
        assert client.explain(PHOTO).explanations

    assert before is camserve.Health.NOT_SERVING
    assert caught.value.retry_after == 1.0


async def test_server_knows_its_number_and_the_number_of_all():
    settings = config.load(environment={})
    link = SimpleNamespace(position="1/2")

    assert app_server._Server.build(settings, link, lambda _port: None).state.process == "1/2"
    assert app_server._Server.build(settings, None, lambda _port: None).state.process == ""


def test_server_ignores_the_signals_that_its_supervisor_passes_on(start):
    server = start()
    server.open()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(server.process.pid, number)
    server.send("ping")
    server.receive("pong")

    assert server.process.poll() is None


def samples(server, family):
    """Return the samples of a metric: their names, labels and values."""
    families = {name: samples for name, _, _, _, samples in server.ask("metrics")["families"]}
    return [(name, labels, value) for name, labels, value, _, _ in families[family]]


def test_second_stop_ends_a_server_at_once(start):
    server = start(drain_seconds=3600, metrics_address="127.0.0.1:1")  # the supervisor opens the address
    server.open()
    requests = Queue()
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream("/camserve.v1.ExplainService/ExplainStream")(iter(requests.get, None))
        wait_until(lambda: samples(server, "camserve_calls_in_flight")[0][-1] == 1)
        server.send("stop")
        wait_until(lambda: "draining" in server.log.read_text())
        server.send("stop")

        assert server.process.wait(60) == 1
        call.cancel()
        requests.put(None)


def test_server_and_its_workers_end_without_a_supervisor(start):
    server = start()
    server.open()
    processes = [server.process.pid, *(forker := children(server.process.pid)), *children(forker[0])]
    server.close()

    wait_until(lambda: not any(map(alive, processes)))
    assert len(processes) == 3


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"models": ("link_nets:missing",)}, "missing"),
        ({"models": ("nope:x",)}, "nope"),
        ({"tls_cert": "/nowhere.pem", "tls_key": "/nowhere.key"}, "nowhere"),
    ],
)
def test_error_of_the_settings_is_reported_to_the_supervisor_and_not_logged(flags, error, start):
    server = start(**flags)

    assert error in server.receive("failed")["error"]
    assert server.process.wait(60) == 2
    assert "Traceback" not in server.log.read_text()


def test_metrics_are_returned_to_the_supervisor(start):
    server = start(metrics_address="127.0.0.1:1")
    server.open()
    with camserve.Client(server.address, retries=0) as client:
        client.explain(PHOTO)

    def counted():
        found = samples(server, "camserve_request_duration_seconds")
        return [(labels["rpc"], value) for name, labels, value in found if name.endswith("_count")]

    assert wait_until(counted) == [("Explain", 1.0)]


def change(server, operation, version=0, **arguments):
    return server.ask("change", operation=operation, arguments=arguments, version=version)


def version_of(server):
    with camserve.Client(server.address, retries=0) as client:
        (model,) = client.models()
        return model.state, model.version


def test_supervisor_loads_and_unloads_models(start):
    server = start(admin=True)
    server.open()
    load = {"name": "tiny", "weights": "", "sha256": ""}

    assert change(server, "load", **load)["version"] == 2
    assert change(server, "load", 5, **load)["version"] == 5
    assert version_of(server) == (camserve.ModelState.READY, 5)
    assert change(server, "unload", 8, name="tiny")["version"] == 8
    assert version_of(server) == (camserve.ModelState.UNLOADED, 8)
    refused = change(server, "load", **{**load, "weights": "other.pt"})
    assert (refused["error"], refused["field"]) == ("FailedPrecondition", "weights")


def test_load_of_a_client_is_made_by_the_supervisor(start):
    """The reply of the supervisor decides, so that all processes have the model when the call returns."""
    server = start(admin=True)
    server.open()
    with camserve.Client(server.address, retries=0) as client, ThreadPoolExecutor(1) as thread:
        call = thread.submit(client.load_model, "tiny")
        asked = server.receive("change")
        assert (asked["operation"], asked["arguments"]["name"]) == ("load", "tiny")
        assert version_of(server)[1] == 1
        change(server, "load", **asked["arguments"])
        assert not call.done()
        server.send("reply", id=asked["id"])
        assert call.result(60).version == 2

        call = thread.submit(client.unload_model, "tiny")
        asked = server.receive("change")
        assert (asked["operation"], asked["arguments"]) == ("unload", {"name": "tiny"})
        error = {"error": "NotFound", "message": "no such file", "field": "weights", "fault": "is missing"}
        server.send("reply", id=asked["id"], **error)
        with pytest.raises(camserve.NotFound, match="no such file"):
            call.result(60)
