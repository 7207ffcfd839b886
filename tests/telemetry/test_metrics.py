"""Metrics: correct counts, labels that callers cannot create, and access control of the endpoint."""

import asyncio
import contextlib
import re
import socket
import ssl
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import camserve
import fork_server
from camserve_server import telemetry
from camserve_server.api import exposure, oip, tokens
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.api.rpc import RPC_NAMES
from camserve_server.app import merged_metrics, metrics_endpoint, server
from camserve_server.core import config, errors
from camserve_server.core.errors import ConfigError
from camserve_server.jobs.verdict import Verdict
from camserve_server.methods import METHODS
from camserve_server.models import parse
from camserve_server.telemetry import prometheus
from camserve_server.workers import InProcessWorker, Setup
from opened_ports import opened_ports
from robustness.authority import Authority
from support import GPU, jpeg, rows_waiting, serving, wait_in_loop_until, wait_until

ROOT = Path(__file__).parents[2]
PHOTO = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)


@pytest.fixture(scope="module")
def start(tiny):
    """Start a server with metrics; yield it and a function that scrapes them."""

    @contextlib.contextmanager
    def begin(**settings):
        given = {"models": (tiny,), "device": "cpu", "threads": 1, "metrics_address": "0", **settings}
        with opened_ports() as ports, serving(**given) as served:

            def scrape():
                served.do(bool)  # what the event loop is counting now is counted then
                return read(f"http://127.0.0.1:{ports['metrics']}/metrics")

            yield served, scrape

    return begin


def read(url):
    """Return every sample of a scrape, by name and labels."""
    with urllib.request.urlopen(url) as answer:  # noqa: S310 -- a test server
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def total(samples, name, **labels):
    """Add up the samples of a name that have these labels."""
    wanted = labels.items()
    return sum(value for (sample, pairs), value in samples.items() if sample == name and wanted <= set(pairs))


def labels_of(samples, name, label):
    return {dict(pairs)[label] for sample, pairs in samples if sample == name}


def scrape_until(scrape, name, count, **labels):
    """Scrape until a sum has the expected value: a call is counted just after its response is sent."""
    wait_until(lambda: total(scrape(), name, **labels) == count)
    return scrape()  # with the other counters of that call


COUNT = "camserve_request_duration_seconds_count"


def test_requests_and_errors_are_counted(start):
    wrong = [{"model": "nope"}, {"methods": "nope"}, {"layers": ["nope"]}, {"top_k": 6}, {"targets": ["nope"]}]
    asks = [{}] * 13 + wrong + wrong[:2]
    with start() as (served, scrape), camserve.Client(served.address) as client, ThreadPoolExecutor(4) as threads:

        def ask(given):
            with contextlib.suppress(camserve.CamserveError):
                client.explain(PHOTO, **given)

        list(threads.map(ask, asks))
        samples = scrape_until(scrape, COUNT, 20, rpc="Explain")

    assert total(samples, COUNT) - total(samples, COUNT, code="OK") == 7
    assert total(samples, COUNT, code="NOT_FOUND") == 6
    assert total(samples, COUNT, code="INVALID_ARGUMENT") == 1
    assert total(samples, COUNT, method="gradcam", model="tiny", code="OK") == 13
    assert total(samples, "camserve_explanations_total", method="gradcam", model="tiny") == 13
    assert total(samples, "camserve_rows_total", outcome="answered") == total(samples, "camserve_batch_rows_sum")
    assert total(samples, "camserve_batch_rows_sum", kind="cam") == 13
    assert total(samples, "camserve_requests_shed_total") == 0


def test_every_stage_is_timed_and_stages_are_no_longer_than_requests(start):
    with start() as (served, scrape), camserve.Client(served.address) as client:
        for _ in range(5):
            client.explain(PHOTO)
        samples = scrape_until(scrape, COUNT, 5, code="OK")

    stages = "admission", "decode", "queue", "compute", "render"
    took = {stage: total(samples, "camserve_stage_duration_seconds_sum", stage=stage) for stage in stages}
    assert labels_of(samples, "camserve_stage_duration_seconds_count", "stage") == set(stages)
    assert total(samples, "camserve_stage_duration_seconds_count") == 5 * len(stages)
    assert min(took.values()) >= 0
    assert 0 < sum(took.values()) <= total(samples, "camserve_request_duration_seconds_sum")
    assert took["compute"] <= total(samples, "camserve_batch_duration_seconds_sum") * (1 + 1e-9)


