"""Traces: a span for each request with its stages, and one for each batch, linked to its requests."""

import asyncio
import contextlib
import io
import itertools
import json
import logging
import re
import socket
import sys
import threading
import time
import urllib.request
from concurrent import futures

import grpc
import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import camserve
from camserve.v1 import explain_pb2, explain_pb2_grpc
from camserve_server import telemetry
from camserve_server.app import server
from camserve_server.core import config, logs
from camserve_server.core.errors import ConfigError
from camserve_server.telemetry import traces, values
from opened_ports import opened_ports
from support import jpeg, rows_waiting, serving, wait_in_loop_until, wait_until

PHOTO = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
STAGES = ["admission", "decode", "queue", "compute", "render"]
EXPLAIN = "camserve.v1.ExplainService/Explain"
CALLERS_TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    """Remove the variables of OpenTelemetry from the environment, and restore its loggers."""
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger("opentelemetry")
    before = logger.handlers[:], logger.propagate
    yield
    logger.handlers[:], logger.propagate = before


@pytest.fixture
def start(tiny, monkeypatch):
    """Start a server with traces; yield it and a list that has its spans after it has stopped."""

    @contextlib.contextmanager
    def begin(**settings):
        kept, spans = InMemorySpanExporter(), []
        monkeypatch.setattr(traces, "_exporter", lambda _name: kept)
        monkeypatch.setattr(traces, "FLUSH_TIMEOUT", 60)
        with serving(models=(tiny,), device="cpu", threads=1, traces=True, **settings) as served:
            yield served, spans
        spans += kept.get_finished_spans()

    return begin


def named(spans, name):
    return [span for span in spans if span.name == name]


def children(spans, parent):
    """Return the child spans of a span, sorted by their start."""
    children_ = [span for span in spans if span.parent and span.parent.span_id == parent.context.span_id]
    return sorted(children_, key=lambda span: (span.start_time, span.end_time))


def key(context):
    return context.trace_id, context.span_id


async def explain_at_once(served, count):
    """Send a number of requests that all wait when the first batch is formed."""
    async with camserve.AsyncClient(served.address) as client:
        served.do(served.pipeline.batcher.pause)
        asking = [asyncio.ensure_future(client.explain(PHOTO)) for _ in range(count)]
        await wait_in_loop_until(lambda: rows_waiting(served) == count)
        served.do(served.pipeline.batcher.resume)
        await asyncio.gather(*asking)


def test_concurrent_requests_have_stages_and_batches_link_to_them(start):
    with start() as (served, spans):
        asyncio.run(explain_at_once(served, 20))
        batches_ran = served.pipeline.batcher.stats.batches

    requests, batches = named(spans, EXPLAIN), named(spans, "batch")
    assert len({span.context.trace_id for span in requests}) == len(requests) == 20
    assert len(batches) == batches_ran < 20
    linked = {key(batch.context): {key(link.context) for link in batch.links} for batch in batches}
    assert sum(map(len, linked.values())) == sum(batch.attributes["camserve.rows"] for batch in batches) == 20
    assert set().union(*linked.values()) == {key(span.context) for span in requests}
    for request in requests:
        stages = children(spans, request)
        assert [stage.name for stage in stages] == STAGES
        assert all(stage.context.trace_id == request.context.trace_id for stage in stages)
        (to_batch,) = stages[3].links
        assert key(request.context) in linked[key(to_batch.context)]
        assert sum(len(stage.links) for stage in stages) == 1
    for batch in batches:
        assert batch.parent is None
        assert batch.context.trace_id not in {span.context.trace_id for span in requests}
        assert batch.attributes["camserve.requests"] == len(batch.links)
    assert len(spans) == 20 * (1 + len(STAGES)) + len(batches)


def test_stages_have_their_real_times(start):
    with start() as (served, spans), camserve.Client(served.address) as client:
        before = time.time_ns()
        answers = [client.explain(PHOTO) for _ in range(5)]
        after = time.time_ns()

    for answer, request in zip(answers, named(spans, EXPLAIN), strict=True):
        stages = children(spans, request)
        assert before <= request.start_time <= stages[0].start_time
        assert stages[-1].end_time <= request.end_time <= after
        for stage, next_ in itertools.pairwise(stages):
            assert (
                stage.start_time <= stage.end_time <= next_.start_time + 1000
            )  # ns: a clock's float has no more digits
        took = {stage.name: (stage.end_time - stage.start_time) / 1e6 for stage in stages}
        timing = answer.timing  # from the same clock readings, up to rounding
        assert took["decode"] == pytest.approx(timing.decode_ms, abs=0.001)
        assert took["compute"] == pytest.approx(timing.compute_ms, abs=0.001)
        assert took["queue"] <= timing.queue_ms + 0.001  # it ends when the batch begins, not when it is formed


