"""Build and run a server from its settings: workers, gRPC services, health, telemetry and a graceful stop."""

import asyncio
import itertools
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from torch import nn

from camserve_server.api import auth, exposure, grpc_server, oip, warmup
from camserve_server.api.health import HealthServicer
from camserve_server.api.rpc import RPC_NAMES, ServerState
from camserve_server.app import metrics_endpoint, reserved_port
from camserve_server.app.supervisor_link import SupervisorLink
from camserve_server.core import logs, process, sockets
from camserve_server.core.config import Settings
from camserve_server.core.device_names import parse_devices
from camserve_server.core.devices import device_for
from camserve_server.core.errors import ConfigError
from camserve_server.core.hardware import cores
from camserve_server.methods import add_plugins
from camserve_server.models import ModelSpec, Source, parse, spec_of_network
from camserve_server.models.values import ModelInfo
from camserve_server.scheduling.admission import FairThreads
from camserve_server.scheduling.threads import ThreadPool
from camserve_server.serving import memory
from camserve_server.serving.explain import Pipeline
from camserve_server.serving.model_loading import LOADING_THREAD
from camserve_server.serving.pool_health import HealthListener
from camserve_server.serving.repository import ModelRepository
from camserve_server.serving.worker_pool import WorkerPool
from camserve_server.telemetry import ServerSnapshot, TelemetrySink

if TYPE_CHECKING:
    from camserve_server.api.http.server import HttpServer

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_pipeline(
    settings: Settings,
    on_health_change: HealthListener = lambda _healthy: None,
    sink: TelemetrySink | None = None,
    specs: Mapping[str, ModelSpec] | None = None,
    *,
    watch: bool = True,
) -> AsyncIterator[Pipeline]:
    """Load the models, warm them up, and keep a pipeline open inside the block.

    Args:
        settings: settings of the server.
        on_health_change: callback for changes of the server's health.
        sink: receiver of telemetry on batches, models and workers.
        specs: models by name, instead of those in the settings.
        watch: True to have idle workers explain an image now and then, as a health check.

    Raises:
        ConfigError: no model can be loaded, or a plugin or a device cannot be used.
    """
    specs = specs_by_name(settings.models) if specs is None else specs
    if settings.isolation != "thread" and any(spec.live for spec in specs.values()):
        raise ConfigError('a network of this process can only be served in this process: leave isolation at "thread"')
    add_plugins()
    devices = await asyncio.to_thread(_prepare_devices, settings)
    settings = settings.model_copy(update={"device": ",".join(devices)})
    _warn_of_precisions(specs.values(), devices)
    with closing(ThreadPool(settings.threads or cores(), "image")) as pool:
        async with WorkerPool(settings, on_health_change, sink, watch=watch) as workers:
            repository = ModelRepository(workers, specs, settings)
            try:
                await repository.start()
                photos = memory.photo_budget(settings.sharing)
                yield Pipeline(repository, workers.batcher, FairThreads(pool), settings.limits, photos)
            finally:
                await repository.close()


def _prepare_devices(settings: Settings) -> list[str]:
    """Return the devices of the workers, initialized if the workers run in this process.

    Do not call it on the event loop: a driver may take minutes to start, and the liveness check must work meanwhile.

    Raises:
        ConfigError: a device does not exist, or cannot be used.
    """
    devices = parse_devices(settings.device)
    for name in devices if settings.isolation == "thread" else ():
        try:
            device_for(name).initialize()
        except RuntimeError as error:
            raise ConfigError(f'device "{name}": {error}') from error
    return devices


def _warn_of_precisions(specs: Iterable[ModelSpec], devices: Iterable[str]) -> None:
    """Log each model whose precision a device has no native instructions for."""
    for spec, device in itertools.product(specs, dict.fromkeys(devices)):
        if spec.precision not in ("float32", *device_for(device).precisions()):
            message = "model %s: %s has no instructions for %s, which is slow there: leave out precision="
            log.warning(message, spec.name, device, spec.precision)


def specs_by_name(models: Sequence[str]) -> dict[str, ModelSpec]:
    """Parse models in the format of the command line; return their specs by the names that requests use.

    Raises:
        ConfigError: a model cannot be parsed, or two have the same name.
    """
    specs: dict[str, ModelSpec] = {}
    for spec in map(parse, models):
        if spec.name in specs:
            raise ConfigError(f'two models are called "{spec.name}": name one as NAME={spec.origin}')
        specs[spec.name] = spec
    return specs


def specs_of(models: Mapping[str, str | nn.Module | Source]) -> dict[str, ModelSpec]:
    """Return the specs of models by name.

    Args:
        models: models by name, each as a text in the format of the command line without a name, a network of this
            process, or a `Source` with a network and its preprocessing and labels.

    Raises:
        ConfigError: a model cannot be parsed.
    """
    return {
        name: parse(f"{name}={model}") if isinstance(model, str) else spec_of_network(name, model)
        for name, model in models.items()
    }


Ready: TypeAlias = Callable[[int, Pipeline], None]
"""Called with the port and the pipeline once the models are warm."""

