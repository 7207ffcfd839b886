"""Telemetry sink: passes each request, batch, model and worker on to the metrics and the traces that are enabled."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from camserve_server.telemetry.values import BatchRun, RequestTrace, ServerSnapshot

if TYPE_CHECKING:
    from camserve_server.telemetry.prometheus import PrometheusMetrics
    from camserve_server.telemetry.traces import Traces


class Telemetry:
    """The metrics and the traces of a server.

    Args:
        prometheus_metrics: metrics for Prometheus, or None.
        traces: traces for OpenTelemetry, or None.
    """

    def __init__(self, prometheus_metrics: "PrometheusMetrics | None", traces: "Traces | None") -> None:
        self.prometheus_metrics, self.traces = prometheus_metrics, traces

    def begin(
        self,
        record: RequestTrace,
        name: str,
        metadata: Mapping[str, Any] | None = None,
        parent: RequestTrace | None = None,
    ) -> RequestTrace:
        """Begin to record a request.

        Args:
            record: empty record of the request.
            name: name of its span.
            metadata: metadata of the call, which may name the caller's trace.
            parent: record of the stream that the request is part of.
        """
        if self.traces:
            self.traces.begin(record, name, metadata or {}, parent)
        return record

    def end(self, record: RequestTrace, code: str) -> None:
        """Count a request, and end its span."""
        ended = time.monotonic()
        if self.prometheus_metrics:
            self.prometheus_metrics.record_request(record, code, ended - record.began)
        if self.traces:
            self.traces.end(record, code, ended)

    def batch_finished(self, batch: BatchRun) -> None:
        """Record a batch."""
        span = self.traces.record_batch(batch) if self.traces else None
        for record in batch.records:
            record.stage("compute", batch.began, batch.ended, span)
        if self.prometheus_metrics:
            self.prometheus_metrics.record_batch(batch)

    def model_loaded(self, model: str, seconds: float, *, succeeded: bool) -> None:
        """Record a model that was loaded, or failed to load."""
        if self.prometheus_metrics:
            self.prometheus_metrics.record_load(model, seconds, succeeded=succeeded)

    def worker_started(self, engine: int, device: str) -> None:
        """Record the start of a worker."""
        if self.prometheus_metrics:
            self.prometheus_metrics.add_worker(engine, device)

    def worker_lost(self, engine: int, device: str) -> None:
        """Record that a worker's process ended, and another one is started in its place."""
        if self.prometheus_metrics:
            self.prometheus_metrics.record_restart(engine, device)


def telemetry(state: Callable[[], ServerSnapshot], *, metrics: bool, traces: bool) -> Telemetry | None:
    """Return the telemetry of a server, or None if all of it is disabled.

    Args:
        state: function that returns the server's state; called when Prometheus requests the metrics.
        metrics: True to enable metrics.
        traces: True to enable traces.

    Raises:
        ConfigError: OpenTelemetry is not installed, or its settings are invalid.
    """
    if not (metrics or traces):
        return None
    prometheus_metrics, spans = None, None
    if metrics:
        from camserve_server.telemetry.prometheus import PrometheusMetrics  # noqa: PLC0415 -- only if enabled

        prometheus_metrics = PrometheusMetrics(state)
    if traces:
        from camserve_server.telemetry.traces import open_traces  # noqa: PLC0415 -- only if enabled

        spans = open_traces()
    return Telemetry(prometheus_metrics, spans)
