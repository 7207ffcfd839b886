"""Wiring: settings in, a running server out; health, reflection, and a stop that loses nothing."""

import asyncio
import itertools
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc
from torch import nn

from camserve.v1 import (
    evaluate_pb2,
    evaluate_pb2_grpc,
    explain_pb2,
    explain_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
)
from camserve_server import access, floods, logs, oip, process, reflection, scraping
from camserve_server.admission import FairThreads
from camserve_server.config import Settings
from camserve_server.devices import device_of, devices_named
from camserve_server.errors import ConfigError
from camserve_server.fleet import LOADING, Fleet, Well
from camserve_server.hardware import cores
from camserve_server.health import HealthServicer
from camserve_server.lifecycle import Lifecycle
from camserve_server.methods import add_plugins
from camserve_server.models import ModelSpec, Source, of_network, parse
from camserve_server.parsing import Parser
from camserve_server.pipeline import Pipeline
from camserve_server.rpc import RPC_NAMES, ServerState
from camserve_server.servicers import EvaluateServicer, ExplainServicer, ModelServicer
from camserve_server.telemetry import State, Told
from camserve_server.types import ModelInfo

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


@asynccontextmanager
async def opened(
    settings: Settings,
    well: Well = lambda _well: None,
    told: Told | None = None,
    specs: Mapping[str, ModelSpec] | None = None,
    *,
    watch: bool = True,
) -> AsyncIterator[Pipeline]:
    """Load the models, warm them up, and hold a pipeline open inside the block.

    Args:
        settings: of the server.
        well: told when explanations can no longer be had, and when they can again.
        told: who hears of batches, models and engines, if somebody does.
        specs: the models by name, where they are not those that the settings name.
        watch: whether an idle engine explains an image now and then, to see whether it still can.

    Raises:
        ConfigError: no model can be loaded, or a plugin or device cannot.
    """
    specs = named(settings.models) if specs is None else specs
    if settings.isolation != "thread" and any(spec.live for spec in specs.values()):
        raise ConfigError('a network of this process is served in this process: leave isolation at "thread"')
    add_plugins()
    found = await asyncio.to_thread(_devices, settings)
    settings = settings.model_copy(update={"device": ",".join(found)})
    _warn_of_precisions(specs.values(), found)
    with ThreadPoolExecutor(settings.threads or cores(), thread_name_prefix="image") as pool:
        async with Fleet(settings, well, told, watch=watch) as fleet:
            lifecycle = Lifecycle(fleet, specs, settings)
            try:
                await lifecycle.start()
                yield Pipeline(lifecycle, fleet.batcher, FairThreads(pool), settings.limits)
            finally:
                await lifecycle.close()


def _devices(settings: Settings) -> list[str]:
    """Find the devices of the engines; make them ready where the engines live in this process.

    Not on the event loop: a driver may take minutes to start, in which the server shall answer that it lives.

    Raises:
        ConfigError: one is not there, or cannot be used.
    """
    found = devices_named(settings.device)
    for name in found if settings.isolation == "thread" else ():
        try:
            device_of(name).initialize()
        except RuntimeError as error:
            raise ConfigError(f'device "{name}": {error}') from error
    return found


def _warn_of_precisions(specs: Iterable[ModelSpec], devices: Iterable[str]) -> None:
    """Log each model that is in a precision which a device has no instructions for."""
    for spec, device in itertools.product(specs, dict.fromkeys(devices)):
        if spec.precision not in ("float32", *device_of(device).precisions()):
            words = "model %s: %s has no instructions for %s, which is slow there: leave out precision="
            log.warning(words, spec.name, device, spec.precision)


def named(models: Sequence[str]) -> dict[str, ModelSpec]:
    """Read models as they are named on a command line; return them by the names that requests use.

    Raises:
        ConfigError: one cannot be read, or two have one name.
    """
    specs: dict[str, ModelSpec] = {}
    for spec in map(parse, models):
        if spec.name in specs:
            raise ConfigError(f'two models are called "{spec.name}": name one as NAME={spec.origin}')
        specs[spec.name] = spec
    return specs


def specs_of(models: Mapping[str, str | nn.Module | Source]) -> dict[str, ModelSpec]:
    """Return what models to load, by name.

    Args:
        models: by name, a text as on a command line, a network of this process, or that with what is known of it.

    Raises:
        ConfigError: one cannot be read.
    """
    return {
        name: parse(f"{name}={one}") if isinstance(one, str) else of_network(name, one) for name, one in models.items()
    }


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


Ready: TypeAlias = Callable[[int, Pipeline], None]
"""Told the port and the pipeline once the models are warm."""


async def serve(
    settings: Settings,
    stop: Stop,
    ready: Ready = lambda _port, _pipeline: None,
    specs: Mapping[str, ModelSpec] | None = None,
) -> None:
    """Serve until told to stop.

    The port is open from the start, with a health of NOT_SERVING until the models are warm. Told to stop, the server
    turns NOT_SERVING, refuses what is new, finishes what it accepted, and returns.

    Args:
        settings: of this server.
        stop: tells it to stop.
        ready: called once the models are warm.
        specs: the models by name, where they are not those that the settings name.

    Raises:
        ConfigError: the address cannot be listened on, or should not be as the settings are; a file of certificates or
            tokens is no good; or no model can be loaded.
    """
    house = ServerState(settings.stream_in_flight, settings.idle_seconds, names={**RPC_NAMES, **oip.NAMES})
    checks = HealthServicer()
    access.check(settings)
    credentials = access.credentials(settings)
    said = Health(checks)
    inference = oip.InferenceServicer(house, lambda: said.serving, settings.max_queue_delay_ms)
    server = _build(settings, house, checks, inference)
    with scraping.told(settings, lambda: _state(house, said)) as house.telemetry:
        port = _listen(server, settings.address, credentials)
        said.live()
        await server.start()
        try:
            async with opened(settings, said.told, house.telemetry, specs) as pipeline:
                said.turn(warm=True)
                house.pipeline = pipeline
                log.info("serving", extra=logs.fields(port=port, models=",".join(pipeline.models)))
                ready(port, pipeline)
                await stop.asked.wait()
                said.turn(warm=False)
                await _drain(server, house, settings.drain_seconds, stop)
        finally:
            await server.stop(None)