def test_requests_of_a_stream_are_counted_but_not_the_stream(start):
    with start() as (served, scrape), camserve.Client(served.address) as client:
        assert len(list(client.explain_many([PHOTO] * 6))) == 6
        samples = scrape_until(scrape, "camserve_streams_total", 1, code="OK")

    assert total(samples, COUNT, rpc="ExplainStream", code="OK") == total(samples, COUNT) == 6


def test_open_inference_requests_are_counted(start):
    request = inference_pb2.ModelInferRequest(model_name="tiny")
    request.inputs.add(name="image", datatype="BYTES", shape=[2]).contents.bytes_contents.extend([jpeg(PHOTO)] * 2)
    unknown = inference_pb2.ModelInferRequest(model_name="made-up")
    with start() as (served, scrape), grpc.insecure_channel(served.address) as channel:
        kinds = channel.unary_unary, channel.stream_stream
        infer, stream = (
            call(f"/{oip.NAME}/{rpc}", type(request).SerializeToString, response.FromString)
            for call, rpc, response in zip(
                kinds,
                ("ModelInfer", "ModelStreamInfer"),
                (inference_pb2.ModelInferResponse, inference_pb2.ModelStreamInferResponse),
                strict=True,
            )
        )
        infer(request)
        assert len(list(stream(iter([request, unknown, request])))) == 3
        samples = scrape_until(scrape, "camserve_streams_total", 1, rpc="ModelStreamInfer", code="OK")

    assert total(samples, COUNT, rpc="ModelInfer", method="gradcam", model="tiny", code="OK") == 1
    assert total(samples, COUNT, rpc="ModelStreamInfer", method="gradcam", model="tiny", code="OK") == 2
    assert total(samples, COUNT, rpc="ModelStreamInfer", model="", code="NOT_FOUND") == 1
    assert total(samples, "camserve_explanations_total", method="gradcam") == 3 * 2
    assert labels_of(samples, COUNT, "rpc") <= set(oip.NAMES)


def test_callers_cannot_create_label_values(start):
    """The number of series is limited by the server's own names, not by those that callers send."""
    with start() as (served, scrape), camserve.Client(served.address) as client:
        client.explain(PHOTO, methods=["gradcam", "saliency"])
        for number in range(8):
            for given in ({"model": f"made-up-{number}"}, {"methods": [f"made-up-{number}", "gradcam"]}):
                with pytest.raises(camserve.NotFound):
                    client.explain(PHOTO, **given)
            with pytest.raises(camserve.NotFound):
                list(client.explain_many([PHOTO], model=f"made-up-{number}"))
        samples = scrape()

    ours = {name: value for name, value in samples.items() if name[0].startswith("camserve_")}
    assert not [name for name in ours if "made-up" in str(name)]
    assert labels_of(ours, COUNT, "model") == {"", "tiny"}
    assert labels_of(ours, COUNT, "method") <= {"", "several", *METHODS}
    assert labels_of(ours, COUNT, "rpc") <= set(RPC_NAMES)
    assert labels_of(ours, "camserve_explanations_total", "verdict") <= {verdict.name for verdict in Verdict}
    assert len({has for name, has in ours if name == COUNT}) <= 6


def test_shed_requests_are_counted_by_reason(start):
    with start(max_queue_rows=4) as (served, scrape), camserve.Client(served.address, retries=0) as client:
        batcher = served.pipeline.batcher
        served.do(batcher.pause)
        with ThreadPoolExecutor(4) as threads:
            waiting = [threads.submit(client.explain, PHOTO) for _ in range(4)]
            held = scrape_until(scrape, "camserve_queue_rows", 4)
            for _ in range(3):
                with pytest.raises(camserve.ResourceExhausted):
                    client.explain(PHOTO)
            served.do(batcher.resume)
            assert all(each.result() for each in waiting)
        samples = scrape_until(scrape, "camserve_requests_shed_total", 3, reason="queue_full")
        served.do(batcher.fail_pending, "no worker is left")
        with pytest.raises(camserve.Unavailable):
            client.explain(PHOTO)
        after = scrape_until(scrape, "camserve_requests_shed_total", 1, reason="no_engine")

    assert total(held, "camserve_queue_limit_rows") == total(held, "camserve_calls_in_flight") == 4
    assert total(samples, "camserve_requests_shed_total") == total(samples, COUNT, code="RESOURCE_EXHAUSTED") == 3
    assert total(after, "camserve_queue_rows") == total(after, "camserve_calls_in_flight") == 0


