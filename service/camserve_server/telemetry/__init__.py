"""What is told of a server's work: metrics for Prometheus, traces for OpenTelemetry; what is off costs nothing."""

from camserve_server.telemetry.record import CURRENT, Engine, Memory, Ran, Record, State, Told
from camserve_server.telemetry.spent import Spent
from camserve_server.telemetry.told import Telemetry, telemetry

__all__ = ["CURRENT", "Engine", "Memory", "Ran", "Record", "Spent", "State", "Telemetry", "Told", "telemetry"]
