"""The gRPC server: services, limits, port, health status, and draining."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from camserve.v1 import evaluate_pb2, evaluate_pb2_grpc, explain_pb2, explain_pb2_grpc, models_pb2, models_pb2_grpc
from camserve_server.api import auth, connection_limits, oip, reflection, undecodable_paths
from camserve_server.api.deserialization import DeserializationInterceptor, MessageLimits
from camserve_server.api.health import HealthServicer
from camserve_server.api.rpc import ServerState
from camserve_server.api.servicers import EvaluateServicer, ExplainServicer, ModelServicer
from camserve_server.core import logs
from camserve_server.core.config import Settings
from camserve_server.core.errors import ConfigError

log = logging.getLogger(__name__)

DRAIN_CHECK_INTERVAL, QUIET_CHECKS = 0.01, 10
"""Seconds between checks for new calls while draining, and the checks without a new call after which the port closes.

Checks are counted instead of seconds: if the process was suspended for a while, there may be calls that it has not
seen.
"""

DELIVERY_CHECK_INTERVAL = 0.1
"""Seconds between checks that answers have arrived. A check takes 1 ms with a hundred connections of the computer."""

QUIET_TIMEOUT = 1.0
"""Seconds after which a draining server closes its port even if new calls still arrive."""

SERVICES = (
    "",
    explain_pb2.DESCRIPTOR.services_by_name["ExplainService"].full_name,
    evaluate_pb2.DESCRIPTOR.services_by_name["EvaluateService"].full_name,
    models_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
    oip.NAME,
)
"""Names of the services that have a health status. The empty name is the server as a whole."""

LIVE = "liveness"
"""Name of the health check that is SERVING while the server's event loop runs, whatever the state of its workers."""


@dataclass(slots=True)
class Stop:
    """Events that stop a running server.

    Attributes:
        requested: event that makes the server complete accepted calls, then stop.
        stop_now: event that makes the server stop at once.
        unanswered: the number of accepted calls whose answers were not sent when the server stopped.
    """

    requested: asyncio.Event = field(default_factory=asyncio.Event)
    stop_now: asyncio.Event = field(default_factory=asyncio.Event)
    unanswered: int = 0

    @property
    def code(self) -> int:
        """The exit code of a stopped server: 1 if it was stopped at once or lost accepted calls, otherwise 0."""
        return int(self.stop_now.is_set() or self.unanswered > 0)

    def handle_signal(self) -> None:
        """Handle a signal: the first one sets `requested`, the second one `stop_now`."""
        (self.stop_now if self.requested.is_set() else self.requested).set()


class Health:
    """Health status of the server: SERVING while its models are warm and its workers are healthy.

    Args:
        servicer: servicer that answers health checks.
    """

    def __init__(self, servicer: HealthServicer) -> None:
        self._servicer = servicer
        self._warm, self._healthy = False, True

    @property
    def serving(self) -> bool:
        """True if the server can explain images."""
        return self._warm and self._healthy

    def set_live(self) -> None:
        """Report that the event loop runs; the models are not warm yet."""
        self._servicer.set({LIVE: health_pb2.HealthCheckResponse.SERVING})
        self._publish()

    def set_warm(self, *, warm: bool) -> None:
        """Set whether the models are warm and the server accepts requests."""
        self._warm = warm
        self._publish()

    def set_healthy(self, healthy: bool) -> None:  # noqa: FBT001 -- the argument of a callback
        """Set whether the workers can compute explanations."""
        if self._warm and healthy != self._healthy:
            message = "healthy again" if healthy else "unhealthy: no worker can compute explanations"
            log.log(logging.INFO if healthy else logging.ERROR, message)
        self._healthy = healthy
        self._publish()

    def _publish(self) -> None:
        statuses = health_pb2.HealthCheckResponse
        self._servicer.set(dict.fromkeys(SERVICES, statuses.SERVING if self.serving else statuses.NOT_SERVING))


async def drain(
    server: grpc.aio.Server, state: ServerState, seconds: float, stop: Stop, undelivered: Callable[[], int]
) -> None:
    """Refuse new calls, complete accepted ones, and stop the server.

    Args:
        server: the server.
        state: state of the server, which counts its calls.
        seconds: the time that accepted calls have to complete, and their callers to read the answers.
        stop: events that stop the server; `stop.unanswered` is set to the number of calls that were not answered.
        undelivered: function that returns the number of connections that have not received all of an answer.
    """
    log.info("draining", extra=logs.fields(seconds=seconds))
    state.draining.set()
    finishing = asyncio.ensure_future(_wait_until_quiet(state, seconds, undelivered))
    hurrying = asyncio.ensure_future(stop.stop_now.wait())
    await asyncio.wait((finishing, hurrying), return_when=asyncio.FIRST_COMPLETED)
    if stop.stop_now.is_set():
        log.warning("cut short by a second signal")
    stop.unanswered = finishing.result() if finishing.done() else max(state.unsent, undelivered())
    if stop.unanswered:
        log.error("stopping before every accepted call was answered", extra=logs.fields(lost=stop.unanswered))
    for task in (finishing, hurrying):
        task.cancel()
    await server.stop(
        None if stop.stop_now.is_set() else QUIET_TIMEOUT
    )  # without a limit, health watches would block it
    log.info("stopped")