def test_cancelled_requests_are_counted_by_reason(start):
    with start() as (served, scrape):
        served.do(served.pipeline.batcher.pause)

        def expire():
            with camserve.Client(served.address, retries=0) as client, pytest.raises(camserve.DeadlineExceeded):
                client.explain(PHOTO, timeout=1)  # real timeout: nothing is computed before it
            return total(scrape(), "camserve_requests_cancelled_total", reason="deadline")

        late = wait_until(expire)  # again, if the deadline passed before the server had the call
        wait_until(lambda: rows_waiting(served) == 0)

        async def leave():
            async with camserve.AsyncClient(served.address, retries=0) as client:
                asking = asyncio.ensure_future(client.explain(PHOTO))
                await wait_in_loop_until(lambda: rows_waiting(served) == 1)
                asking.cancel()
                await asyncio.wait([asking])

        asyncio.run(leave())
        samples = scrape_until(scrape, "camserve_requests_cancelled_total", 1, reason="caller")
        served.do(served.pipeline.batcher.resume)

    expired = total(samples, "camserve_requests_cancelled_total", reason="deadline")
    assert total(samples, COUNT, code="DEADLINE_EXCEEDED") == expired >= late
    assert total(samples, COUNT, code="CANCELLED") == 1


def test_every_reason_in_the_code_is_counted():
    code = "".join(path.read_text() for path in (ROOT / "service/camserve_server").rglob("*.py"))
    given = set(re.findall(r'\bshed_reason ?= ?"(\w+)"', code))

    assert given == set(prometheus.SHED_REASONS)
    assert errors.WorkerLost("x").shed_reason == "engine_lost"
    assert errors.OutOfMemory("x", shed_reason="other").shed_reason == "other"
    assert errors.NotFound("x").shed_reason == ""


def test_loaded_and_unloaded_models_are_counted(start, tmp_path):
    with (
        start(admin=True, model_folder=str(tmp_path)) as (served, scrape),
        camserve.Client(served.address, retries=0) as client,
    ):
        client.load_model("tiny")
        loaded = scrape()
        (tmp_path / "broken.pth").write_bytes(b"broken")
        with pytest.raises(camserve.FailedPrecondition):
            client.load_model("tiny", weights="broken.pth")
        client.unload_model("tiny")
        unloaded = scrape()

    loads = "camserve_model_load_duration_seconds_count"
    assert (total(loaded, "camserve_model_version"), total(loaded, "camserve_model_ready")) == (2, 1)
    assert total(unloaded, loads, model="tiny", outcome="ok") == 2
    assert total(unloaded, loads, model="tiny", outcome="failed") == 1
    assert total(unloaded, "camserve_model_ready", model="tiny") == 0


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_worker_reports_its_gpu_memory(device, tiny):
    engine = InProcessWorker(Setup(device, 1))
    before = engine.memory()
    engine.load("tiny@1", parse(tiny))
    after = engine.memory()

    assert before.resident > 2**20
    if device == "cpu":
        assert (after.allocated, after.reserved, after.total) == (0, 0, 0)
    else:
        assert 0 < after.allocated <= after.reserved <= after.total


def documented():
    """Yield name, type and labels of each metric that docs/reference/metrics.md lists."""
    page = (ROOT / "docs/reference/metrics.md").read_text()
    for name, kind, labels in re.findall(r"^\| `(camserve_\w+)` \| (\w+)[^|]* \|([^|\n]*)\|", page, re.MULTILINE):
        yield name, kind, tuple(re.findall(r"`(\w+)`", labels))


