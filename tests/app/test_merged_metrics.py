"""Metrics of several processes as one."""

import json

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from camserve_server import telemetry
from camserve_server.app import merged_metrics
from camserve_server.telemetry import prometheus

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def metrics_of(requests, trace_id=""):
    """Return the metrics of a server that answered a number of requests, as its process sends them."""
    now = telemetry.ServerSnapshot(ready=True, in_flight=1, models=[("tiny", 1, True)])
    metrics = prometheus.PrometheusMetrics(lambda: now)
    for _ in range(requests):
        record = telemetry.RequestTrace("Explain", model="tiny", method="gradcam", trace_id=trace_id)
        record.stages = [] if trace_id else None
        metrics.record_request(record, "OK", 0.02)
    return metrics, json.loads(json.dumps(merged_metrics.families_of(metrics.registry)))


def samples_of(families):
    return [
        (sample.name, dict(sample.labels), sample.value, sample.exemplar)
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


@pytest.mark.parametrize(("accept", "parse"), [("", parse_text), (OPENMETRICS, parse_openmetrics)])
def test_each_process_has_the_samples_that_it_would_serve_alone(accept, parse):
    servers = {number: metrics_of(count) for number, count in enumerate((3, 5))}
    families = {number: own for number, (_, own) in servers.items()}
    content_type, text = merged_metrics.encode(accept, families, [True, True], [0, 0])
    merged = samples_of(parse(text.decode()))

    for number, (metrics, _) in servers.items():
        alone_type, alone = metrics.encode(accept)
        expected = {
            (name, frozenset({**labels, "process": str(number)}.items())): value
            for name, labels, value, _ in samples_of(parse(alone.decode()))
            if not name.startswith("process_")  # they change all the time
        }
        found = {(name, frozenset(labels.items())): value for name, labels, value, _ in merged}
        assert content_type == alone_type
        assert expected.items() <= found.items()


def test_sums_over_processes_are_the_requests_of_all():
    families = {number: metrics_of(count)[1] for number, count in enumerate((3, 0, 5))}
    _, text = merged_metrics.encode("", families, [True] * 3, [0] * 3)
    count = "camserve_request_duration_seconds_count"
    counts = [value for name, _, value, _ in samples_of(parse_text(text.decode())) if name == count]

    assert sorted(counts) == [3, 5]


def test_exemplars_are_kept():
    families = {0: metrics_of(1, "a" * 32)[1], 1: metrics_of(1, "b" * 32)[1]}
    _, text = merged_metrics.encode(OPENMETRICS, families, [True, True], [0, 0])
    found = {
        (labels["process"], exemplar.labels["trace_id"])
        for _, labels, _, exemplar in samples_of(parse_openmetrics(text.decode()))
        if exemplar
    }

    assert found == {("0", "a" * 32), ("1", "b" * 32)}


def test_supervisor_adds_which_processes_are_up_and_were_replaced():
    _, text = merged_metrics.encode("", {1: []}, [False, True], [2, 0])

    assert [line for line in text.decode().splitlines() if line.startswith("camserve_process")] == [
        'camserve_process_up{process="0"} 0.0',
        'camserve_process_up{process="1"} 1.0',
        'camserve_process_restarts_total{process="0"} 2.0',
        'camserve_process_restarts_total{process="1"} 0.0',
    ]
