"""Telemetry of a server: metrics for Prometheus and traces for OpenTelemetry. What is switched off is not imported.

It may import `core`.
"""

from camserve_server.telemetry.sink import Telemetry, telemetry
from camserve_server.telemetry.timings import Spent
from camserve_server.telemetry.values import IN_PROCESS, Engine, Memory, Origin, Ran, RequestTrace, State, TelemetrySink

__all__ = [
    "IN_PROCESS",
    "Engine",
    "Memory",
    "Origin",
    "Ran",
    "RequestTrace",
    "Spent",
    "State",
    "Telemetry",
    "TelemetrySink",
    "telemetry",
]