@contextlib.contextmanager
def logged():
    """Capture the log as JSON lines."""
    written, logger = io.StringIO(), logging.getLogger("camserve_server")
    handler = logging.StreamHandler(written)
    handler.setFormatter(logs.JsonFormatter())
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [handler], False
    logger.setLevel("INFO")
    try:
        yield lambda: [json.loads(line) for line in written.getvalue().splitlines()]
    finally:
        logger.handlers[:], logger.level, logger.propagate = before


def explain(address, *metadata):
    with grpc.insecure_channel(address) as channel:
        request = explain_pb2.ExplainRequest(image=jpeg(PHOTO))
        return explain_pb2_grpc.ExplainServiceStub(channel).Explain(request, metadata=metadata)


def test_request_joins_its_callers_trace_and_logs_its_id(start):
    with logged() as lines, start() as (served, spans):
        explain(served.address, ("traceparent", f"00-{CALLERS_TRACE}-b7ad6b7169203331-01"), ("x-request-id", "mine"))
        explain(served.address, ("traceparent", "no such thing"), ("x-request-id", "own"))

    of = {span.attributes["camserve.request_id"]: span for span in named(spans, EXPLAIN)}
    assert f"{of['mine'].context.trace_id:032x}" == CALLERS_TRACE
    assert f"{of['mine'].parent.span_id:016x}" == "b7ad6b7169203331"
    assert (of["mine"].kind, of["own"].parent) == (SpanKind.SERVER, None)
    logged_ids = {line["request_id"]: line["trace_id"] for line in lines() if line["message"] == "Explain"}
    assert logged_ids == {"mine": CALLERS_TRACE, "own": f"{of['own'].context.trace_id:032x}"}


def test_unsampled_request_is_not_recorded_but_logs_its_trace(start):
    with logged() as lines, start() as (served, spans):
        explain(served.address, ("traceparent", f"00-{CALLERS_TRACE}-b7ad6b7169203331-00"))

    assert not spans
    assert [line["trace_id"] for line in lines() if line["message"] == "Explain"] == [CALLERS_TRACE]


def test_sampler_is_configurable_and_batches_follow_their_requests(start, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "maps")
    with start() as (served, spans), futures.ThreadPoolExecutor(4) as threads:
        served.do(served.pipeline.batcher.pause)
        sampled = ("traceparent", f"00-{CALLERS_TRACE}-b7ad6b7169203331-01")
        asking = [threads.submit(explain, served.address, *more) for more in ([sampled], [], [])]
        wait_until(lambda: rows_waiting(served) == 3)
        served.do(served.pipeline.batcher.resume)
        assert all(each.result() for each in asking)

    assert len(named(spans, EXPLAIN)) == len(named(spans, "batch")) == 1
    assert len(named(spans, "batch")[0].links) == 3
    assert {span.resource.attributes["service.name"] for span in spans} == {"maps"}


def test_each_request_of_a_stream_is_below_the_streams_span(start):
    with start() as (served, spans), camserve.Client(served.address) as client:
        assert len(list(client.explain_many([PHOTO] * 4))) == 4

    (stream,) = named(spans, "camserve.v1.ExplainService/ExplainStream")
    items = children(spans, stream)
    assert [item.name for item in items] == ["ExplainStream item"] * 4
    assert stream.resource.attributes["service.name"] == "camserve"
    for item in items:
        assert [stage.name for stage in children(spans, item)] == STAGES
        assert (item.kind, item.attributes["camserve.model"]) == (SpanKind.INTERNAL, "tiny")


def test_span_is_an_error_if_the_server_is_at_fault_and_has_the_reason(start):
    with start() as (served, spans), camserve.Client(served.address, retries=0) as client:
        with pytest.raises(camserve.NotFound):
            client.explain(PHOTO, model="nope")
        served.do(served.pipeline.batcher.fail_pending, "no worker is left")
        with pytest.raises(camserve.Unavailable):
            client.explain(PHOTO)

    wrong, lost = named(spans, EXPLAIN)
    assert (wrong.status.status_code, wrong.attributes["rpc.response.status_code"]) == (StatusCode.UNSET, "NOT_FOUND")
    assert (lost.status.status_code, lost.status.description) == (StatusCode.ERROR, "no_engine")
    assert lost.attributes["error.type"] == lost.attributes["rpc.response.status_code"] == "UNAVAILABLE"
    assert lost.attributes["camserve.reason"] == "no_engine"
    assert wrong.attributes["rpc.system"] == "grpc"


