"""Metrics for Prometheus: all definitions, and the only place that counts them.

docs/reference/metrics.md is generated from these definitions. Callers cannot create label values: RPCs, codes, methods,
verdicts, stages and reasons are constants of the code, and models' names come from the configuration.
"""

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from camserve_server.telemetry.values import BatchRun, RequestTrace, ServerSnapshot, WorkerSnapshot

LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds
STAGES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LOADS = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)  # seconds
SHED_REASONS = (
    "queue_full",
    "replies_unread",
    "starting",
    "draining",
    "model_loading",
    "model_failed",
    "no_engine",
    "engine_lost",
    "out_of_memory",
)
"""Reasons why a server refuses or drops a valid request: the values of `ServiceError.shed_reason`."""
CANCELLED_BY = {"CANCELLED": "caller", "DEADLINE_EXCEEDED": "deadline"}
"""The cause of a cancelled request, by its status."""


class PrometheusMetrics:
    """The metrics of one server.

    Args:
        state: function that returns the server's state. It is called for each request of Prometheus, in another thread.
    """

    def __init__(self, state: Callable[[], ServerSnapshot]) -> None:
        self.registry = CollectorRegistry()
        self._define_request_metrics()
        self._define_worker_metrics()
        Info("camserve_build", "Versions of the server, torch and Python.", registry=self.registry).info(
            {"version": version("camserve"), "torch": version("torch"), "python": platform.python_version()}
        )
        self.registry.register(_StateCollector(state))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def _define_request_metrics(self) -> None:
        registry = self.registry
        self._requests = Histogram(
            "camserve_request_duration_seconds",
            "Time from the arrival of a request to its response. Each request of a stream counts.",
            ("rpc", "method", "model", "code"),
            buckets=LATENCIES,
            registry=registry,
        )
        self._stages = Histogram(
            "camserve_stage_duration_seconds",
            "Time that a request spent in admission (waiting for room in the queue), decode (waiting for a thread"
            " included), queue (waiting for a batch), compute (in batches) and render. Parts of a stage are summed.",
            ("stage",),
            buckets=STAGES,
            registry=registry,
        )
        self._explained = Counter(
            "camserve_explanations",
            "Maps, by their verdict.",
            ("method", "model", "verdict"),
            registry=registry,
        )
        self._shed = Counter(
            "camserve_requests_shed",
            "Valid requests that the server refused or did not finish, by the state of the server that caused it.",
            ("reason",),
            registry=registry,
        )
        self._cancelled = Counter(
            "camserve_requests_cancelled",
            "Requests that were cancelled by their caller or by their deadline.",
            ("reason",),
            registry=registry,
        )
        for reason in SHED_REASONS:  # start at 0, so that the first one is an increase
            self._shed.labels(reason)
        for reason in CANCELLED_BY.values():
            self._cancelled.labels(reason)
        self._streams = Counter("camserve_streams", "Streams that ended.", ("rpc", "code"), registry=registry)

    def _define_worker_metrics(self) -> None:
        """Define the metrics of batches, models and workers."""
        registry = self.registry
        self._batch_rows = Histogram(
            "camserve_batch_rows",
            "Rows in a batch, by the kind of its computation.",
            ("kind",),
            buckets=ROWS,
            registry=registry,
        )
        self._batch_seconds = Histogram(
            "camserve_batch_duration_seconds",
            "Time that a batch took, transfer to and from the worker included.",
            ("kind",),
            buckets=STAGES,
            registry=registry,
        )
        self._busy = Counter(
            "camserve_engine_busy_seconds",
            "Time in which workers ran batches, summed; its rate is the number of busy workers. Batches that share a"
            " worker, on halves of its cores or on a GPU, count half each.",
            registry=registry,
        )
        self._loads = Histogram(
            "camserve_model_load_duration_seconds",
            "Time that loading a model took, by its outcome. Loads by a restarted worker are not counted.",
            ("model", "outcome"),
            buckets=LOADS,
            registry=registry,
        )
        self._restarts = Counter(
            "camserve_engine_restarts",
            "Workers that died or hung, and were restarted.",
            ("engine", "device"),
            registry=registry,
        )

    def record_request(self, record: RequestTrace, code: str, seconds: float) -> None:
        """Count a request, or a stream.

        Args:
            record: record of the request.
            code: name of its status.
            seconds: its duration.
        """
        if record.stream:
            self._streams.labels(record.rpc, code).inc()
            return
        requests = self._requests.labels(record.rpc, record.method, record.model, code)
        # An exemplar links the histogram to the trace, if the trace is recorded.
        requests.observe(seconds, {"trace_id": record.trace_id} if record.stages is not None else None)
        for stage, duration in record.seconds.items():
            self._stages.labels(stage).observe(duration)
        for method, verdict in record.explained:
            self._explained.labels(method, record.model, verdict).inc()
        if code in CANCELLED_BY:
            self._cancelled.labels(CANCELLED_BY[code]).inc()
        elif record.reason:
            self._shed.labels(record.reason).inc()

    def record_batch(self, batch: BatchRun) -> None:
        """Count a batch."""
        self._batch_rows.labels(batch.kind).observe(batch.rows)
        self._batch_seconds.labels(batch.kind).observe(batch.ended - batch.began)
        self._busy.inc(batch.work)

    def record_load(self, model: str, seconds: float, *, succeeded: bool) -> None:
        """Count a model that was loaded, or failed to load."""
        # Both labels are created, so that the first failure is an increase from 0.
        ok, failed = (self._loads.labels(model, outcome) for outcome in ("ok", "failed"))
        (ok if succeeded else failed).observe(seconds)

    def encode(self, accept: str) -> tuple[str, bytes]:
        """Return the content type and the text of all metrics, in the format that an Accept header requests."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self.registry)

    def add_worker(self, number: int, device: str) -> None:
        """Start the restarts of a worker at 0, so that the first one is an increase."""
        self._restarts.labels(str(number), device)

    def record_restart(self, number: int, device: str) -> None:
        """Count a worker that was lost."""
        self._restarts.labels(str(number), device).inc()


class _StateCollector(Collector):
    """Collector of the metrics that are read from the server's state at each request of Prometheus."""

    def __init__(self, state: Callable[[], ServerSnapshot]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Yield each metric."""
        state = self._state()
        yield GaugeMetricFamily("camserve_ready", "1 while the server's health is SERVING.", state.ready)
        yield GaugeMetricFamily(
            "camserve_calls_in_flight", "Calls in progress; a stream counts as one.", state.in_flight
        )
        yield GaugeMetricFamily(
            "camserve_queue_rows",
            "Rows accepted and not yet computed, of one request at most 64 at a time. Autoscaling uses it.",
            state.queue_rows,
        )
        yield GaugeMetricFamily(
            "camserve_queue_limit_rows", "Maximum of camserve_queue_rows: max_queue_rows.", state.queue_limit
        )
        rows = CounterMetricFamily("camserve_rows", "Rows that workers ran, by their outcome.", labels=("outcome",))
        rows.add_metric(("answered",), state.answered)
        rows.add_metric(("failed",), state.failed)
        yield rows
        yield from _model_metrics(state)
        yield from _worker_metrics(state)


def _model_metrics(state: ServerSnapshot) -> Iterator[Metric]:
    ready = GaugeMetricFamily("camserve_model_ready", "1 while a model answers requests.", labels=("model",))
    versions = GaugeMetricFamily("camserve_model_version", "Number of times a model was loaded.", labels=("model",))
    for name, model_version, is_ready in state.models:
        ready.add_metric((name,), is_ready)
        versions.add_metric((name,), model_version)
    yield ready
    yield versions


def _worker_metrics(state: ServerSnapshot) -> Iterator[Metric]:
    up = GaugeMetricFamily("camserve_engine_up", "1 while a worker accepts batches.", labels=("engine", "device"))
    memory = GaugeMetricFamily(
        "camserve_engine_memory_bytes",
        "Memory of a worker, at most half a second old: resident of its process; on a GPU also allocated (in tensors),"
        " reserved (by torch, tensors included), total, and pinned (of the host, for uploads).",
        labels=("engine", "device", "kind"),
    )
    for number, worker in enumerate(state.engines):
        up.add_metric((str(number), worker.device), worker.up)
        for kind, size in _memory_of(worker):
            memory.add_metric((str(number), worker.device, kind), size)
    yield up
    yield memory


def _memory_of(worker: WorkerSnapshot) -> Iterator[tuple[str, int]]:
    """Yield the kinds of a worker's memory, and their bytes."""
    if worker.memory is None:
        return
    yield "resident", worker.memory.resident
    if worker.memory.total:
        yield "allocated", worker.memory.allocated
        yield "reserved", worker.memory.reserved
        yield "total", worker.memory.total
        yield "pinned", worker.memory.pinned