def test_metrics_page_lists_every_metric_with_its_type_and_labels():
    memory = telemetry.Memory(1, 2, 3, 4)
    now = telemetry.ServerSnapshot(
        ready=True, in_flight=1, models=[("tiny", 1, True)], engines=[telemetry.WorkerSnapshot("cuda:0", True, memory)]
    )
    metrics = prometheus.PrometheusMetrics(lambda: now)
    record = telemetry.RequestTrace(
        "Explain", model="tiny", method="gradcam", seconds={"decode": 1.0}, explained=[("a", "OK")]
    )
    metrics.record_request(record, "OK", 1.0)
    metrics.record_request(telemetry.RequestTrace("ExplainStream", stream=True), "OK", 1.0)
    metrics.record_batch(telemetry.BatchRun("tiny@1", "cam", 1, 0.0, 1.0, []))
    metrics.record_load("tiny", 1.0, succeeded=True)
    metrics.add_worker(0, "cpu")
    own = {"le"}
    results = set()
    for family in [*metrics.registry.collect(), *merged_metrics.own_metrics([True], [0])]:
        if family.name.startswith("camserve_"):
            name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
            labels = {
                label for sample in family.samples if not sample.name.endswith("_created") for label in sample.labels
            }
            results.add((name, family.type if family.type != "info" else "gauge", frozenset(labels - own)))

    assert {(name, kind, frozenset(labels)) for name, kind, labels in documented()} == results


def test_disabled_telemetry_is_not_imported_and_records_nothing(tiny):
    code = (
        "import sys; from camserve_server.app import server; from camserve_server.cli import commands; "
        "print([name for name in sys.modules if name.startswith(('prometheus', 'opentelemetry'))])"
    )
    result = fork_server.run(code)
    assert (result.returncode, result.stdout) == (0, "[]\n")

    with serving(models=(tiny,), device="cpu", threads=1) as served, camserve.Client(served.address) as client:
        seen = []
        submit = served.pipeline.batcher.submit
        served.pipeline.batcher.submit = lambda *asked: seen.append(asked[-1].record) or submit(*asked)
        client.explain(PHOTO)
        assert seen == [None]
        assert served.pipeline.batcher.telemetry is None


# ------------------------------------------------------------------------------------------------ the metrics endpoint


def status(url, token=None, context=None):
    """Return the status code and the body of a response."""
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})  # noqa: S310
    try:
        with urllib.request.urlopen(asked, context=context) as answer:  # noqa: S310 -- a test server
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def settings(**given):
    return config.load(flags=given, environment={})


@contextlib.contextmanager
def scraped(**given):
    """Serve only metrics; yield the address."""
    now, chosen = telemetry.ServerSnapshot(ready=True, in_flight=3), settings(**{"metrics_address": "0", **given})
    with opened_ports() as ports, metrics_endpoint.open_telemetry(chosen, lambda: now) as opened:
        assert opened.prometheus_metrics
        yield f"127.0.0.1:{ports['metrics']}"


def test_port_without_a_host_is_on_loopback():
    assert settings(metrics_address="9464").metrics_address == "127.0.0.1:9464"
    assert settings().metrics_address == ""
    for wrong in ("localhost", "70000", "0.0.0.0:70000", "unix:/x", "a:b:1", "-1"):
        with pytest.raises(ConfigError, match="write HOST:PORT, or a port alone"):
            settings(metrics_address=wrong)


def test_public_metrics_port_needs_tls_and_tokens():
    for address in ("0.0.0.0:9464", "[::]:9464", "10.0.0.1:9464"):
        with pytest.raises(ConfigError, match=rf"{re.escape(address)} can be reached from other machines.*--insecure"):
            exposure.check(settings(metrics_address=address))
        exposure.check(settings(metrics_address=address, tls_cert="a", tls_key="b", tokens_file="c"))
        exposure.check(settings(metrics_address=address, insecure=True))


def test_metrics_need_a_token_with_the_role_observe(tmp_path):
    authority = Authority()
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    observer, known = tokens.new("prometheus", ["observe"])
    explainer, other = tokens.new("explainer", ["explain"])
    tokens_file = tmp_path / "tokens"
    tokens_file.write_text(f"{known.line()}\n{other.line()}\n")
    trusting = ssl.create_default_context(cadata=authority.pem.decode())
    with scraped(tls_cert=cert, tls_key=key, tokens_file=str(tokens_file)) as address:
        url = f"https://{address}/metrics"
        code, text = status(url, observer, trusting)
        assert (code, "camserve_calls_in_flight 3.0" in text) == (200, True)
        assert status(url, None, trusting)[0] == status(url, "wrong", trusting)[0] == 401
        assert status(url, explainer, trusting) == (403, "metrics need a token with the role observe\n")
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            status(f"http://{address}/metrics", observer)
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            status(url, observer, ssl.create_default_context())
        assert status(url, observer, trusting)[0] == 200


