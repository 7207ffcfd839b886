"""`serve --processes 2`: two servers on one port, as a user starts them."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import camserve
import fork_server
import http_calls
import needs
from balancer import PROCESSES, balancer
from camserve.web import connect
from server_process import server_process
from support import PHOTOS, TINY, children, wait_until

TRITON = Path(__file__).parents[2] / ".venv-triton/bin/python"
CALLS = Path(__file__).parent / "triton_calls.py"
PHOTO = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
COUNT = "camserve_request_duration_seconds_count"
CONNECTIONS = 24
"""Connections of a test. The kernel chooses the process of each at random: that all get the same one is a chance of
one to eight million."""


class Server:
    """A server of two processes, with its folder."""

    def __init__(self, running, folder):
        self._running, self.folder, self.pid, self.address = running, folder, running.pid, running.address
        self.http_port, self.metrics_address = running.http_port, running.metrics_address

    def logged(self, message):
        """Return the entries of the log with this message."""
        return self._running.entries(message)

    def stop(self, number):
        """Send a signal to the whole process group, as a terminal does; return the exit code."""
        os.killpg(self.pid, number)
        return self._running.wait()

    def samples(self):
        """Return the value of every sample by name and labels."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics") as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def counted(self, **labels):
        """Return the number of requests with these labels, by process."""
        counts = Counter()
        for (name, pairs), value in self.samples().items():
            if name == COUNT and labels.items() <= set(pairs):
                counts[dict(pairs)["process"]] += int(value)
        return counts


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    (folder / "process_nets.py").write_text(TINY)
    flags = (
        "--processes 2 --threads 2 --http-address 0 --metrics-address 0 --admin --log-format json --drain-seconds 600"
    )
    flags = (*flags.split(), "--model-folder", folder)
    with server_process(("tiny=process_nets:tiny?size=32",), *flags, cwd=folder, prefix=("setsid",)) as running:
        yield Server(running, folder)


@contextlib.contextmanager
def connections(server, count=CONNECTIONS):
    """Yield clients with a connection each."""
    with contextlib.ExitStack() as stack:
        options = (("grpc.use_local_subchannel_pool", 1),)
        channels = [stack.enter_context(grpc.insecure_channel(server.address, options)) for _ in range(count)]
        yield [stack.enter_context(camserve.Client(channel=channel, retries=0)) for channel in channels]


@pytest.mark.slow
def test_processes_share_the_requests_and_the_merged_metrics_count_all(server):
    before = server.counted(rpc="Explain", code="OK")
    with connections(server) as clients, ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda client: client.explain(PHOTO), clients * 3))
        healths = {client.health() for client in clients}
    counted = wait_until(
        lambda: (now := server.counted(rpc="Explain", code="OK") - before).total() >= 3 * CONNECTIONS and now
    )

    assert healths == {camserve.Health.SERVING}
    assert counted.total() == len(results) == 3 * CONNECTIONS
    assert set(counted) == {"0", "1"}
    assert len({result.explanations[0].score for result in results}) == 1


@pytest.mark.slow
def test_processes_share_the_http_port(server):
    found = {http_calls.post(server.http_port, http_calls.LIST, {}).headers["camserve-process"] for _ in range(24)}
    photo = base64.b64encode(PHOTOS["chelsea"].read_bytes()).decode()
    item = json.dumps({"requestId": "a", "request": {"image": photo}}).encode()
    stream = http_calls.post(server.http_port, http_calls.STREAM, item, connect.NDJSON)

    assert found == {"0/2", "1/2"}
    assert stream.headers["camserve-process"] in found
    assert http_calls.lines_of(stream)[0]["response"]["model"] == "tiny"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("haproxy"), reason=needs.HAPROXY)
@pytest.mark.skipif(not TRITON.exists(), reason=needs.TRITONCLIENT)
def test_calls_of_a_triton_client_through_haproxy_use_both_processes(server, tmp_path):
    """HAProxy has 16 connections, and the kernel chooses their processes. All get the same in 1 of 32,768 runs."""
    before = server.counted(rpc="ModelInfer", code="OK")
    with balancer(tmp_path, server.address, *PROCESSES) as haproxy:
        wait_until(lambda: haproxy.passed_checks() == 16)
        command = [TRITON, CALLS, haproxy.address, PHOTOS["rocket"]]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    counted = wait_until(lambda: (now := server.counted(rpc="ModelInfer", code="OK") - before).total() >= 30 and now)

    assert done.stdout == "30\n"
    assert counted.total() == 30
    assert set(counted) == {"0", "1"}


@pytest.mark.slow
def test_each_process_has_its_share_of_the_queue_and_the_supervisor_is_counted(server):
    samples = server.samples()

    for number in "01":
        process = frozenset({("process", number)})
        assert samples["camserve_queue_limit_rows", process] == 512
        assert samples["camserve_process_up", process] == samples["camserve_ready", process] == 1