async def _wait_until_quiet(state: ServerState, seconds: float, undelivered: Callable[[], int]) -> int:
    """Return when every accepted call is answered, the answers have arrived, and no new call came for some checks.

    When gRPC stops, it cancels calls that it has received but not yet passed to a handler. So the calls that still
    arrive are refused with UNAVAILABLE first, until their callers have noticed that the server drains.

    Returns:
        The number of accepted calls whose answers have not arrived in time.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    # The look that ends the loop decides. Another look could find a call that is being refused, or a ping on its way.
    # It is polled: an event would cost time in every call, and only the system knows what has arrived.
    while (lost := state.unsent or undelivered()) and clock() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(DRAIN_CHECK_INTERVAL if state.unsent else DELIVERY_CHECK_INTERVAL)
    deadline = min(deadline, clock() + QUIET_TIMEOUT)
    quiet = 0
    while quiet < QUIET_CHECKS and clock() < deadline:
        arrived = state.arrived
        await asyncio.sleep(DRAIN_CHECK_INTERVAL)
        quiet = quiet + 1 if state.arrived == arrived else 0
    return lost


@dataclass(frozen=True, slots=True)
class Border:
    """Parts of a server that its protocols share.

    Attributes:
        settings: settings of the server.
        state: state of the server.
        authorizer: authorizer of calls; None if they need no token.
        limits: limits on messages.
        loop: the event loop on which every call runs.
    """

    settings: Settings
    state: ServerState
    authorizer: auth.Authorizer | None
    limits: MessageLimits
    loop: asyncio.AbstractEventLoop

    @classmethod
    def of(cls, settings: Settings, state: ServerState) -> Self:
        """Return the parts that these settings mean, for calls on the current event loop.

        Raises:
            ConfigError: the file of tokens cannot be read.
        """
        authorizer = auth.Authorizer(settings.tokens_file) if settings.tokens_file else None
        return cls(settings, state, authorizer, MessageLimits.of(settings), asyncio.get_running_loop())


def build(border: Border, health_servicer: HealthServicer, inference: oip.InferenceServicer) -> grpc.aio.Server:
    """Return a gRPC server with every service and the limits of the settings. It does not listen yet."""
    settings, state = border.settings, border.state
    undecodable_paths.accept()
    server = grpc.aio.server(interceptors=_interceptors(border), options=_options(settings))
    # grpc.aio awaits calls of each registered method separately, and restarts all of these waits after each call. That
    # was an eighth of the event loop's time for a request. It awaits calls of unregistered methods in one task.
    server.add_registered_method_handlers = lambda *_: None  # type: ignore[method-assign]
    explain_pb2_grpc.add_ExplainServiceServicer_to_server(ExplainServicer(state), server)
    evaluate_pb2_grpc.add_EvaluateServiceServicer_to_server(EvaluateServicer(state), server)
    models_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(state), server)
    oip.add_to_server(inference, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (*SERVICES[1:], health.SERVICE_NAME, reflection.NAME)
    pool = oip.pool_of(name for name in names if name != oip.NAME)
    reflection_servicer = reflection.ReflectionServicer(names, pool, settings.idle_seconds)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection_servicer, server)
    return server


def _interceptors(border: Border) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """Return the interceptors; with a file of tokens, each call is authenticated before a message is parsed."""
    deserialization = DeserializationInterceptor(border.state, border.limits)
    if border.authorizer:
        return auth.AuthInterceptor(border.authorizer, border.state), deserialization
    return (deserialization,)


def _options(settings: Settings) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", settings.max_message_mib * 2**20),
        ("grpc.per_message_decompression", 0),  # `deserialization` decompresses, when there is memory for it
        ("grpc.max_send_message_length", -1),
        # gRPC refuses at random between its soft and its hard limit, so both have the same value.
        ("grpc.max_metadata_size", settings.max_metadata_kib * 2**10),
        ("grpc.absolute_max_metadata_size", settings.max_metadata_kib * 2**10),
        # Processes of one server share the port. A second server on it fails instead.
        ("grpc.so_reuseport", int(settings.sharing > 1)),
        *connection_limits.options(settings),
    )


def listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Listen on an address; return the port.

    Raises:
        ConfigError: the server cannot listen on the address.
    """
    try:
        return server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: is the port taken, or the host unknown?") from error