def test_metrics_need_a_certificate_with_mutual_tls(tmp_path):
    authority = Authority()
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    client_cert = authority.issue("prometheus").write(tmp_path, "prometheus")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    with scraped(tls_cert=cert, tls_key=key, tls_client_ca=str(tmp_path / "ca.pem")) as address:
        trusting = ssl.create_default_context(cadata=authority.pem.decode())
        with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
            status(f"https://{address}/metrics", context=trusting)
        trusting.load_cert_chain(*client_cert)
        assert status(f"https://{address}/metrics", context=trusting)[0] == 200


def test_other_paths_return_only_the_path_of_the_metrics():
    with scraped() as address:
        assert status(f"http://{address}/") == (404, "the metrics are at /metrics\n")
        assert status(f"http://{address}/metrics?x=1")[0] == 200
        with socket.create_connection(address.split(":")) as line:
            line.sendall(b"DELETE /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            head = line.makefile("rb").read().decode()
        assert head.startswith("HTTP/1.1 501 ")
        assert "Python" not in head


@pytest.mark.parametrize(
    ("address", "origin", "host", "code"),
    [
        ("127.0.0.1:0", "", "localhost:9464", 200),
        ("127.0.0.1:0", "", "evil.example.com:9464", 403),  # its name was made to resolve to this machine
        ("127.0.0.1:0", "", "camserve", 403),
        ("127.0.0.1:0", "", "metrics.example.com", 200),  # one of http_origins
        ("127.0.0.1:0", "http://localhost:8000", "localhost:9464", 403),
        ("127.0.0.1:0", "null", "localhost:9464", 403),
        ("0.0.0.0:0", "", "10.0.0.7:9464", 200),  # as Prometheus asks a pod
        ("0.0.0.0:0", "", "camserve:9464", 200),
        ("0.0.0.0:0", "", "evil.example.com:9464", 403),
    ],
)
def test_web_pages_of_others_cannot_read_the_metrics(address, origin, host, code):
    lines = [f"Host: {host}", "Connection: close", *([f"Origin: {origin}"] if origin else [])]
    with (
        scraped(metrics_address=address, http_origins=("https://metrics.example.com",)) as opened,
        socket.create_connection(opened.split(":")) as line,
    ):
        line.sendall("\r\n".join(["GET /metrics HTTP/1.1", *lines, "\r\n"]).encode())
        received = line.makefile("rb").read().decode()

    assert received.startswith(f"HTTP/1.1 {code} ")
    assert ("camserve_calls_in_flight 3.0" in received) == (code == 200)
    assert all(f"{name}: {value}\r\n" in received for name, value in metrics_endpoint.HEADERS.items())


@pytest.mark.parametrize(
    "head",
    [
        f"GET /metrics?{'x' * 9000} HTTP/1.1\r\n",
        f"GET /metrics HTTP/1.1\r\nA: {'x' * 9000}\r\n",
        "GET /metrics HTTP/1.1\r\n" + f"A: {'x' * 900}\r\n" * 10,
    ],
    ids=["request line", "header", "headers"],
)
def test_scrape_with_long_headers_is_refused(head):
    with scraped() as address, socket.create_connection(address.split(":")) as line:
        line.sendall(f"{head}Connection: close\r\n\r\n".encode())

        assert line.makefile("rb").readline().startswith(b"HTTP/1.1 431 ")


@contextlib.contextmanager
def slow_connections(address, count=metrics_endpoint.MAX_CONNECTIONS, source="127.0.0.1"):
    """Open a number of connections, and send the start of a request on each."""
    open_before = handled()
    with contextlib.ExitStack() as stack:
        lines = [
            stack.enter_context(socket.create_connection(address.split(":"), source_address=(source, 0)))
            for _ in range(count)
        ]
        for line in lines:
            line.sendall(b"GET /metrics HTTP/1.1\r\nHo")
        wait_until(lambda: handled() == open_before + count)
        yield lines


def handled():
    """Return the number of connections that have a thread."""
    return sum("process_request" in each.name for each in threading.enumerate())


def test_scrape_replaces_a_connection_of_the_address_that_has_most(monkeypatch):
    monkeypatch.setattr(metrics_endpoint, "clock", lambda: 100.0)
    with scraped() as address, slow_connections(address, source="127.0.0.2") as lines:
        assert status(f"http://{address}/metrics")[0] == 200
        assert lines[0].recv(1) == b""


def test_address_with_most_connections_replaces_only_its_own(monkeypatch):
    now, most = [100.0], metrics_endpoint.MAX_CONNECTIONS - 1
    monkeypatch.setattr(metrics_endpoint, "clock", lambda: now[0])
    with scraped() as address, slow_connections(address, 1) as lines:
        with slow_connections(address, most, "127.0.0.2") as old, contextlib.ExitStack() as stack:
            now[0] += metrics_endpoint.SLOW_AFTER + 0.1
            for each in old:
                new = socket.create_connection(address.split(":"), source_address=("127.0.0.2", 0))
                stack.enter_context(new)
                assert each.recv(1) == b""
        lines[0].sendall(b"st: localhost\r\n\r\n")

        assert lines[0].makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"


def test_scrape_replaces_a_slow_connection(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics_endpoint, "clock", lambda: now[0])
    with scraped() as address, slow_connections(address) as lines:
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            status(f"http://{address}/metrics")
        now[0] += metrics_endpoint.SLOW_AFTER + 0.1
        for line in lines:
            line.sendall(b"s")  # they are slow but still send

        assert status(f"http://{address}/metrics")[0] == 200


def test_slow_sender_is_closed_at_the_timeout(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics_endpoint, "clock", lambda: now[0])
    with scraped() as address, slow_connections(address) as lines:
        received = []
        now[0] += metrics_endpoint.CONNECTION_TIMEOUT + 0.1
        for line in lines:
            with contextlib.suppress(ConnectionResetError):
                received.append(line.recv(1))

        assert set(received) <= {b""}
        assert status(f"http://{address}/metrics")[0] == 200


def test_used_metrics_port_is_reported_in_one_line(tiny):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(ConfigError, match=f"cannot listen on {address}: is the port taken"),
            server.serve_in_thread(settings(models=(tiny,), isolation="thread", metrics_address=address)),
        ):
            pass