@pytest.mark.slow
def test_log_says_which_process(server):
    assert {entry["process"] for entry in server.logged("serving")} == {0, 1}
    assert not any("process" in entry for entry in server.logged("every process serves"))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_second_server_on_the_port_is_refused(processes, server, tmp_path):
    flags = ("serve", "--processes", processes, "--address", server.address)
    result = fork_server.run(fork_server.SERVER, *flags, cwd=tmp_path)

    assert result.returncode == 2
    assert f"error: cannot listen on {server.address}: is the port taken, or the host unknown?" in result.stderr


def versions(server):
    with connections(server) as clients:
        return {client.models()[0].version for client in clients}


def scores(server):
    with connections(server) as clients:
        return {client.explain(PHOTO).explanations[0].score for client in clients}


def save_weights(server):
    """Write weights that differ from those of the model; return their name."""
    namespace = {}
    exec(TINY, namespace)  # noqa: S102 -- the source of the test's own model
    state = {name: 2 * value for name, value in namespace["tiny"]().state_dict().items()}
    torch.save(state, server.folder / "double.pt")
    return "double.pt"


def supervised(server):
    """Return the ids of the two processes."""
    return children(server.pid)


class Callers:
    """Clients that explain photos until they are stopped, each request over a new connection."""

    def __init__(self, server, retries, pause=0.0):
        self.outcomes, self.pause, self._stop = Counter(), pause, threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(server, retries)) for _ in range(4)]

    def _work(self, server, retries):
        options = (("grpc.use_local_subchannel_pool", 1),)
        while not self._stop.is_set():
            try:
                with (
                    grpc.insecure_channel(server.address, options) as channel,
                    camserve.Client(channel=channel, retries=retries) as client,
                ):
                    client.explain(PHOTO, overlay=None)
                self.outcomes["OK"] += 1
                time.sleep(self.pause)
            except camserve.CamserveError as error:
                self.outcomes[type(error).__name__] += 1
                time.sleep(0.02)  # real timeout: only a pause, so that the servers get the processor

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.outcomes["OK"] > 10)
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.slow
def test_killed_process_is_replaced_under_load_with_the_models_of_the_other(server):
    old = scores(server)
    with connections(server, 1) as (client,):
        loaded = client.load_model("tiny", weights=save_weights(server))
    new = scores(server)
    assert (len(old), len(new), old & new) == (1, 1, set())
    assert versions(server) == {loaded.version} == {2}

    first, second = sorted(supervised(server))
    with Callers(server, retries=10, pause=0.05) as callers:
        os.kill(first, signal.SIGKILL)
        callers.pause = 0.3  # real timeout: only a pause, so that the new process gets the processor
        wait_until(lambda: len(server.logged("serving")) == 3)
        answered = callers.outcomes["OK"]
        wait_until(lambda: callers.outcomes["OK"] > answered + 20)

    assert set(callers.outcomes) == {"OK"}
    assert first not in supervised(server)
    assert second in supervised(server)
    assert versions(server) == {2}
    assert scores(server) == new
    before = wait_until(lambda: (now := server.counted(rpc="Explain")) == server.counted(rpc="Explain") and now)
    assert len(scores(server)) == 1
    counted = wait_until(lambda: (now := server.counted(rpc="Explain") - before).total() >= CONNECTIONS and now)
    assert counted.total() == CONNECTIONS
    assert set(counted) == {"0", "1"}


@pytest.mark.slow
def test_ctrl_c_drains_every_process_under_load(server):
    """A terminal sends SIGINT to the supervisor, the processes and their workers. It is the last test of the server."""

    def answered():
        return [entry["code"] for entry in server.logged("Explain")].count("OK")

    before = answered()
    with Callers(server, retries=0) as callers:
        code = server.stop(signal.SIGINT)

    assert code == 0
    assert 0 < callers.outcomes["OK"] <= answered() - before  # a response is logged before its process ends
    assert set(callers.outcomes) <= {"OK", "Unavailable"}
    assert len(server.logged("stopped")) == 2


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--processes", "2", "--address", "unix:socket"), "a Unix socket serves one process; listen on HOST:PORT"),
        (("--processes", "0"), "processes = '0': write a number from 1 to 64, or \"auto\""),
        (("--processes", "2", "--address", "0.0.0.0:0"), "0.0.0.0:0 can be reached from other machines"),
    ],
)
def test_settings_are_refused_before_a_process_starts(flags, error, tmp_path):
    result = fork_server.run(fork_server.SERVER, "serve", *flags, cwd=tmp_path)

    assert result.returncode == 2
    assert [line for line in result.stderr.splitlines() if line.startswith("error: ")] == [
        line for line in result.stderr.splitlines() if error in line
    ]


@pytest.mark.slow
def test_supervisor_of_the_command_imports_no_torch(tmp_path):
    code = """
import sys
from camserve_server.app import supervisor
supervisor.run = lambda settings, count: print(count, {"torch", "camserve_server.models"} & set(sys.modules)) or 0
from camserve_server.cli import main
main()
"""
    result = subprocess.run(
        [sys.executable, "-c", code, "serve", "--processes", "3"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )

    assert result.stdout == "3 set()\n"
