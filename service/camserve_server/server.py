"""Wiring: settings in, a running server out; health, reflection, and a stop that loses nothing."""

import asyncio
import logging
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import grpc
import numpy as np
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from camserve.v1 import (
    evaluate_pb2,
    evaluate_pb2_grpc,
    explain_pb2,
    explain_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
)
from camserve_server import access, floods, logs, process
from camserve_server.batcher import Batcher
from camserve_server.config import Settings
from camserve_server.engine import Engine
from camserve_server.errors import ConfigError
from camserve_server.models import LoadedModel, ModelSpec, load, parse
from camserve_server.parsing import Parser
from camserve_server.pipeline import Pipeline
from camserve_server.servicer import EvaluateServicer, ExplainServicer, House, ModelServicer
from camserve_server.targets import anything
from camserve_server.types import MethodCall, ModelInfo, Pass, Row

log = logging.getLogger(__name__)

CPU_BATCH, GPU_BATCH = 8, 32
QUIET, LONGEST_QUIET = 0.1, 1.0  # seconds without a new call before a draining server closes its port

SERVICES = (
    "",
    explain_pb2.DESCRIPTOR.services_by_name["ExplainService"].full_name,
    evaluate_pb2.DESCRIPTOR.services_by_name["EvaluateService"].full_name,
    models_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
)
"""What has a health of its own; the empty name is the server as a whole."""


@dataclass(slots=True)
class Stop:
    """How a running server is told to stop.

    Attributes:
        asked: finish what was accepted, then stop.
        hurry: stop at once.
    """

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)

    def signalled(self) -> None:
        """Take a signal: the first asks, the second hurries."""
        (self.hurry if self.asked.is_set() else self.asked).set()


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Pipeline]:
    """Load the models, warm them up, and hold a pipeline open inside the block.

    Raises:
        ConfigError: a model cannot be loaded.
    """
    threads = settings.threads or cores()
    devices = devices_named(settings.device)
    # In a thread that ends then: OpenMP keeps workers for every thread that ever computed, and with more of them than
    # cores it lets all sleep between two loops, the engine's too.
    with ThreadPoolExecutor(1, thread_name_prefix="loading") as loading:
        engines, infos = await asyncio.get_running_loop().run_in_executor(loading, _load, settings, devices, threads)
    on_gpu = devices[0] != "cpu"
    batcher = Batcher(
        *(engine.run for engine in engines),
        max_batch_rows=settings.max_batch_rows or (GPU_BATCH if on_gpu else CPU_BATCH),
        max_queue_rows=settings.max_queue_rows,
        max_delay=settings.max_queue_delay_ms / 1e3,
    )
    with ThreadPoolExecutor(threads, thread_name_prefix="image") as pool:
        async with batcher:
            yield Pipeline(infos, batcher, pool, settings.limits)


