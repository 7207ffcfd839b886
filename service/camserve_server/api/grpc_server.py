"""The gRPC server: its services and limits, its port, its health, and how it drains."""

import asyncio
import logging
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from camserve.v1 import evaluate_pb2, evaluate_pb2_grpc, explain_pb2, explain_pb2_grpc, models_pb2, models_pb2_grpc
from camserve_server.api import auth, connection_limits, oip, reflection
from camserve_server.api.deserialization import DeserializationInterceptor
from camserve_server.api.health import HealthServicer
from camserve_server.api.rpc import ServerState
from camserve_server.api.servicers import EvaluateServicer, ExplainServicer, ModelServicer
from camserve_server.core import logs
from camserve_server.core.config import Settings
from camserve_server.core.errors import ConfigError

log = logging.getLogger(__name__)

TURN, QUIET = 0.01, 10
"""A draining server checks for new calls every `TURN` seconds, and closes its port after `QUIET` checks without one.

It counts checks and not seconds: if the machine did not run the process for a while, calls wait that it has not seen.
"""

LONGEST_QUIET = 1.0
"""Seconds after which it closes its port even if calls still come."""

SERVICES = (
    "",
    explain_pb2.DESCRIPTOR.services_by_name["ExplainService"].full_name,
    evaluate_pb2.DESCRIPTOR.services_by_name["EvaluateService"].full_name,
    models_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
    oip.NAME,
)
"""What has a health of its own; the empty name is the server as a whole."""

LIVE = "liveness"
"""The name whose health says that the server's event loop runs, and nothing of its engines."""


@dataclass(slots=True)
class Stop:
    """How a running server is told to stop.

    Attributes:
        asked: finish what was accepted, then stop.
        hurry: stop at once.
        lost: accepted calls that were not answered when the server stopped.
    """

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    lost: int = 0

    @property
    def code(self) -> int:
        """The exit code of a server that stopped: 0 unless calls were cut short."""
        return int(self.hurry.is_set() or self.lost > 0)

    def signalled(self) -> None:
        """Take a signal: the first asks, the second hurries."""
        (self.hurry if self.asked.is_set() else self.asked).set()


class Health:
    """What the server says of itself: it is SERVING while its models are warm and explanations come out of them.

    Args:
        checks: that answer who asks.
    """

    def __init__(self, checks: HealthServicer) -> None:
        self._checks = checks
        self._warm, self._well = False, True

    @property
    def serving(self) -> bool:
        """Whether explanations can be had."""
        return self._warm and self._well

    def live(self) -> None:
        """Begin to answer: the event loop runs, and that is all there is yet."""
        self._checks.set({LIVE: health_pb2.HealthCheckResponse.SERVING})
        self._tell()

    def turn(self, *, warm: bool) -> None:
        """Take note that the models are warm, or that the server stops."""
        self._warm = warm
        self._tell()

    def told(self, well: bool) -> None:  # noqa: FBT001 -- what a callback is told
        """Take note of whether explanations can be had."""
        if self._warm and well != self._well:
            log.log(logging.INFO if well else logging.ERROR, "well again" if well else "not well: no explanations")
        self._well = well
        self._tell()

    def _tell(self) -> None:
        kinds = health_pb2.HealthCheckResponse
        self._checks.set(dict.fromkeys(SERVICES, kinds.SERVING if self.serving else kinds.NOT_SERVING))


async def drain(server: grpc.aio.Server, house: ServerState, seconds: float, stop: Stop) -> None:
    """Refuse new calls, finish those that were accepted, within a number of seconds, and stop a server."""
    log.info("draining", extra=logs.fields(seconds=seconds))
    house.draining.set()
    finishing = asyncio.ensure_future(_finished(house, seconds))
    hurrying = asyncio.ensure_future(stop.hurry.wait())
    await asyncio.wait((finishing, hurrying), return_when=asyncio.FIRST_COMPLETED)
    if stop.hurry.is_set():
        log.warning("cut short by a second signal")
    stop.lost = house.active
    if stop.lost:
        log.error("stopping before every accepted call was answered", extra=logs.fields(lost=stop.lost))
    for task in (finishing, hurrying):
        task.cancel()
    await server.stop(None if stop.hurry.is_set() else LONGEST_QUIET)  # health watches would stay for ever
    log.info("stopped")


async def _finished(house: ServerState, seconds: float) -> None:
    """Return when every accepted call is answered, and no new one came to be refused for a while.

    gRPC itself would cancel a call that it has received but not yet handed over at the moment it stops. So the calls
    that still come are refused as Unavailable first, until their callers have noticed.
    """
    clock = asyncio.get_running_loop().time
    late = clock() + seconds
    while house.active and clock() < late:  # noqa: ASYNC110 -- once in a life, not worth an event on every call
        await asyncio.sleep(TURN)
    late = min(late, clock() + LONGEST_QUIET)
    quiet = 0
    while quiet < QUIET and clock() < late:
        arrived = house.arrived
        await asyncio.sleep(TURN)
        quiet = quiet + 1 if house.arrived == arrived else 0


def build(
    settings: Settings, house: ServerState, checks: HealthServicer, inference: oip.InferenceServicer
) -> grpc.aio.Server:
    """Return a gRPC server with every service, which holds the limits of the settings; it does not listen yet."""
    size = settings.max_message_mib * 2**20
    server = grpc.aio.server(
        interceptors=_at_the_door(settings, house),
        options=(
            ("grpc.max_receive_message_length", size),
            ("grpc.per_message_decompression", 0),  # `deserialization` unpacks, when there is room
            ("grpc.max_send_message_length", -1),
            # Two limits: between them gRPC would refuse by chance.
            ("grpc.max_metadata_size", settings.max_metadata_kib * 2**10),
            ("grpc.absolute_max_metadata_size", settings.max_metadata_kib * 2**10),
            ("grpc.so_reuseport", 0),  # two servers on one port is a mistake, not a cluster
            *connection_limits.options(settings),
        ),
    )
    # gRPC waits for a call of each registered method, and for all of them anew whenever one has come: with ours that
    # was an eighth of what the event loop does for a request. Those that are not registered it waits for together.
    server.add_registered_method_handlers = lambda *_: None  # type: ignore[method-assign]
    explain_pb2_grpc.add_ExplainServiceServicer_to_server(ExplainServicer(house), server)
    evaluate_pb2_grpc.add_EvaluateServiceServicer_to_server(EvaluateServicer(house), server)
    models_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(house), server)
    oip.add_to_server(inference, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    known = (*SERVICES[1:], health.SERVICE_NAME, reflection.NAME)
    pool = oip.pool_of(name for name in known if name != oip.NAME)
    told = reflection.ReflectionServicer(known, pool, settings.idle_seconds)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(told, server)
    return server


def _at_the_door(settings: Settings, house: ServerState) -> tuple[grpc.aio.ServerInterceptor, ...]:
    parser = DeserializationInterceptor(settings, house)
    return (auth.AuthInterceptor(settings.tokens_file, house), parser) if settings.tokens_file else (parser,)


def listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Listen on an address; return the port.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    try:
        return server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: is the port taken, or the host unknown?") from error
