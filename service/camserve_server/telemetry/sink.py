"""Tells metrics and traces of each request, batch, model and engine; which of the two there are, is settled once."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from camserve_server.telemetry.record import Ran, RequestTrace, State

if TYPE_CHECKING:
    from camserve_server.telemetry.prometheus import PrometheusMetrics
    from camserve_server.telemetry.traces import Traces


class Telemetry:
    """What a server tells.

    Args:
        meters: what Prometheus is told, or None.
        traces: what OpenTelemetry is told, or None.
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
            record: of it, empty.
            name: that its span has.
            metadata: of the call, where a caller may say which trace it is part of.
            parent: the record of the stream that the request is part of.
        """
        if self.traces:
            self.traces.begin(record, name, metadata or {}, parent)
        return record

    def end(self, record: RequestTrace, code: str) -> None:
        """Count a request, and end its span."""
        ended = time.monotonic()
        if self.prometheus_metrics:
            self.prometheus_metrics.answered(record, code, ended - record.began)
        if self.traces:
            self.traces.end(record, code, ended)

    def ran(self, batch: Ran) -> None:
        """Hear of a batch."""
        span = self.traces.ran(batch) if self.traces else None
        for record in batch.records:
            record.stage("compute", batch.began, batch.ended, span)
        if self.prometheus_metrics:
            self.prometheus_metrics.ran(batch)

    def loaded(self, model: str, seconds: float, *, well: bool) -> None:
        """Hear that a model was loaded, or could not be."""
        if self.prometheus_metrics:
            self.prometheus_metrics.loaded(model, seconds, well=well)

    def begun(self, engine: int, device: str) -> None:
        """Hear that there is an engine."""
        if self.prometheus_metrics:
            self.prometheus_metrics.begun(engine, device)

    def lost(self, engine: int, device: str) -> None:
        """Hear that an engine's process ended, and another is started in its place."""
        if self.prometheus_metrics:
            self.prometheus_metrics.lost(engine, device)


def telemetry(state: Callable[[], State], *, metrics: bool, traces: bool) -> Telemetry | None:
    """Return what a server tells, or None if it tells nothing; what that needs is imported only then.

    Args:
        state: what is read when Prometheus asks.
        metrics: whether Prometheus is told.
        traces: whether OpenTelemetry is.

    Raises:
        ConfigError: what traces need is not installed, or their settings make no sense.
    """
    if not (metrics or traces):
        return None
    prometheus_metrics, spans = None, None
    if metrics:
        from camserve_server.telemetry.prometheus import PrometheusMetrics  # noqa: PLC0415 -- as above

        prometheus_metrics = PrometheusMetrics(state)
    if traces:
        from camserve_server.telemetry.traces import opened  # noqa: PLC0415 -- as above

        spans = opened()
    return Telemetry(prometheus_metrics, spans)
