"""Telemetry of a server: metrics for Prometheus and traces for OpenTelemetry. What is switched off is not imported.

It may import `core`.
"""

from camserve_server.telemetry.sink import Telemetry, telemetry
from camserve_server.telemetry.timings import RequestTimings
from camserve_server.telemetry.values import (
    IN_PROCESS,
    BatchRun,
    Memory,
    Origin,
    RequestTrace,
    ServerSnapshot,
    TelemetrySink,
    WorkerSnapshot,
)

__all__ = [
    "IN_PROCESS",
    "BatchRun",
    "Memory",
    "Origin",
    "RequestTimings",
    "RequestTrace",
    "ServerSnapshot",
    "Telemetry",
    "TelemetrySink",
    "WorkerSnapshot",
    "telemetry",
]