HttpReady: TypeAlias = Callable[[int], None]
"""Called with the port of HTTP once it is open."""


async def serve(
    settings: Settings,
    stop: grpc_server.Stop,
    ready: Ready = lambda _port, _pipeline: None,
    specs: Mapping[str, ModelSpec] | None = None,
    link: SupervisorLink | None = None,
    http_ready: HttpReady = lambda _port: None,
) -> None:
    """Serve until `stop` is set.

    The ports are open from the start. A process that replaces one of several opens them when its models are warm: the
    kernel gives it connections as soon as it listens. On a stop, accepted calls are finished first.

    Args:
        settings: settings of the server.
        stop: request to stop.
        ready: callback for when the models are warm.
        specs: models by name, instead of those in the settings.
        link: link to the supervisor of several processes; None for a single process.
        http_ready: callback for when the port of HTTP is open.

    Raises:
        ConfigError: an address or a file cannot be used, or no model can be loaded.
    """
    server = _Server.build(settings, link, http_ready)
    with _telemetry(server, settings, link):
        try:
            port = await server.open_ports(settings) if link is None or link.early else 0
            async with open_pipeline(settings, server.health.set_healthy, server.state.telemetry, specs) as pipeline:
                await warmup.warm_up(pipeline)
                if link:
                    await link.open_with_others(pipeline.repository)
                server.set_warm(pipeline)
                port = port or await server.open_ports(settings)
                log.info("serving", extra=logs.fields(port=port, models=",".join(pipeline.models)))
                ready(port, pipeline)
                await server.wait(stop)
                await server.drain(settings.drain_seconds, stop, port)
        finally:
            await server.stop()


@dataclass(frozen=True, slots=True)
class _Server:
    """A server before its models are loaded.

    Attributes:
        grpc: the gRPC server.
        state: state that its RPCs share.
        health: its health.
        credentials: credentials for TLS, or None.
        http: the HTTP server, or None.
        http_ready: callback for when the port of HTTP is open.
    """

    grpc: Any
    state: ServerState
    health: grpc_server.Health
    credentials: Any
    http: "HttpServer | None"
    http_ready: HttpReady

    @classmethod
    def build(cls, settings: Settings, link: SupervisorLink | None, http_ready: HttpReady) -> Self:
        """Build a server that does not listen yet; see `serve`."""
        position = link.position if link else ""
        names = {**RPC_NAMES, **oip.NAMES}
        state = ServerState(
            settings.stream_in_flight,
            settings.idle_seconds,
            names=names,
            log_share=settings.access_log_share,
            process=position,
            changes=link,
        )
        if link is None:  # otherwise the supervisor has checked it
            exposure.check(settings)
        credentials = auth.credentials(settings)
        checks = HealthServicer()
        health = grpc_server.Health(checks)
        inference = oip.InferenceServicer(state, lambda: health.serving, settings.max_queue_delay_ms)
        border = grpc_server.Border.of(settings, state)
        http = _http_server(border, health) if settings.http_address else None
        return cls(grpc_server.build(border, checks, inference), state, health, credentials, http, http_ready)

    def set_warm(self, pipeline: Pipeline) -> None:
        """Accept requests for a pipeline."""
        self.state.pipeline = pipeline
        self.health.set_warm(warm=True)

    async def wait(self, stop: grpc_server.Stop) -> None:
        """Wait until a stop is requested; stop at once if gRPC ends by itself, which only a new process repairs."""
        requested = asyncio.ensure_future(stop.requested.wait())
        # Without a timeout, the end of this wait would end gRPC's own future, too.
        ended = asyncio.ensure_future(self.grpc.wait_for_termination(threading.TIMEOUT_MAX))
        try:
            await asyncio.wait((requested, ended), return_when=asyncio.FIRST_COMPLETED)
            if not stop.requested.is_set():
                log.error("gRPC has ended by itself", exc_info=ended.exception())
                stop.stop_now.set()
        finally:
            requested.cancel()
            ended.cancel()

    async def drain(self, seconds: float, stop: grpc_server.Stop, port: int) -> None:
        """Turn the health to NOT_SERVING, and drain the server on this port; see `grpc_server.drain`."""

        def undelivered() -> int:
            ports = (port, *(self.http.ports if self.http else ()))
            unwritten = self.http.unwritten if self.http else 0
            return max(unwritten, sockets.undelivered(ports, self.state.drained))

        self.health.set_warm(warm=False)
        await grpc_server.drain(self.grpc, self.state, seconds, stop, undelivered)
        if self.http:
            await self.http.stop(0 if stop.stop_now.is_set() else grpc_server.QUIET_TIMEOUT)

    async def stop(self) -> None:
        """Close the ports and all connections, at once."""
        await self.grpc.stop(None)
        if self.http:
            await self.http.stop(0)

    async def open_ports(self, settings: Settings) -> int:
        """Listen on the addresses and answer health checks; return the port of gRPC.

        Raises:
            ConfigError: the server cannot listen on an address.
        """
        port = grpc_server.listen(self.grpc, settings.address, self.credentials)
        self.health.set_live()
        await self.grpc.start()
        log.info("gRPC", extra=logs.fields(address=_with_port(settings.address, port)))
        if self.http:
            listening = reserved_port.listen(settings.http_address, shared=settings.sharing > 1)
            await self.http.start(listening)
            self.http_ready(listening[0].getsockname()[1])
        return port


