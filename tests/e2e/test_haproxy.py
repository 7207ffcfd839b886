"""HAProxy with the configuration of deploy/haproxy balances the requests of gRPC clients that know nothing of it."""

import collections
import contextlib
import io
import itertools
import re
import shutil
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health, health_pb2_grpc
from PIL import Image

import camserve
import needs
from balancer import HOST, PROCESSES, balancer, changed, dns_server
from camserve.v1 import explain_pb2, explain_pb2_grpc
from robustness.authority import Authority
from server_process import reserved_port, server_process
from support import PHOTOS, jpeg, wait_until

ROOT = Path(__file__).parents[2]
TRITON, CALLS = ROOT / ".venv-triton/bin/python", ROOT / "tests/e2e/triton_calls.py"
RANDOM = np.random.default_rng(0)
PHOTO = jpeg(RANDOM.integers(0, 255, (48, 64, 3), np.uint8))
WHITE = jpeg(np.full((32, 32, 3), 255, np.uint8))
REQUEST = explain_pb2.ExplainRequest(image=PHOTO)
NETS = """
import time
from pathlib import Path

import torch
from torch import nn

FOLDER = Path(__file__).parent


class Net(nn.Sequential):
    def forward(self, x):
        if float(x.detach().mean((1, 2, 3)).max()) > 2:  # a white photo takes until the test ends it
            (FOLDER / "entered").touch()
            while not (FOLDER / "open").exists():
                time.sleep(0.01)  # real timeout: only a pause between two looks at the file
            (FOLDER / "entered").unlink()
        return super().forward(x)


def net():
    while (FOLDER / "loading").exists():
        time.sleep(0.01)  # real timeout: only a pause between two looks at the file
    torch.manual_seed(0)
    return Net(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
"""
MODEL = "tiny=balanced_nets:net?size=32"
FLAGS = ("--isolation", "thread", "--threads", "1", "--log-format", "json")
EVERY_ADDRESS = "0.0.0.0"  # noqa: S104 -- no server listens there

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("haproxy"), reason=needs.HAPROXY)]


