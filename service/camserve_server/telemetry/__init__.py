"""What is told of a server's work: metrics for Prometheus, traces for OpenTelemetry; what is off costs nothing."""

from camserve_server.telemetry.record import IN_PROCESS, Engine, Memory, Origin, Ran, Record, State, Told
from camserve_server.telemetry.spent import Spent
from camserve_server.telemetry.told import Telemetry, telemetry

__all__ = [
    "IN_PROCESS",
    "Engine",
    "Memory",
    "Origin",
    "Ran",
    "Record",
    "Spent",
    "State",
    "Telemetry",
    "Told",
    "telemetry",
]
