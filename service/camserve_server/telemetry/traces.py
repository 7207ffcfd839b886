"""Traces by OpenTelemetry: a span for each request with its stages, and one for each batch, linked to its requests.

Where they go, how many are kept and what the service is called say the variables that OpenTelemetry has for it
(OTEL_*). The span of a request begins with it, so that its log lines have the trace's id; those of its stages are made
when it has ended, with the times that were noted.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points, version
from typing import Any

from camserve_server.core.errors import ConfigError
from camserve_server.telemetry.record import Ran, RequestTrace

try:
    from opentelemetry import propagate, trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON
except ModuleNotFoundError as error:
    raise ConfigError('traces need OpenTelemetry: pip install "camserve[otel]"') from error
except ValueError as error:  # OTEL_PROPAGATORS is read when it is imported
    raise ConfigError(f"OpenTelemetry cannot begin as the environment says (OTEL_*): {error}") from error

MOMENT = 1.0  # seconds that a server which stops gives the last spans to be sent
FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Statuses that are the server's fault by OpenTelemetry's conventions; the others are the caller's."""

_VARIABLES = "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"


class Traces:
    """Makes spans, and sends them.

    Args:
        exporters: that send them.
    """

    def __init__(self, exporters: Sequence[SpanExporter]) -> None:
        resource = Resource.create(_service())
        self._exporters = exporters
        self._processors = [BatchSpanProcessor(one) for one in exporters]
        requests = TracerProvider(resource=resource, shutdown_on_exit=False)
        # A batch is recorded where one of its requests is, which has been decided by then.
        batches = TracerProvider(resource=resource, sampler=ALWAYS_ON, shutdown_on_exit=False)
        for provider in (requests, batches):
            for processor in self._processors:
                provider.add_span_processor(processor)
        self._requests, self._batches = requests.get_tracer("camserve"), batches.get_tracer("camserve")

    def begin(self, record: RequestTrace, name: str, metadata: Mapping[str, Any], parent: RequestTrace | None) -> None:
        """Begin the span of a request; its parent is the span of its stream, or what its caller says."""
        record.wall = time.time_ns() - time.monotonic_ns()
        if parent and parent.span:
            context, kind = trace.set_span_in_context(parent.span), trace.SpanKind.INTERNAL
        else:
            context, kind = propagate.extract(_texts(metadata)), trace.SpanKind.SERVER
        span = self._requests.start_span(
            name.lstrip("/"), context, kind, {"rpc.system": "grpc"}, start_time=_ns(record, record.began)
        )
        record.span, found = span, span.get_span_context()
        record.trace_id = trace.format_trace_id(found.trace_id) if found.is_valid else ""
        if span.is_recording():
            record.stages = []

    def end(self, record: RequestTrace, code: str, ended: float) -> None:
        """End the span of a request, after those of its stages."""
        span = record.span
        if span.is_recording():
            self._tell_stages(record)
            span.set_attributes(dict(_attributes(record, code)))
            if code in FAULTS:
                span.set_status(trace.StatusCode.ERROR, record.reason)
        span.end(_ns(record, ended))

    def _tell_stages(self, record: RequestTrace) -> None:
        context = trace.set_span_in_context(record.span)
        for name, began, ended, batch in record.stages or ():
            links = [trace.Link(batch)] if batch else []
            stage = self._requests.start_span(name, context, links=links, start_time=_ns(record, began))
            stage.end(_ns(record, ended))

    def ran(self, batch: Ran) -> Any:
        """Tell of a batch that has a request which is recorded; return what a span can be linked to, or None."""
        spans = [record.span for record in batch.records if record.span]
        if not any(span.is_recording() for span in spans):
            return None
        one = self._batches.start_span(
            "batch",
            trace.set_span_in_context(trace.INVALID_SPAN),  # a trace of its own: it is no single request's part
            links=[trace.Link(span.get_span_context()) for span in spans],
            attributes={
                "camserve.model": batch.model,
                "camserve.kind": batch.kind,
                "camserve.rows": batch.rows,
                "camserve.requests": len(spans),
            },
            start_time=_ns(batch.records[0], batch.began),
        )
        one.end(_ns(batch.records[0], batch.ended))
        return one.get_span_context()

    def close(self) -> None:
        """Send what there is, for no longer than a moment; it may be that nobody is there to take it."""
        sending = threading.Thread(target=self._flush, name="traces", daemon=True)
        sending.start()
        sending.join(MOMENT)
        if sending.is_alive():
            for exporter in self._exporters:
                exporter.shutdown()  # it gives up trying

    def _flush(self) -> None:
        for processor in self._processors:
            processor.shutdown()  # type: ignore[no-untyped-call]


def opened() -> Traces:
    """Return traces that go where the environment says.

    Raises:
        ConfigError: what sends them is not installed, or the environment makes no sense.
    """
    logging.getLogger("opentelemetry").handlers[:] = logging.getLogger("camserve_server").handlers
    logging.getLogger("opentelemetry").propagate = False
    try:
        return Traces([_exporter(name) for name in _exporters()])
    except ValueError as error:
        raise ConfigError(f"traces cannot be sent as the environment says (OTEL_*): {error}") from error


def _exporters() -> Iterator[str]:
    """Yield the names by which packages offer what sends traces."""
    kinds, *protocols = (os.environ.get(name, "").strip().lower() for name in _VARIABLES)
    protocol = next(filter(None, protocols), "grpc")
    for kind in (kinds or "otlp").split(","):
        if kind.strip() == "otlp":
            yield {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}.get(protocol, protocol)
        elif kind.strip() != "none":
            yield kind.strip()


def _exporter(name: str) -> SpanExporter:
    found = tuple(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not found:
        more = ": pip install opentelemetry-exporter-otlp-proto-http" if name == "otlp_proto_http" else ""
        raise ConfigError(f"nothing is installed that sends traces by {name}{more}")
    made: SpanExporter = found[0].load()()
    return made


def _service() -> dict[str, str]:
    """Return what the service is called, where the environment has no name for it."""
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return ({} if named else {"service.name": "camserve"}) | {"service.version": version("camserve")}


def _texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {key: value for key, value in metadata.items() if isinstance(value, str)}


def _ns(record: RequestTrace, clock: float) -> int:
    """Return a time of the event loop's clock as nanoseconds since 1970."""
    return record.wall + int(clock * 1e9)


def _attributes(record: RequestTrace, code: str) -> Iterator[tuple[str, str | int]]:
    yield "rpc.response.status_code", code
    if code != "OK":
        yield "error.type", code
    for name in ("request_id", "model", "method", "reason"):
        if value := getattr(record, name):
            yield f"camserve.{name}", value
    if record.untold:
        yield "camserve.stages_untold", record.untold