class Server:
    """A server on an address of the loopback network, with a folder of its own.

    Attributes:
        address: its address, the same whenever it is started again.
    """

    def __init__(self, stack, folder, host, port, *flags):
        self.folder, self.host, self.address = folder, host, f"{host}:{port}"
        self._stack, self._flags = stack, (*FLAGS, "--address", self.address, *flags)
        folder.mkdir()
        (folder / "balanced_nets.py").write_text(NETS)
        self.start()

    def start(self):
        started = server_process((MODEL,), *self._flags, ready=False, forked=True, cwd=self.folder)
        self._running = self._stack.enter_context(started)
        assert self._running.address == self.address

    def end(self, which):
        """Send a signal; return the exit code."""
        return self._running.stop(which)

    def answers(self):
        """Return the number of calls since the start by their status."""
        return collections.Counter(entry["code"] for entry in self._running.entries() if "code" in entry)

    def has_entered(self):
        """Return True while the model computes a white photo."""
        return (self.folder / "entered").exists()

    def open(self):
        """Let the white photos go on."""
        (self.folder / "open").touch()

    def close(self):
        """Let the white photos finish, and hold further ones."""
        self.open()
        wait_until(lambda: not self.has_entered())  # also the one of a call that was cancelled
        (self.folder / "open").unlink()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers with one port. Each test leaves them running, and closed."""
    folder = tmp_path_factory.mktemp("servers")
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port(EVERY_ADDRESS))
        yield [Server(stack, folder / host, host, port) for host in ("127.0.0.2", "127.0.0.3")]


@contextlib.contextmanager
def balanced(folder, servers, *changes):
    """Run HAProxy in front of servers; yield it when all of them are up."""
    port = servers[0].address.rpartition(":")[2] if servers else 1
    with (
        dns_server([server.host for server in servers]) as dns,
        balancer(folder, f"{HOST}:{port}", *changes, dns=dns) as running,
    ):
        wait_until(lambda: running.passed_checks() == len(servers))
        yield running


@pytest.fixture(scope="module")
def haproxy(tmp_path_factory, servers):
    with balanced(tmp_path_factory.mktemp("haproxy"), servers) as running:
        yield running


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=0)
    return out.getvalue()


@contextlib.contextmanager
def plain_stub(address, credentials=None):
    """A client that knows nothing of camserve: one channel, and no retries."""
    options = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1))
    channel = (
        grpc.secure_channel(address, credentials, options) if credentials else grpc.insecure_channel(address, options)
    )
    with channel:
        yield explain_pb2_grpc.ExplainServiceStub(channel)


@pytest.fixture
def stub(haproxy):
    with plain_stub(haproxy.address) as one:
        yield one


@pytest.fixture
def held(servers):
    """Return a function that starts a call of a white photo, and returns it with the server that computes it."""

    def hold(stub):
        before = [server for server in servers if server.has_entered()]
        call = stub.Explain.future(explain_pb2.ExplainRequest(image=WHITE))
        (server,) = wait_until(lambda: [each for each in servers if each not in before and each.has_entered()])
        return call, server

    yield hold
    for server in servers:
        server.close()


def answered(servers, run, calls):
    """Return how many calls each server answered while this ran."""
    before = [server.answers()["OK"] for server in servers]
    run()
    wait_until(
        lambda: sum(server.answers()["OK"] for server in servers) >= sum(before) + calls
    )  # logged after the reply
    return [server.answers()["OK"] - count for server, count in zip(servers, before, strict=True)]


def assert_even(counts, calls):
    assert sum(counts) == calls
    assert min(counts) >= calls / 3


# --- every request is balanced ---


def test_calls_of_one_channel_use_both_servers(servers, stub, held):
    """The second call is sent while the first one is in progress."""
    (first, server), (second, other) = held(stub), held(stub)
    assert {server, other} == set(servers)

    def run():
        calls = [stub.Explain.future(REQUEST) for _ in range(40)]
        for each in servers:
            each.open()
        assert all(call.result().predictions for call in (first, second, *calls))

    assert sum(answered(servers, run, 42)) == 42


def test_calls_one_after_another_use_both_servers(servers, stub):
    assert_even(answered(servers, lambda: [stub.Explain(REQUEST) for _ in range(30)], 30), 30)


@pytest.mark.skipif(not TRITON.exists(), reason=needs.TRITONCLIENT)
def test_calls_of_a_triton_client_use_both_servers(servers, haproxy):
    def run():
        command = [TRITON, CALLS, haproxy.address, PHOTOS["rocket"]]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "30\n"

    assert_even(answered(servers, run, 30), 30)


def test_busy_server_gets_no_further_calls_while_another_is_idle(servers, stub, held):
    call, busy = held(stub)
    idle = next(server for server in servers if server is not busy)

    assert answered([idle], lambda: [stub.Explain(REQUEST) for _ in range(10)], 10) == [10]
    busy.open()
    assert call.result(60).predictions


# --- nothing is lost on the way ---


def test_response_is_that_of_a_server(servers, haproxy):
    with camserve.Client(haproxy.address) as client, camserve.Client(servers[0].address) as direct:
        balanced, expected = (each.explain(PHOTO).explanations[0] for each in (client, direct))

    assert balanced.overlay == expected.overlay


def test_stream_of_photos_stays_on_one_server(servers, haproxy):
    def run():
        with camserve.Client(haproxy.address) as client:
            assert len([result.predictions for result in client.explain_many([PHOTO] * 50)]) == 50

    assert sorted(answered(servers, run, 51)) == [0, 51]  # the photos and the stream


def test_largest_message_passes_and_a_larger_one_is_refused(stub):
    """HAProxy may end the call before it reads the server's status, as the server does not read the whole message."""
    pixels, limit = RANDOM.integers(0, 255, (1660, 1660, 3), np.uint8), 8 * 2**20
    largest = explain_pb2.ExplainRequest(image=png(pixels))

    assert 0.98 * limit < largest.ByteSize() <= limit
    assert stub.Explain(largest).photo.width == 1660
    with pytest.raises(grpc.RpcError) as refused:
        stub.Explain(explain_pb2.ExplainRequest(image=bytes(limit)))
    assert refused.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)


def test_cancelled_call_is_cancelled_in_its_server(stub, held):
    call, server = held(stub)
    before = server.answers()["CANCELLED"]
    call.cancel()
    wait_until(lambda: server.answers()["CANCELLED"] > before)
    server.open()


