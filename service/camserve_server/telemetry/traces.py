"""OpenTelemetry traces: a span for each request with its stages, and one for each batch, linked to its requests.

The exporter, the sampler and the service's name are configured by OpenTelemetry's own environment variables (OTEL_*).
The span of a request starts with the request, so that its log lines have the trace's ID. The spans of its stages are
created at its end, from the recorded times.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points, version
from typing import Any

from camserve_server.core.errors import ConfigError
from camserve_server.telemetry.values import BatchRun, RequestTrace

try:
    from opentelemetry import propagate, trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON
except ModuleNotFoundError as error:
    raise ConfigError('traces need OpenTelemetry: pip install "camserve[otel]"') from error
except ValueError as error:  # OpenTelemetry reads OTEL_PROPAGATORS when it is imported
    raise ConfigError(f"invalid configuration of OpenTelemetry in the environment (OTEL_*): {error}") from error

FLUSH_TIMEOUT = 1.0  # seconds that a stopping server waits until the last spans are sent
SERVER_ERRORS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Statuses that OpenTelemetry's conventions define as errors of the server; the others are the caller's."""

_VARIABLES = "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"


class Traces:
    """Creates spans and exports them.

    Args:
        exporters: exporters that send the spans.
    """

    def __init__(self, exporters: Sequence[SpanExporter]) -> None:
        resource = Resource.create(_service_attributes())
        self._exporters = exporters
        self._processors = [BatchSpanProcessor(exporter) for exporter in exporters]
        requests = TracerProvider(resource=resource, shutdown_on_exit=False)
        # A batch is recorded if one of its requests is. `record_batch` decides it, so this sampler keeps everything.
        batches = TracerProvider(resource=resource, sampler=ALWAYS_ON, shutdown_on_exit=False)
        for provider in (requests, batches):
            for processor in self._processors:
                provider.add_span_processor(processor)
        self._requests, self._batches = requests.get_tracer("camserve"), batches.get_tracer("camserve")

    def begin(self, record: RequestTrace, name: str, metadata: Mapping[str, Any], parent: RequestTrace | None) -> None:
        """Start the span of a request. Its parent is the span of its stream, or the caller's span."""
        record.clock_offset = time.time_ns() - time.monotonic_ns()
        if parent and parent.span:
            context, kind = trace.set_span_in_context(parent.span), trace.SpanKind.INTERNAL
        else:
            context, kind = propagate.extract(_text_metadata(metadata)), trace.SpanKind.SERVER
        span = self._requests.start_span(
            name.lstrip("/"), context, kind, {"rpc.system": "grpc"}, start_time=_ns(record, record.began)
        )
        record.span, span_context = span, span.get_span_context()
        record.trace_id = trace.format_trace_id(span_context.trace_id) if span_context.is_valid else ""
        if span.is_recording():
            record.stages = []

    def end(self, record: RequestTrace, code: str, ended: float) -> None:
        """End the span of a request, after those of its stages."""
        span = record.span
        if span.is_recording():
            self._export_stages(record)
            span.set_attributes(dict(_attributes(record, code)))
            if code in SERVER_ERRORS:
                span.set_status(trace.StatusCode.ERROR, record.reason)
        span.end(_ns(record, ended))

    def _export_stages(self, record: RequestTrace) -> None:
        context = trace.set_span_in_context(record.span)
        for name, began, ended, batch in record.stages or ():
            links = [trace.Link(batch)] if batch else []
            stage = self._requests.start_span(name, context, links=links, start_time=_ns(record, began))
            stage.end(_ns(record, ended))

    def record_batch(self, batch: BatchRun) -> Any:
        """Export the span of a batch if one of its requests is recorded; return the span's context, or None."""
        spans = [record.span for record in batch.records if record.span]
        if not any(span.is_recording() for span in spans):
            return None
        batch_span = self._batches.start_span(
            "batch",
            trace.set_span_in_context(trace.INVALID_SPAN),  # a trace of its own, as it belongs to several requests
            links=[trace.Link(span.get_span_context()) for span in spans],
            attributes={
                "camserve.model": batch.model,
                "camserve.kind": batch.kind,
                "camserve.rows": batch.rows,
                "camserve.requests": len(spans),
            },
            start_time=_ns(batch.records[0], batch.began),
        )
        batch_span.end(_ns(batch.records[0], batch.ended))
        return batch_span.get_span_context()

    def close(self) -> None:
        """Send the remaining spans, for at most a second: the collector may not respond."""
        flushing = threading.Thread(target=self._flush, name="traces", daemon=True)
        flushing.start()
        flushing.join(FLUSH_TIMEOUT)
        if flushing.is_alive():
            for exporter in self._exporters:
                exporter.shutdown()  # stops its retries

    def _flush(self) -> None:
        for processor in self._processors:
            processor.shutdown()  # type: ignore[no-untyped-call]


def open_traces() -> Traces:
    """Return traces with the exporters that the environment configures.

    Raises:
        ConfigError: an exporter is not installed, or the environment is invalid.
    """
    logging.getLogger("opentelemetry").handlers[:] = logging.getLogger("camserve_server").handlers
    logging.getLogger("opentelemetry").propagate = False
    try:
        return Traces([_exporter(name) for name in _exporter_names()])
    except ValueError as error:
        raise ConfigError(f"invalid configuration of traces in the environment (OTEL_*): {error}") from error


def _exporter_names() -> Iterator[str]:
    """Yield the names of the exporters' entry points."""
    kinds, *protocols = (os.environ.get(name, "").strip().lower() for name in _VARIABLES)
    protocol = next(filter(None, protocols), "grpc")
    for kind in (kinds or "otlp").split(","):
        if kind.strip() == "otlp":
            yield {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}.get(protocol, protocol)
        elif kind.strip() != "none":
            yield kind.strip()


def _exporter(name: str) -> SpanExporter:
    """Create the exporter of an entry point.

    Raises:
        ConfigError: no installed package provides it.
    """
    entries = tuple(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not entries:
        hint = ": pip install opentelemetry-exporter-otlp-proto-http" if name == "otlp_proto_http" else ""
        raise ConfigError(f"no exporter {name} for traces is installed{hint}")
    exporter: SpanExporter = entries[0].load()()
    return exporter


def _service_attributes() -> dict[str, str]:
    """Return the service's version, and its name unless the environment sets one."""
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return ({} if named else {"service.name": "camserve"}) | {"service.version": version("camserve")}


def _text_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata without binary values."""
    return {key: value for key, value in metadata.items() if isinstance(value, str)}


def _ns(record: RequestTrace, clock: float) -> int:
    """Convert a time on the event loop's clock to nanoseconds since 1970."""
    return record.clock_offset + int(clock * 1e9)


def _attributes(record: RequestTrace, code: str) -> Iterator[tuple[str, str | int]]:
    yield "rpc.response.status_code", code
    if code != "OK":
        yield "error.type", code
    for name in ("request_id", "model", "method", "reason"):
        if value := getattr(record, name):
            yield f"camserve.{name}", value
    if record.dropped_stages:
        yield "camserve.stages_untold", record.dropped_stages