def cores() -> int:
    """Return how many cores this process may use: a container's share counts, not the host's."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max" for no limit
        return allowed


def _load(settings: Settings, devices: Sequence[str], threads: int) -> tuple[list[Engine], dict[str, ModelInfo]]:
    """Load the models, make an engine for each device, and warm them up."""
    torch.set_num_threads(max(1, threads // max(1, devices.count("cpu"))))
    models: dict[str, list[LoadedModel]] = {}
    for name, spec in named(settings.models).items():
        model = load(spec, devices[0])
        models[name] = [model, *(model.copied(device) for device in devices[1:])]
    engines = [
        Engine({name: copies[place] for name, copies in models.items()}, beside=len(devices) > 1)
        for place in range(len(devices))
    ]
    for name, (model, *_) in models.items():
        for engine in engines:
            _warm_up(engine, model.info)
        log.info("model %s is warm", name, extra=logs.fields(source=model.info.source, layer=model.info.default_layer))
    # What is told of a model holds for all of its copies; which of them will answer is not known before.
    place = ",".join(dict.fromkeys(devices))
    return engines, {name: replace(model.info, device=place) for name, (model, *_) in models.items()}


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


def devices_named(names: str) -> list[str]:
    """Return the devices that a setting means, one for each engine.

    Raises:
        ConfigError: one is not there.
    """
    if names == "auto":
        return ["cuda:0" if torch.cuda.is_available() else "cpu"]
    return [device for name in names.split(",") for device in _devices_of(name.strip())]


def _devices_of(name: str) -> list[str]:
    there = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigError(f'device "{name}": there are cpu, cuda, cuda:N and auto, or some of them with commas between')
    if name != "cpu" and (name not in there if ":" in name else not there):
        raise ConfigError(f'device "{name}": torch sees {len(there)} CUDA devices here')
    return there if name == "cuda" else [name]


def _warm_up(engine: Engine, info: ModelInfo) -> None:
    """Run one row of each kind, so that the first request does not pay for what is made on first use."""
    image = np.full((*info.preprocess.size, 3), 128, np.uint8)
    for name, pass_ in (
        ("gradcam", Pass(info.name, "cam", info.preprocess.size, (info.default_layer,))),
        ("saliency", Pass(info.name, "saliency", info.preprocess.size)),
    ):
        engine.run(pass_, [Row(image, anything(info), (MethodCall(name),))])


Ready: TypeAlias = Callable[[int, Pipeline], None]
"""Told the port and the pipeline once the models are warm."""


async def serve(settings: Settings, stop: Stop, ready: Ready = lambda _port, _pipeline: None) -> None:
    """Serve until told to stop.

    The port is open from the start, with a health of NOT_SERVING until the models are warm. Told to stop, the server
    turns NOT_SERVING, refuses what is new, finishes what it accepted, and returns.

    Args:
        settings: of this server.
        stop: tells it to stop.
        ready: called once the models are warm.

    Raises:
        ConfigError: the address cannot be listened on, or should not be as the settings are; a file of certificates or
            tokens is no good; or a model cannot be loaded.
    """
    house = House(settings.stream_in_flight, settings.idle_seconds)
    checks = health.aio.HealthServicer()
    access.check(settings)
    credentials = access.credentials(settings)
    server = _build(settings, house, checks)
    port = _listen(server, settings.address, credentials)
    await _set_health(checks, health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.start()
    try:
        async with opened(settings) as pipeline:
            await _set_health(checks, health_pb2.HealthCheckResponse.SERVING)
            house.pipeline = pipeline
            log.info("serving", extra=logs.fields(port=port, models=",".join(pipeline.models)))
            ready(port, pipeline)
            await stop.asked.wait()
            await _drain(server, house, checks, settings.drain_seconds, stop)
    finally:
        await server.stop(None)


async def _drain(
    server: grpc.aio.Server, house: House, checks: health.aio.HealthServicer, seconds: float, stop: Stop
) -> None:
    log.info("draining", extra=logs.fields(seconds=seconds))
    await _set_health(checks, health_pb2.HealthCheckResponse.NOT_SERVING)
    house.draining.set()
    finishing = asyncio.ensure_future(_finished(house, seconds))
    hurrying = asyncio.ensure_future(stop.hurry.wait())
    await asyncio.wait((finishing, hurrying), return_when=asyncio.FIRST_COMPLETED)
    if stop.hurry.is_set():
        log.warning("cut short by a second signal")
    for task in (finishing, hurrying):
        task.cancel()
    await server.stop(None if stop.hurry.is_set() else LONGEST_QUIET)  # health watches would stay for ever
    log.info("stopped")


async def _finished(house: House, seconds: float) -> None:
    """Return when every accepted call is answered, and no new one came to be refused for a while.

    gRPC itself would cancel a call that it has received but not yet handed over at the moment it stops. So the calls
    that still come are refused as Unavailable first, until their callers have noticed.
    """
    clock = asyncio.get_running_loop().time
    late = clock() + seconds
    while house.active and clock() < late:  # noqa: ASYNC110 -- once in a life, not worth an event on every call
        await asyncio.sleep(0.01)
    late = min(late, clock() + LONGEST_QUIET)
    while clock() < min(late, house.arrived + QUIET):  # noqa: ASYNC110 -- as above
        await asyncio.sleep(0.01)


def _build(settings: Settings, house: House, checks: health.aio.HealthServicer) -> grpc.aio.Server:
    size = settings.max_message_mib * 2**20
    server = grpc.aio.server(
        interceptors=_at_the_door(settings, house),
        options=(
            ("grpc.max_receive_message_length", size),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # two servers on one port is a mistake, not a cluster
            *floods.options(settings),
        ),
    )
    explain_pb2_grpc.add_ExplainServiceServicer_to_server(ExplainServicer(house), server)
    evaluate_pb2_grpc.add_EvaluateServiceServicer_to_server(EvaluateServicer(house), server)
    models_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(house), server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((*SERVICES[1:], health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server


def _at_the_door(settings: Settings, house: House) -> tuple[grpc.aio.ServerInterceptor, ...]:
    inner = floods.Patience(settings.idle_seconds, house), Parser(house)
    return (access.Guard(settings.tokens_file, house), *inner) if settings.tokens_file else inner


def _listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        return server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: is the port taken, or the host unknown?") from error


async def _set_health(checks: health.aio.HealthServicer, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
    for service in SERVICES:
        await checks.set(service, status)


async def serve_until_signal(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; a second one cuts the drain short.

    Does not return, but ends the process, where a thread could hold it up: one that still loads a model, or one in
    which a model hangs.

    Returns:
        The exit code: 0 after a clean stop, 1 after one cut short.
    """
    stop, loop, warm = Stop(), asyncio.get_running_loop(), asyncio.Event()
    process.allow_files(settings.max_connections)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.signalled)

    def ready(_port: int, _pipeline: Pipeline) -> None:
        process.keep_objects()
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
    return int(stop.hurry.is_set())


@contextmanager
def serve_in_thread(settings: Settings) -> Iterator[str]:
    """Serve in a thread inside the block.

    Yields:
        The address, such as "127.0.0.1:41234".

    Raises:
        ConfigError: the server cannot start.
    """
    started: Future[tuple[asyncio.AbstractEventLoop, Stop, int]] = Future()

    async def main() -> None:
        stop, loop = Stop(), asyncio.get_running_loop()
        await serve(settings, stop, lambda port, _pipeline: started.set_result((loop, stop, port)))

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