def test_silent_call_ends_only_by_the_timeout_for_a_server(tmp_path_factory, servers, held):
    changes = [
        ("timeout http-request 10s", "timeout http-request 1s"),
        ("timeout connect 2s", "timeout connect 1s"),
    ]
    with contextlib.ExitStack() as stack:
        stubs = []
        for change in (changes, [("timeout server 1h", "timeout server 3s")]):
            haproxy = stack.enter_context(balanced(tmp_path_factory.mktemp("haproxy"), servers, *change))
            stubs.append(stack.enter_context(plain_stub(haproxy.address)))
        long, _ = held(stubs[0])
        cut = stubs[1].Explain.future(explain_pb2.ExplainRequest(image=WHITE))

        assert (cut.code(), cut.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, "the server did not answer in time")
        assert not long.done()
        for server in servers:
            server.open()
        assert long.result(60).predictions


def test_connections_reach_their_age_and_no_call_of_our_client_fails(tmp_path):
    """HAProxy 2.6 cuts off a response in some of these cases. Our client sends the request again."""
    attempts = re.compile(r'^haproxy_server_connection_attempts_total{proxy="camserve",.*} (\d+)$', re.MULTILINE)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port("127.0.0.4"))
        age = ("--connection-age-seconds", "0.3")  # real timeout: connections have to reach it
        server = Server(stack, tmp_path / "server", "127.0.0.4", port, *age)
        haproxy = stack.enter_context(balanced(tmp_path, [server]))

        def connections():
            return sum(map(int, attempts.findall(haproxy.metrics())))

        with Callers(haproxy.address) as callers:
            wait_until(lambda: connections() > 3 * CALLERS)
        ended = connections()

    assert set(callers.ours) == {OK}
    assert callers.plain[OK]
    assert callers.plain.total() - callers.plain[OK] <= CALLERS * ended  # at most those in progress at each end


# --- servers that stop, die and start ---


OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
CALLERS = 4


