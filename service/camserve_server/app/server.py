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
from typing import TypeAlias

from torch import nn

from camserve_server.api import auth, grpc_server, oip
from camserve_server.api.health import HealthServicer
from camserve_server.api.rpc import RPC_NAMES, ServerState
from camserve_server.app import metrics_endpoint
from camserve_server.core import logs, process
from camserve_server.core.config import Settings
from camserve_server.core.devices import device_of, devices_named
from camserve_server.core.errors import ConfigError
from camserve_server.core.hardware import cores
from camserve_server.methods import add_plugins
from camserve_server.models import ModelSpec, Source, of_network, parse
from camserve_server.models.values import ModelInfo
from camserve_server.scheduling.admission import FairThreads
from camserve_server.serving.explain import Pipeline
from camserve_server.serving.repository import Lifecycle
from camserve_server.serving.worker_pool import LOADING, Well, WorkerPool
from camserve_server.telemetry import State, TelemetrySink

log = logging.getLogger(__name__)


@asynccontextmanager
async def opened(
    settings: Settings,
    well: Well = lambda _well: None,
    told: TelemetrySink | None = None,
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
        async with WorkerPool(settings, well, told, watch=watch) as fleet:
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


Ready: TypeAlias = Callable[[int, Pipeline], None]
"""Told the port and the pipeline once the models are warm."""


async def serve(
    settings: Settings,
    stop: grpc_server.Stop,
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
    auth.check(settings)
    credentials = auth.credentials(settings)
    said = grpc_server.Health(checks)
    inference = oip.InferenceServicer(house, lambda: said.serving, settings.max_queue_delay_ms)
    server = grpc_server.build(settings, house, checks, inference)
    with metrics_endpoint.told(settings, lambda: _state(house, said)) as house.telemetry:
        port = grpc_server.listen(server, settings.address, credentials)
        said.live()
        await server.start()
        try:
            async with opened(settings, said.set_healthy, house.telemetry, specs) as pipeline:
                said.set_warm(warm=True)
                house.pipeline = pipeline
                log.info("serving", extra=logs.fields(port=port, models=",".join(pipeline.models)))
                ready(port, pipeline)
                await stop.asked.wait()
                said.set_warm(warm=False)
                await grpc_server.drain(server, house, settings.drain_seconds, stop)
        finally:
            await server.stop(None)


def _state(house: ServerState, said: grpc_server.Health) -> State:
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


async def serve_until_signal(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; a second one cuts the drain short.

    Does not return, but ends the process, where a thread could hold it up: one that still loads a model, or one in
    which a model hangs.

    Returns:
        The exit code: 0 after a clean stop; 1 if the stop was cut short or accepted calls were not answered.
    """
    stop, loop, warm = grpc_server.Stop(), asyncio.get_running_loop(), asyncio.Event()
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
    longest = settings.drain_seconds + 2 * grpc_server.LONGEST_QUIET
    await asyncio.wait((serving, hurry), return_when=asyncio.FIRST_COMPLETED, timeout=longest)
    await asyncio.wait((serving,), timeout=grpc_server.LONGEST_QUIET)
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
        host = settings.address.rpartition(":")[0]
        yield settings.address if host == "unix" else f"{host}:{port}"
    finally:
        loop.call_soon_threadsafe(stop.asked.set)
        thread.join()