def _with_port(address: str, port: int) -> str:
    """Return an address with the port that was opened for it, which differs if the address names port 0."""
    host = address.rpartition(":")[0]
    return address if host == "unix" else f"{host}:{port}"


def _http_server(border: grpc_server.Border, health: grpc_server.Health) -> "HttpServer":
    from camserve_server.api.http.server import HttpServer  # noqa: PLC0415 -- only if HTTP is enabled

    return HttpServer(border, health)


@contextmanager
def _telemetry(server: _Server, settings: Settings, link: SupervisorLink | None) -> Iterator[None]:
    """Serve metrics and export traces inside the block, if they are enabled."""
    publish, state, health = link.publish if link else None, server.state, server.health
    with metrics_endpoint.open_telemetry(settings, lambda: _metrics_state(state, health), publish) as state.telemetry:
        yield


def _metrics_state(state: ServerState, health: grpc_server.Health) -> ServerSnapshot:
    """Return the current state of the server for the metrics; thread-safe."""
    pipeline = state.pipeline
    if pipeline is None:
        return ServerSnapshot(health.serving, state.active)
    models, stats = list(pipeline.models.items()), pipeline.batcher.stats
    return ServerSnapshot(
        health.serving,
        state.active,
        pipeline.batcher.admitted,
        pipeline.batcher.limit,
        stats.answered,
        stats.failed,
        [(name, model.version, isinstance(model, ModelInfo)) for name, model in models],
        pipeline.repository.engines(),
    )


async def serve_until_signal(settings: Settings, link: SupervisorLink | None = None) -> int:
    """Serve until SIGTERM or SIGINT, which a link passes on; a second signal ends the drain at once.

    The function exits the process instead of returning where a thread would keep it alive: one that still loads a
    model, or one in which a model hangs.

    Returns:
        The exit code: 0 after a clean stop; 1 if a second signal ended the drain or accepted calls were not answered.
    """
    stop, warm, tasks = grpc_server.Stop(), asyncio.Event(), list[asyncio.Task[None]]()
    process.allow_files(settings.max_connections)
    if settings.isolation == "process":  # batches run in other processes; this one holds photos and messages
        process.configure_allocator(process.SERVER_FREE_MEMORY)
    _handle_signals(stop, link)

    def ready(_port: int, _pipeline: Pipeline) -> None:
        process.freeze_objects()
        if settings.isolation == "process":
            heap = process.Heap(process.SERVER_FREE_MEMORY + process.HEAP_GROWTH)
            tasks.append(asyncio.create_task(_trim_regularly(heap)))
        warm.set()
        if link:
            link.send("serving")

    serving = asyncio.ensure_future(serve(settings, stop, ready, link=link))
    stopping, stop_now = asyncio.ensure_future(stop.requested.wait()), asyncio.ensure_future(stop.stop_now.wait())
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not (serving.done() or warm.is_set()):
        log.info("stopped before the models were loaded")
        os._exit(0)
    drain_timeout = settings.drain_seconds + 2 * grpc_server.QUIET_TIMEOUT
    await asyncio.wait((serving, stop_now), return_when=asyncio.FIRST_COMPLETED, timeout=drain_timeout)
    await asyncio.wait((serving,), timeout=grpc_server.QUIET_TIMEOUT)
    if not serving.done():
        os._exit(1)
    await serving
    if any(thread.name == LOADING_THREAD for thread in threading.enumerate()):
        os._exit(stop.code)  # the model is not needed any more
    return stop.code


def _handle_signals(stop: grpc_server.Stop, link: SupervisorLink | None) -> None:
    loop = asyncio.get_running_loop()
    if link:
        link.listen(loop, stop.handle_signal)
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.handle_signal)


async def _trim_regularly(heap: process.Heap) -> None:
    """Return freed memory whenever the process has grown too much."""
    while True:
        await asyncio.sleep(process.TRIM_INTERVAL)
        await asyncio.to_thread(heap.check)


@contextmanager
def serve_in_thread(settings: Settings, specs: Mapping[str, ModelSpec] | None = None) -> Iterator[str]:
    """Serve in a thread inside the block.

    Args:
        settings: settings of the server.
        specs: models by name, instead of those in the settings.

    Yields:
        The address, such as "127.0.0.1:41234".

    Raises:
        ConfigError: the server cannot start.
    """
    if settings.processes != 1:
        raise ConfigError("processes: only the command `camserve-server serve` starts several")
    started: Future[tuple[asyncio.AbstractEventLoop, grpc_server.Stop, int]] = Future()

    async def main() -> None:
        stop, loop = grpc_server.Stop(), asyncio.get_running_loop()
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
        yield _with_port(settings.address, port)
    finally:
        loop.call_soon_threadsafe(stop.requested.set)
        thread.join()
