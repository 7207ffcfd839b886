"""What is told of a server's work: metrics for Prometheus, traces for OpenTelemetry; what is off costs nothing.

It may import `core`.
"""

from camserve_server.telemetry.record import IN_PROCESS, Engine, Memory, Origin, Ran, RequestTrace, State, TelemetrySink
from camserve_server.telemetry.sink import Telemetry, telemetry
from camserve_server.telemetry.spent import Spent

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