class Callers:
    """Callers that send requests in the background: two clients of ours, and two plain ones.

    Attributes:
        ours: the number of calls of our clients by their status.
        plain: the same of the plain ones.
    """

    def __init__(self, address):
        self.ours, self.plain, self._done = collections.Counter(), collections.Counter(), threading.Event()
        self._threads = [
            threading.Thread(target=work, args=(address,)) for work in (self._ours, self._plain) * (CALLERS // 2)
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        for thread in self._threads:
            thread.join()

    def wait_for_more(self, calls=10):
        """Return when both kinds of clients have ended some more calls."""
        before = self.ours.total(), self.plain.total()
        wait_until(lambda: self.ours.total() >= before[0] + calls and self.plain.total() >= before[1] + calls)

    def _ours(self, address):
        with camserve.Client(address) as client:
            self._repeat(lambda: client.explain(PHOTO, overlay=None), self.ours)

    def _plain(self, address):
        with plain_stub(address) as stub:
            self._repeat(lambda: stub.Explain(REQUEST), self.plain)

    def _repeat(self, call, codes):
        while not self._done.is_set():
            codes[code_of(call)] += 1


def code_of(call):
    try:
        call()
    except camserve.CamserveError as error:
        return error.code
    except grpc.RpcError as error:
        return error.code()
    return OK


def test_server_that_drains_finishes_its_calls_and_gets_no_others(servers, haproxy, stub, held):
    """Calls that it refuses before HAProxy has noticed are UNAVAILABLE. Our client sends them again."""
    with Callers(haproxy.address) as callers, ThreadPoolExecutor(1) as thread:
        callers.wait_for_more()
        call, draining = held(stub)
        code = thread.submit(draining.end, signal.SIGTERM)
        wait_until(lambda: haproxy.states() == ["NOLB", "UP"])

        assert [code_of(lambda: stub.Explain(REQUEST)) for _ in range(20)] == [OK] * 20
        draining.open()
        assert call.result(60).predictions
        assert code.result() == 0
        callers.wait_for_more()
    draining.start()
    wait_until(lambda: haproxy.states() == ["UP", "UP"])

    assert set(callers.ours) == {OK}
    assert set(callers.plain) <= {OK, UNAVAILABLE}
    assert_even(answered(servers, lambda: [stub.Explain(REQUEST) for _ in range(30)], 30), 30)


def test_server_that_dies_is_replaced_by_the_other_until_it_is_warm_again(servers, haproxy, stub):
    """Only the calls that were in progress are UNAVAILABLE, two or a few more. Our client sends them again."""
    dying = servers[0]
    with Callers(haproxy.address) as callers:
        callers.wait_for_more()
        dying.end(signal.SIGKILL)
        callers.wait_for_more()
        wait_until(lambda: haproxy.states() == ["DOWN", "UP"])
        callers.wait_for_more()
        (dying.folder / "loading").touch()
        dying.start()
        wait_until(lambda: haproxy.states() == ["NOLB", "UP"])
        callers.wait_for_more()
        (dying.folder / "loading").unlink()
        wait_until(lambda: haproxy.states() == ["UP", "UP"])
        callers.wait_for_more()

    assert set(callers.ours) == {OK}
    assert callers.plain[UNAVAILABLE] < 10  # of hundreds
    assert set(callers.plain) <= {OK, UNAVAILABLE}
    assert_even(answered(servers, lambda: [stub.Explain(REQUEST) for _ in range(30)], 30), 30)


def test_stream_continues_on_the_other_server_when_its_own_dies(servers, haproxy):
    with camserve.Client(haproxy.address) as client:
        busy = [client.explain_many(itertools.repeat(PHOTO), in_flight=4) for _ in servers]  # one stream on each server
        for results in busy:
            next(results)
        servers[0].end(signal.SIGKILL)
        codes = {code_of(lambda results=results: list(itertools.islice(results, 40))) for results in busy}
        for results in busy:
            results.close()
    servers[0].start()
    wait_until(lambda: haproxy.states() == ["UP", "UP"])

    assert codes == {OK}


def test_without_a_server_the_error_is_a_grpc_status(tmp_path):
    with balanced(tmp_path, []) as haproxy, plain_stub(haproxy.address) as stub:
        assert not haproxy.ready()
        with pytest.raises(grpc.RpcError) as refused:
            stub.Explain(REQUEST)

    assert (refused.value.code(), refused.value.details()) == (UNAVAILABLE, "no server is ready")


# --- the lines of the configuration that are comments ---

TLS = (
    ('    bind "${CAMSERVE_BIND}" proto h2\n', ""),
    ('    # bind "${CAMSERVE_BIND}" ssl', '    bind "${CAMSERVE_BIND}" ssl'),
)


@pytest.fixture
def tls(tmp_path):
    """Changes of the configuration for TLS, with a certificate, and the credentials of a client that trusts it."""
    authority = Authority()
    pair = authority.issue("127.0.0.1")
    (tmp_path / "both.pem").write_bytes(pair.cert + pair.key)
    changes = (*TLS, ("/etc/haproxy/camserve.pem", str(tmp_path / "both.pem")))
    return changes, grpc.ssl_channel_credentials(authority.pem)


@pytest.mark.parametrize("name", ["as it is", "TLS", "processes"])
def test_haproxy_accepts_the_configuration_without_warnings(name, tmp_path, tls):
    changes = {"as it is": (), "TLS": tls[0], "processes": PROCESSES}[name]
    (tmp_path / "haproxy.cfg").write_text(changed(*changes))
    checked = subprocess.run(
        ["haproxy", "-c", "-f", tmp_path / "haproxy.cfg"], capture_output=True, text=True, check=False
    )

    assert (checked.returncode, "WARNING" in checked.stderr) == (0, False), checked.stderr


def test_client_with_tls_is_served(tmp_path, servers, tls):
    changes, credentials = tls
    with balanced(tmp_path, servers, *changes) as haproxy, plain_stub(haproxy.address, credentials) as stub:
        assert stub.Explain(REQUEST).predictions


@contextlib.contextmanager
def serve_counting(port):
    """Serve Explain with empty responses on a port that several servers share; yield it and the list of requests."""
    requests = []

    def explain(request, _context):
        requests.append(request)
        return explain_pb2.ExplainResponse()

    servicer = explain_pb2_grpc.ExplainServiceServicer()
    servicer.Explain = explain
    healthy = health.HealthServicer()
    server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 1)])
    explain_pb2_grpc.add_ExplainServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield port, requests
    finally:
        server.stop(None).wait()


def test_calls_of_one_channel_use_every_process_of_a_shared_port(tmp_path):
    """The kernel assigns connections at random. With 800 calls on 100 connections, a quarter is 5 deviations away."""
    with (
        serve_counting(0) as (port, first),
        serve_counting(port) as (_, second),
        balancer(tmp_path, f"127.0.0.1:{port}", *PROCESSES) as haproxy,
        plain_stub(haproxy.address) as stub,
        ThreadPoolExecutor(8) as threads,
    ):
        wait_until(lambda: haproxy.passed_checks() == 16)
        list(threads.map(stub.Explain, [REQUEST] * 800))

        assert len(first) + len(second) == 800
        assert min(len(first), len(second)) > 800 / 4