def _state(house: ServerState, said: Health) -> State:
    """Return what Prometheus is told of the server as it is now; from any thread."""
    pipeline = house.pipeline
    if pipeline is None:
        return State(said.serving, house.active)
    models, stats = list(pipeline.models.items()), pipeline.batcher.stats
    return State(
        said.serving,
        house.active,
        pipeline.batcher.admitted,
        pipeline.batcher.limit,
        stats.answered,
        stats.failed,
        [(name, one.version, isinstance(one, ModelInfo)) for name, one in models],
        pipeline.lifecycle.engines(),
    )


async def _drain(server: grpc.aio.Server, house: ServerState, seconds: float, stop: Stop) -> None:
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


def _build(
    settings: Settings, house: ServerState, checks: HealthServicer, inference: oip.InferenceServicer
) -> grpc.aio.Server:
    size = settings.max_message_mib * 2**20
    server = grpc.aio.server(
        interceptors=_at_the_door(settings, house),
        options=(
            ("grpc.max_receive_message_length", size),
            ("grpc.per_message_decompression", 0),  # `parsing` unpacks when there is room; gRPC would not wait for it
            ("grpc.max_send_message_length", -1),
            # Two limits: between them gRPC would refuse by chance.
            ("grpc.max_metadata_size", settings.max_metadata_kib * 2**10),
            ("grpc.absolute_max_metadata_size", settings.max_metadata_kib * 2**10),
            ("grpc.so_reuseport", 0),  # two servers on one port is a mistake, not a cluster
            *floods.options(settings),
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
    parser = Parser(settings, house)
    return (access.Guard(settings.tokens_file, house), parser) if settings.tokens_file else (parser,)


def _listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        return server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: is the port taken, or the host unknown?") from error


async def serve_until_signal(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; a second one cuts the drain short.

    Does not return, but ends the process, where a thread could hold it up: one that still loads a model, or one in
    which a model hangs.

    Returns:
        The exit code: 0 after a clean stop; 1 if the stop was cut short or accepted calls were not answered.
    """
    stop, loop, warm = Stop(), asyncio.get_running_loop(), asyncio.Event()
    tasks: list[asyncio.Task[None]] = []
    process.allow_files(settings.max_connections)
    if settings.isolation == "process":  # batches run in other processes: here memory is only for photos and messages
        process.keep_memory(process.SERVER_KEEPS)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.signalled)

    def ready(_port: int, _pipeline: Pipeline) -> None:
        process.keep_objects()
        if settings.isolation == "process":
            tasks.append(loop.create_task(_checked(process.Heap(process.SERVER_KEEPS + process.PIECES))))
        warm.set()

    serving = asyncio.ensure_future(serve(settings, stop, ready))
    asked, hurry = asyncio.ensure_future(stop.asked.wait()), asyncio.ensure_future(stop.hurry.wait())
    await asyncio.wait((serving, asked), return_when=asyncio.FIRST_COMPLETED)
    if not (serving.done() or warm.is_set()):
        log.info("stopped before the models were loaded")
        os._exit(0)
    longest = settings.drain_seconds + 2 * LONGEST_QUIET
    await asyncio.wait((serving, hurry), return_when=asyncio.FIRST_COMPLETED, timeout=longest)
    await asyncio.wait((serving,), timeout=LONGEST_QUIET)
    if not serving.done():
        os._exit(1)
    await serving
    if any(thread.name == LOADING for thread in threading.enumerate()):
        os._exit(stop.code)  # a model that nobody waits for any more
    return stop.code


async def _checked(heap: process.Heap) -> None:
    while True:
        await asyncio.sleep(process.PAUSE)
        await asyncio.to_thread(heap.check)


@contextmanager
def serve_in_thread(settings: Settings, specs: Mapping[str, ModelSpec] | None = None) -> Iterator[str]:
    """Serve in a thread inside the block.

    Args:
        settings: of the server.
        specs: the models by name, where they are not those that the settings name.

    Yields:
        The address, such as "127.0.0.1:41234".

    Raises:
        ConfigError: the server cannot start.
    """
    started: Future[tuple[asyncio.AbstractEventLoop, Stop, int]] = Future()

    async def main() -> None:
        stop, loop = Stop(), asyncio.get_running_loop()
        await serve(settings, stop, lambda port, _pipeline: started.set_result((loop, stop, port)), specs)

    def work() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=work, name="camserve-server", daemon=True)
    thread.start()
    loop, stop, port = started.result()
    try:
        host = settings.address.rpartition(":")[0]
        yield settings.address if host == "unix" else f"{host}:{port}"
    finally:
        loop.call_soon_threadsafe(stop.asked.set)
        thread.join()