def test_long_request_has_100_spans_and_counts_the_dropped_ones(start):
    with start(max_batch_rows=1) as (served, spans), camserve.Client(served.address) as client:
        client.explain(PHOTO, methods=("smoothgrad", {"samples": 100}))

    (request,) = named(spans, EXPLAIN)
    stages = children(spans, request)
    parts = 2 * served.pipeline.batcher.stats.batches + 3
    assert len(stages) == values.MAX_SPANS == 100
    assert request.attributes["camserve.stages_untold"] == parts - len(stages) > 100


def test_recorded_trace_is_an_exemplar_of_the_histogram(start):
    with opened_ports() as ports, start(metrics_address="0") as (served, spans):
        explain(served.address)
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        asked = urllib.request.Request(f"http://127.0.0.1:{ports['metrics']}/metrics", headers=accept)

        def exemplars():
            with urllib.request.urlopen(asked) as answer:  # noqa: S310 -- ours
                return set(re.findall(r'# {trace_id="(\w+)"}', answer.read().decode()))

        (exemplar,) = wait_until(exemplars)  # the call is counted just after its response is sent

    assert exemplar == f"{named(spans, EXPLAIN)[0].context.trace_id:032x}"


def test_traces_without_the_extra_name_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "camserve_server.telemetry.traces")

    with pytest.raises(ConfigError, match=r'pip install "camserve\[otel\]"'):
        telemetry.telemetry(lambda: None, metrics=False, traces=True)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "no exporter zipkin for traces is installed"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "pip install opentelemetry-exporter-otlp-proto-http"),
    ],
)
def test_missing_exporter_is_reported_in_one_line(name, value, words, monkeypatch):
    monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError, match=words):
        traces.open_traces()


def test_with_no_exporter_log_lines_still_have_their_trace(tiny, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    with logged() as lines, serving(models=(tiny,), device="cpu", threads=1, traces=True) as served:
        explain(served.address)

    (line,) = (line for line in lines() if line["message"] == "Explain")
    assert len(line["trace_id"]) == 32


def test_unresponsive_collector_does_not_block_the_stop(tiny, monkeypatch):
    """The exporter's timeout is an hour, so it ends only because the stop ends it."""
    stopped, shut_down = [], OTLPSpanExporter.shutdown

    def record_stop(exporter, *arguments, **options):
        stopped.append(threading.current_thread().name)
        shut_down(exporter, *arguments, **options)

    monkeypatch.setattr(OTLPSpanExporter, "shutdown", record_stop)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    monkeypatch.setattr(traces, "FLUSH_TIMEOUT", 0.01)  # real timeout: the collector never responds
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts connections and never responds
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with logged():
            chosen = config.load(
                flags={"models": (tiny,), "isolation": "thread", "address": "127.0.0.1:0", "traces": True},
                environment={},
            )
            with server.serve_in_thread(chosen) as address:
                answer = explain(address)
            first = stopped[0]
            wait_until(lambda: "traces" not in {thread.name for thread in threading.enumerate()})

    assert answer.predictions
    assert first != "traces"  # the server's thread, which does not wait for the one that sends


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Collector that keeps the spans it receives."""

    def __init__(self):
        self.spans, self.received = [], threading.Event()

    def Export(self, request, _context):  # noqa: N802 -- the RPC's name
        for part in request.resource_spans:
            attributes = {attribute.key: attribute.value.string_value for attribute in part.resource.attributes}
            self.spans += [(attributes, span) for scope in part.scope_spans for span in scope.spans]
        self.received.set()
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector():
    collector_ = Collector()
    listening = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector_, listening)
    collector_.port = listening.add_insecure_port("127.0.0.1:0")
    listening.start()
    yield collector_
    listening.stop(None).wait()


def test_spans_are_sent_to_the_configured_collector(collector, tiny, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.port}")
    monkeypatch.setattr(traces, "FLUSH_TIMEOUT", 60)
    with serving(models=(tiny,), device="cpu", threads=1, traces=True) as served:
        explain(served.address)

    assert collector.received.is_set()  # before the server had stopped
    assert sorted(span.name for _, span in collector.spans) == sorted(
        [EXPLAIN, "batch", *STAGES[:4]]
    )  # no picture was requested
    assert {of["service.name"] for of, _ in collector.spans} == {"camserve"}
    (batch,) = (span for _, span in collector.spans if span.name == "batch")
    (request,) = (span for _, span in collector.spans if span.name == EXPLAIN)
    assert [link.span_id for link in batch.links] == [request.span_id]
