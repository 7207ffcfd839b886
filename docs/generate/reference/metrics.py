"""The Prometheus metrics, from a registry in which one of everything was recorded."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from camserve_server import telemetry
from camserve_server.app import merged_metrics
from camserve_server.engine import RUNS
from camserve_server.jobs.verdict import Verdict
from camserve_server.telemetry import prometheus
from reference.markdown import code, listed, table

SUFFIXES = {"counter": "_total", "info": "_info"}
UNITS = ("seconds", "bytes", "rows")
MEMORY = telemetry.Memory(1, 1, 1, 1, 1)


def parts() -> Mapping[str, str]:
    """Return the metrics of a server and of a supervisor, their labels and their buckets."""
    own = [metric for metric in recorded().registry.collect() if metric.name.startswith("camserve_")]
    buckets = ((code(metric.name), bounds(metric)) for metric in own if metric.type == "histogram")
    return {
        "server": table_of(own),
        "supervisor": table_of(merged_metrics.own_metrics([True], [0])),
        "labels": table(("label", "values"), labels(own)),
        "buckets": table(("histogram", "upper bounds"), buckets),
    }


def recorded() -> prometheus.PrometheusMetrics:
    """Return metrics with a request, a stream, a batch, a model and a worker, so that every metric has samples."""
    worker = telemetry.WorkerSnapshot("cuda:0", up=True, memory=MEMORY)
    state = telemetry.ServerSnapshot(ready=True, in_flight=1, models=[("", 1, True)], engines=[worker])
    metrics = prometheus.PrometheusMetrics(lambda: state)
    request = telemetry.RequestTrace("", seconds={"": 0.0}, explained=[("", "")])
    metrics.record_request(request, "OK", 0.0)
    metrics.record_request(telemetry.RequestTrace("", stream=True), "OK", 0.0)
    metrics.record_batch(telemetry.BatchRun("", "", 1, 0.0, 0.0, []))
    metrics.record_load("", 0.0, succeeded=True)
    metrics.add_worker(0, "cpu")
    return metrics


def table_of(metrics: Iterable[Metric]) -> str:
    """Return a table of metrics."""
    return table(
        ("metric", "type, unit", "labels", "meaning"),
        (
            (
                code(name_of(metric)),
                type_of(metric),
                listed(labels_of(metric)),
                metric.documentation,
            )
            for metric in metrics
        ),
    )


def name_of(metric: Metric) -> str:
    """Return the name of a metric as Prometheus has it."""
    return metric.name + SUFFIXES.get(metric.type, "")


def type_of(metric: Metric) -> str:
    """Return the type of a metric, and its unit on a line of its own."""
    kind = "gauge" if metric.type == "info" else metric.type
    return "\n".join([kind, *(unit for unit in UNITS if metric.name.endswith(unit))])


def labels_of(metric: Metric) -> list[str]:
    """Return the names of a metric's labels."""
    return list(dict.fromkeys(name for sample in metric.samples for name in sample.labels if name != "le"))


def bounds(metric: Metric) -> str:
    """Return the upper bounds of a histogram's buckets."""
    samples = [sample.labels["le"] for sample in metric.samples if "le" in sample.labels]
    return ", ".join(f"{float(bound):g}" for bound in dict.fromkeys(samples) if bound != "+Inf")


def labels(metrics: Sequence[Metric]) -> Iterator[tuple[str, str]]:
    """Yield each label with its values."""
    several = code(telemetry.values.SEVERAL)
    yield "`rpc`", "Short name of the RPC, such as `Explain`. Those of the Open Inference Protocol count, too."
    yield (
        "`method`",
        f"Name of the method; the word {several} for a request of several; empty if it is unknown or the RPC has none.",
    )
    yield "`model`", "Configured name of the model; empty if it is unknown or the RPC has none."
    yield "`code`", "Name of the [gRPC status](errors.md#statuses), such as `OK` or `NOT_FOUND`."
    yield "`stage`", listed(("admission", "decode", "queue", "compute", "render"))
    yield "`verdict`", f"[Verdict](errors.md#verdicts) on a map: {listed(each.name for each in Verdict)}"
    reasons = listed(prometheus.SHED_REASONS)
    yield "`reason` of a request shed", f"[State of the server](errors.md#reasons), in lower case: {reasons}"
    yield "`reason` of a request cancelled", listed(prometheus.CANCELLED_BY.values())
    yield "`kind` of a batch", f"What is computed: {listed(RUNS)}"
    (memory,) = (metric for metric in metrics if metric.name == "camserve_engine_memory_bytes")
    yield "`kind` of memory", listed(sample.labels["kind"] for sample in memory.samples)
    yield "`outcome` of a load", "`ok`, `failed`"
    yield "`outcome` of a row", "`answered`, `failed`"
    yield "`engine`", "Number of the worker, from 0."
    yield "`device`", "Device of the worker, such as `cpu` or `cuda:0`."
    yield "`process`", "Number of the server process, from 0. Only with several processes."
    yield "`version`, `torch`, `python`", "Versions of camserve, torch and Python."
