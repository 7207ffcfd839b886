"""Metrics, traces and log lines of calls over HTTP are those of gRPC."""

import base64
import urllib.request

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from camserve_server.telemetry import traces
from http_calls import EXPLAIN, STREAM, post
from opened_ports import opened_ports
from support import PHOTOS, serving, wait_until

TRACE = "0af7651916cd43dd8448eb211c80319c"
BODY = {"image": base64.b64encode(PHOTOS["chelsea"].read_bytes()).decode()}


def counted(text, code):
    """Return the number of calls of Explain with this code, from the text of a scrape."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = [each for each in samples if each.name == "camserve_request_duration_seconds_count"]
    return sum(each.value for each in found if code in each.labels.values() and "Explain" in each.labels.values())


def test_calls_over_http_are_counted_as_those_over_grpc(tiny):
    settings = {"models": (tiny,), "device": "cpu", "threads": 1, "http_address": "0", "metrics_address": "0"}
    with opened_ports() as ports, serving(**settings) as served:

        def scrape():
            with urllib.request.urlopen(f"http://127.0.0.1:{ports['metrics']}/metrics") as answer:
                return answer.read().decode()

        assert post(served.http_port, EXPLAIN, BODY).status == 200
        assert post(served.http_port, EXPLAIN, b"{").status == 400
        wait_until(lambda: counted(scrape(), "OK") and counted(scrape(), "INVALID_ARGUMENT"))

        assert counted(scrape(), "OK") == counted(scrape(), "INVALID_ARGUMENT") == 1


def test_call_over_http_joins_the_trace_of_its_caller(tiny, monkeypatch):
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(traces, "_exporter", lambda _name: exporter)
    monkeypatch.setattr(traces, "FLUSH_TIMEOUT", 60)
    with serving(models=(tiny,), device="cpu", threads=1, http_address="0", traces=True) as served:
        header = f"00-{TRACE}-b7ad6b7169203331-01"
        assert post(served.http_port, EXPLAIN, BODY, traceparent=header).status == 200
        item = b'{"requestId":"a","request":{}}'
        assert post(served.http_port, STREAM, item, "application/x-ndjson", traceparent=header).status == 200
    names = {span.name for span in exporter.get_finished_spans() if span.context.trace_id == int(TRACE, 16)}

    assert {"camserve.v1.ExplainService/Explain", "camserve.v1.ExplainService/ExplainStream"} <= names


def test_call_over_http_has_a_line_in_the_log(tiny, monkeypatch):
    lines = []
    monkeypatch.setattr(
        "camserve_server.core.logs.write_access_line", lambda _log, name, fields: lines.append((name, fields))
    )
    with serving(models=(tiny,), device="cpu", threads=1, http_address="0") as served:
        post(served.http_port, EXPLAIN, BODY)
        post(served.http_port, EXPLAIN, {"model": "none"})

    assert [(name, fields["code"]) for name, fields in lines] == [("Explain", "OK"), ("Explain", "NOT_FOUND")]
    assert "unknown model" in lines[1][1]["error"]
