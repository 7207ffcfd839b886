"""Every metric that Prometheus is told, and the one place where each is counted: docs/metrics.md lists them.

No label can take a value that callers make up: RPCs, codes, methods, verdicts, stages and reasons are words of the
code, and a model's name is one of the configuration.
"""

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from camserve_server.telemetry.record import Engine, Ran, RequestTrace, State

LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds
STAGES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LOADS = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)  # seconds
SHED = (
    "queue_full",
    "starting",
    "draining",
    "model_loading",
    "model_failed",
    "no_engine",
    "engine_lost",
    "out_of_memory",
)
"""Why a server does not do what it is asked though the request is in order; what `ServiceError.shed` may be."""
GONE = {"CANCELLED": "caller", "DEADLINE_EXCEEDED": "deadline"}


class PrometheusMetrics:
    """The metrics of one server.

    Args:
        state: tells what is read only when Prometheus asks; called in a thread of its own.
    """

    def __init__(self, state: Callable[[], State]) -> None:
        self.registry = CollectorRegistry()
        self._made()
        self._made_of_engines()
        self.registry.register(_Now(state))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def _made(self) -> None:
        """Make what is counted of requests."""
        into = self.registry
        self._requests = Histogram(
            "camserve_request_duration_seconds",
            "From a request's arrival to its answer; each request of a stream is one.",
            ("rpc", "method", "model", "code"),
            buckets=LATENCIES,
            registry=into,
        )
        self._stages = Histogram(
            "camserve_stage_duration_seconds",
            "How long a request spent in a stage, its parts added up.",
            ("stage",),
            buckets=STAGES,
            registry=into,
        )
        self._explained = Counter(
            "camserve_explanations",
            "Maps by what can be read from them.",
            ("method", "model", "verdict"),
            registry=into,
        )
        self._shed = Counter(
            "camserve_requests_shed", "Requests that the server could not take or finish.", ("reason",), registry=into
        )
        self._cancelled = Counter(
            "camserve_requests_cancelled", "Requests that nobody waits for any more.", ("reason",), registry=into
        )
        for reason in SHED:  # so that the first one is a rise from 0
            self._shed.labels(reason)
        for reason in GONE.values():
            self._cancelled.labels(reason)
        self._streams = Counter("camserve_streams", "Streams that ended.", ("rpc", "code"), registry=into)
        Info("camserve_build", "What runs.", registry=into).info(
            {"version": version("camserve"), "torch": version("torch"), "python": platform.python_version()}
        )

    def _made_of_engines(self) -> None:
        """Make what is counted of batches, models and engines."""
        into = self.registry
        self._batch_rows = Histogram("camserve_batch_rows", "Rows in a batch.", ("kind",), buckets=ROWS, registry=into)
        self._batch_seconds = Histogram(
            "camserve_batch_duration_seconds",
            "How long a batch ran, on its way to the engine and back too.",
            ("kind",),
            buckets=STAGES,
            registry=into,
        )
        self._busy = Counter(
            "camserve_engine_busy_seconds",
            "How long engines ran batches, those together; two that ran at once each count half.",
            registry=into,
        )
        self._loads = Histogram(
            "camserve_model_load_duration_seconds",
            "How long loading a model took, or failing to; a restarted engine's own loads are not among them.",
            ("model", "outcome"),
            buckets=LOADS,
            registry=into,
        )
        self._lost = Counter(
            "camserve_engine_restarts",
            "Engines that died or hung while they worked, and were started again.",
            ("engine", "device"),
            registry=into,
        )

    def answered(self, record: RequestTrace, code: str, seconds: float) -> None:
        """Count a request, or a stream.

        Args:
            record: of it.
            code: the name of its status.
            seconds: that it took.
        """
        if record.stream:
            self._streams.labels(record.rpc, code).inc()
            return
        requests = self._requests.labels(record.rpc, record.method, record.model, code)
        # Of a trace that is kept: who sees a slow request in a histogram can look at it.
        requests.observe(seconds, {"trace_id": record.trace_id} if record.stages is not None else None)
        for stage, took in record.seconds.items():
            self._stages.labels(stage).observe(took)
        for method, verdict in record.explained:
            self._explained.labels(method, record.model, verdict).inc()
        if code in GONE:
            self._cancelled.labels(GONE[code]).inc()
        elif record.reason:
            self._shed.labels(record.reason).inc()

    def ran(self, batch: Ran) -> None:
        """Count a batch."""
        self._batch_rows.labels(batch.kind).observe(batch.rows)
        self._batch_seconds.labels(batch.kind).observe(batch.ended - batch.began)
        self._busy.inc(batch.work)

    def loaded(self, model: str, seconds: float, *, well: bool) -> None:
        """Count a model that was loaded, or could not be."""
        ok, failed = (self._loads.labels(model, outcome) for outcome in ("ok", "failed"))  # both, for a rise from 0
        (ok if well else failed).observe(seconds)

    def written(self, accept: str) -> tuple[str, bytes]:
        """Return the content type and the text of all metrics, in the form that a header Accept asks for."""
        encode, kind = choose_encoder(accept)
        return kind, encode(self.registry)

    def begun(self, engine: int, device: str) -> None:
        """Begin an engine's count at 0, so that its first restart is a rise."""
        self._lost.labels(str(engine), device)

    def lost(self, engine: int, device: str) -> None:
        """Count an engine that was lost."""
        self._lost.labels(str(engine), device).inc()


class _Now(Collector):
    """What is read when it is asked for."""

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Yield each metric."""
        now = self._state()
        yield _gauge("camserve_ready", "Whether the server answers: 1 where its health is SERVING.", now.ready)
        yield _gauge("camserve_calls_in_flight", "Calls under way; a stream is one.", now.in_flight)
        yield _gauge("camserve_queue_rows", "Rows accepted and not yet answered.", now.queue_rows)
        yield _gauge("camserve_queue_limit_rows", "Rows that are accepted at most.", now.queue_limit)
        rows = CounterMetricFamily("camserve_rows", "Rows that engines ran.", labels=("outcome",))
        rows.add_metric(("answered",), now.answered)
        rows.add_metric(("failed",), now.failed)
        yield rows
        yield from _models(now)
        yield from _engines(now)


def _gauge(name: str, words: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, words, value)


def _models(now: State) -> Iterator[Metric]:
    ready = GaugeMetricFamily("camserve_model_ready", "Whether a model answers.", labels=("model",))
    versions = GaugeMetricFamily("camserve_model_version", "How often a model was loaded.", labels=("model",))
    for name, number, well in now.models:
        ready.add_metric((name,), well)
        versions.add_metric((name,), number)
    yield ready
    yield versions


def _engines(now: State) -> Iterator[Metric]:
    up = GaugeMetricFamily("camserve_engine_up", "Whether an engine takes batches.", labels=("engine", "device"))
    memory = GaugeMetricFamily(
        "camserve_engine_memory_bytes",
        "Memory of an engine: resident and pinned of its process; allocated, reserved and total of its GPU.",
        labels=("engine", "device", "kind"),
    )
    for place, engine in enumerate(now.engines):
        up.add_metric((str(place), engine.device), engine.up)
        for kind, size in _sizes(engine):
            memory.add_metric((str(place), engine.device, kind), size)
    yield up
    yield memory


def _sizes(engine: Engine) -> Iterator[tuple[str, int]]:
    if engine.memory is None:
        return
    yield "resident", engine.memory.resident
    if engine.memory.total:
        yield "allocated", engine.memory.allocated
        yield "reserved", engine.memory.reserved
        yield "total", engine.memory.total
        yield "pinned", engine.memory.pinned