SCRAPES = """
import os, sys, threading, urllib.request
sys.path.append(sys.argv[1])
from camserve_server import telemetry
from camserve_server.app import metrics_endpoint
from camserve_server.core import config
from opened_ports import opened_ports
from support import wait_until

if sys.argv[2] == "leak":
    leaked = []
    metrics_endpoint._Server._forget = lambda server, request: leaked.append(server._open.pop(request, None))


def open_files_after(scrapes):
    for _ in range(scrapes):
        urllib.request.urlopen(f"http://127.0.0.1:{ports['metrics']}/metrics").read()
        wait_until(lambda: threading.active_count() == 2)  # the connection's thread has ended
    return len(os.listdir("/proc/self/fd"))


settings = config.load(flags={"metrics_address": "0"}, environment={})
state = telemetry.ServerSnapshot(ready=True, in_flight=3)
with opened_ports() as ports, metrics_endpoint.open_telemetry(settings, lambda: state):
    print(-open_files_after(2) + open_files_after(30))
"""
"""Program that prints how many files 30 scrapes leave open."""


@pytest.mark.parametrize(("fault", "files"), [("", 0), ("leak", 30)])
def test_scrapes_leave_no_open_file(fault, files):
    result = fork_server.run(SCRAPES, ROOT / "tests", fault)

    assert (result.stdout, result.stderr) == (f"{files}\n", "")


def test_prometheus_and_openmetrics_get_their_own_formats():
    with scraped() as address:
        for accept, kind in (
            ("application/openmetrics-text;version=1.0.0", "application/openmetrics-text"),
            ("text/plain", "text/plain"),
        ):
            asked = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
            with urllib.request.urlopen(asked) as answer:  # noqa: S310 -- a test server
                assert answer.headers["Content-Type"].startswith(kind)
                assert answer.read().decode().endswith("# EOF\n") == (kind != "text/plain")
