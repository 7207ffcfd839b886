"""The engines of a server and their models: made, watched, and let go.

An engine that dies or hangs is paused, and with the last of them the server is not well, until another has taken its
place and its models are warm again. What waits meanwhile goes on waiting, but not for ever.
"""

import asyncio
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Self, TypeVar

import numpy as np
import torch

from camserve_server.core import logs
from camserve_server.core.config import Settings
from camserve_server.core.devices import device_of, devices_named
from camserve_server.core.errors import ConfigError, Internal
from camserve_server.core.hardware import cores, memory_limit
from camserve_server.engine.values import Row, RowResult
from camserve_server.methods.values import MethodCall
from camserve_server.models import ModelSpec
from camserve_server.models.values import Kind, ModelInfo, Pass
from camserve_server.scheduling import Batcher
from camserve_server.scheduling.threads import contained
from camserve_server.serving.model_registry import Registry
from camserve_server.targets import anything
from camserve_server.telemetry import Engine, TelemetrySink
from camserve_server.workers import InProcessWorker, Setup, Worker, WorkerProtocol

log = logging.getLogger(__name__)

CPU_BATCH = 8
GPU_BATCH = 64  # as many as one request may have under way (`Limits.chunk`)
GPU_SHARE = 0.8  # of a GPU's free memory, batches get so much; the rest is lost between the blocks of torch's allocator
LIMIT_SHARE = 6  # batches get 1 / LIMIT_SHARE of all memory; the libraries and the model take more than half of it
RECOVERY_TIMEOUT = 30.0  # seconds that callers wait for an engine to come back, before they are refused at once
CANARY = 10.0  # seconds between two looks whether an explanation comes out
FAILURE_THRESHOLD = 2  # canaries that fail, one after the other, before the server is not well

LOADING = "loading"  # name of the threads in which models are loaded

T = TypeVar("T")

Well = Callable[[bool], object]
"""Told on the event loop whether explanations can be had."""


class WorkerPool:
    """Engines behind one batcher.

    Args:
        settings: of the server.
        well: told when explanations can no longer be had, and when they can again.
        told: who hears of batches, models and engines, if somebody does.
        watch: whether an idle engine explains an image now and then.
    """

    def __init__(
        self,
        settings: Settings,
        well: Well = lambda _well: None,
        told: TelemetrySink | None = None,
        *,
        watch: bool = True,
    ) -> None:
        self._devices = devices = devices_named(settings.device)
        self._hears, self._watches = told, watch
        self._settings = settings
        self._well = well
        self._loop = asyncio.get_running_loop()
        self._up: set[int] = set()
        self._failures = 0
        self._lost_early: set[str] = set()  # before they were among the models
        self._dropping: set[asyncio.Task[None]] = set()
        self._told = True
        self._giving_up: asyncio.TimerHandle | None = None
        self._engines = [self._made(place, devices) for place in range(len(devices))]
        self.registry = Registry()
        self.batcher = Batcher(
            *(engine.run for engine in self._engines),
            max_batch_rows=self._max_rows(devices),
            max_queue_rows=settings.max_queue_rows,
            max_delay=settings.max_queue_delay_ms / 1e3,
            partitioned=self._partitioned(devices),
            streams=self._streams(devices),
            max_batch_seconds=settings.max_batch_seconds,
        )
        self.batcher.allow(self._batch_bytes(devices))
        self.batcher.telemetry = told

    def _made(self, place: int, devices: Sequence[str]) -> WorkerProtocol:
        settings = self._settings
        setup = Setup(
            device=devices[place],
            threads=self._threads(devices),
            shares_device=len(devices) > 1,
            log_level=settings.log_level,
            log_format=settings.log_format,
            path=tuple(sys.path),
            partitioned=self._partitioned(devices),
            streams=self._streams(devices),
            measure=bool(settings.metrics_address),
            max_rows=self._max_rows(devices),
        )
        if self._hears:
            self._hears.begun(place, setup.device)
        if settings.isolation == "thread":
            self._up.add(place)
            return InProcessWorker(setup)
        come, go = (partial(self._loop.call_soon_threadsafe, told, place) for told in (self._came, self._went))
        return Worker(setup, batch_seconds=settings.max_batch_seconds, up=come, down=go, lost=self._hear_of_loss)

    def _max_rows(self, devices: Sequence[str]) -> int:
        """Return how many rows a batch may have."""
        return self._settings.max_batch_rows or (CPU_BATCH if _any_cpu(devices) else GPU_BATCH)

    def _threads(self, devices: Sequence[str]) -> int:
        """Return how many threads each engine computes with."""
        return max(1, (self._settings.threads or cores()) // max(1, devices.count("cpu")))

    def _batch_bytes(self, devices: Sequence[str]) -> int:
        """Return how much memory a batch may take on a CPU; 0 on a GPU, which is asked once it has a model."""
        if not _any_cpu(devices):
            return 0
        room = min(self._settings.max_batch_mib * 2**20, memory_limit() // LIMIT_SHARE)
        return room // (len(devices) * (2 if self._partitioned(devices) else 1))

    def _partitioned(self, devices: Sequence[str]) -> bool:
        """Tell whether an engine can run two batches at once: in a process of its own it knows its threads."""
        return self._settings.isolation == "process" and _all_cpus(devices) and self._threads(devices) > 1

    @staticmethod
    def _streams(devices: Sequence[str]) -> bool:
        """Tell whether an engine can be sent a second batch while it runs the first, as a GPU of each can."""
        return all(device_of(name).has_streams for name in devices)

    async def __aenter__(self) -> Self:
        """Begin to run batches, and to watch; there is no model yet."""
        if self._settings.isolation == "process":
            torch.set_num_threads(1)  # what computes is elsewhere
        await self.batcher.__aenter__()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let everything go; a batch that runs is finished."""
        self._watching.cancel()
        if self._giving_up:
            self._giving_up.cancel()
        self._well, self._hears = (lambda _well: None), None
        await self.batcher.__aexit__()
        for engine in self._engines:
            await asyncio.to_thread(engine.close)

    async def load(self, key: str, spec: ModelSpec) -> ModelInfo:
        """Load a model on every engine, and warm it up; on none if it cannot be loaded on one.

        Args:
            key: by which rows shall mean it.
            spec: which one.

        Raises:
            ConfigError: it cannot be loaded.
        """
        with self._timed(spec.name):
            loading = (_in_a_thread(engine.load, key, spec) for engine in self._engines)
            found = await asyncio.gather(*loading, return_exceptions=True)
            try:
                info = _together([_sound(one) for one in found])
                row_bytes = await self._row_bytes(key)
                await self._allow_batches()
                self._kept(key, info)
            except Exception:
                await self.drop(key)
                raise
            self.batcher.learn(key, info, row_bytes)
            return info

    async def _row_bytes(self, key: str) -> Mapping[Kind, int]:
        """Return how much memory one input of a model takes in each kind of pass, on the GPU where it takes most."""
        found: dict[Kind, int] = {}
        for sizes in await self._measured(lambda engine: engine.row_bytes(key)):
            found |= {kind: max(size, found.get(kind, 0)) for kind, size in (sizes or {}).items()}
        if found:
            log.info("model %s was measured", key, extra=logs.fields(row_bytes=found))
        return found

    async def _allow_batches(self) -> None:
        """Let the batches of a GPU share the memory that its models leave; of several the one with the least counts."""
        free = await self._measured(lambda engine: engine.free_bytes())
        each = [(size or 0) // self._devices.count(name) for size, name in zip(free, self._devices, strict=False)]
        if least := min(filter(None, each), default=0):
            batch_bytes = int(GPU_SHARE * least) // (2 if self._streams(self._devices) else 1)
            log.info("a batch may take %d MiB", batch_bytes // 2**20)
            self.batcher.allow(batch_bytes)

    async def _measured(self, measure: Callable[[WorkerProtocol], T]) -> list[T | None]:
        """Have each engine measure its GPU; None of one that cannot. On a CPU nothing is measured."""
        if _any_cpu(self._devices):
            return []
        asked = (_in_a_thread(measure, engine) for engine in self._engines)
        found = await asyncio.gather(*asked, return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException):
                log.warning("an engine did not measure its memory: %s", error)
        return [None if isinstance(one, BaseException) else one for one in found]

    def _kept(self, key: str, info: ModelInfo) -> None:
        if key in self._lost_early:
            raise ConfigError(f"model {info.name}: an engine lost it while another one loaded it")

    @contextmanager
    def _timed(self, model: str) -> Iterator[None]:
        """Tell whoever wants to hear of it how long loading a model took, and whether it went well."""
        began, well = self._loop.time(), False
        try:
            yield
            well = True
        finally:
            if self._hears:
                self._hears.loaded(model, self._loop.time() - began, well=well)

    def engines(self) -> list[Engine]:
        """Return what can be said of each engine now; from any thread."""
        return [
            Engine(device, place in self._up, engine.memory())
            for place, (device, engine) in enumerate(zip(self._devices, self._engines, strict=True))
        ]

    async def drop(self, key: str) -> None:
        """Forget a model that no row means any more, and give its memory back."""
        self.batcher.forget(key)
        self._lost_early.discard(key)
        await asyncio.gather(*(_in_a_thread(engine.drop, key) for engine in self._engines))
        await self._allow_batches()

    def _came(self, place: int) -> None:
        """Let an engine run batches."""
        self._up.add(place)
        self.batcher.resume(place)
        if self._giving_up:
            self._giving_up.cancel()
        self._tell()

    def _went(self, place: int) -> None:
        """Let an engine run no more; after the last of them callers wait for one, but not for ever."""
        self._up.discard(place)
        self.batcher.pause(place)
        if self._hears:
            self._hears.lost(place, self._devices[place])
        if not self._up:
            why = "there is no engine: it was lost, and could not be started again yet"
            self._giving_up = self._loop.call_later(RECOVERY_TIMEOUT, self.batcher.fail_pending, why)
        self._tell()

    def _hear_of_loss(self, key: str) -> None:
        self._loop.call_soon_threadsafe(self._lost, key)

    def _lost(self, key: str) -> None:
        """List a model as failed that an engine no longer has; others let it go when its last request is answered."""
        model = self.registry.lose(key)
        if model is None:
            self._lost_early.add(key)
        else:
            self._dropping.add(task := asyncio.create_task(self._dropped(model)))
            task.add_done_callback(self._dropping.discard)
        self._tell()

    async def _dropped(self, model: ModelInfo) -> None:
        await self.registry.let_go(model)
        await self.drop(model.key)

    def _tell(self) -> None:
        well = bool(self._up) and self._failures < FAILURE_THRESHOLD and not self.registry.is_bereft()
        if well != self._told:
            self._told = well
            self._well(well)

    async def _watch(self) -> None:
        """Now and then, where no row was answered meanwhile, explain one."""
        answered = -1
        while True:
            await asyncio.sleep(CANARY)
            if self._watches and self.registry.first() and self._up and self.batcher.stats.answered == answered:
                self._failures = 0 if await self._canary_succeeds() else self._failures + 1
            self._tell()
            answered = self.batcher.stats.answered

    async def _canary_succeeds(self) -> bool:
        """Return whether an explanation comes out of the first model that answers."""
        info, found = self.registry.first(), list[RowResult]()
        if info is None:
            return True
        image = np.full((*info.preprocess.size, 3), 128, np.uint8)
        pass_ = Pass(info.key, "cam", info.preprocess.size, (info.default_layer,))
        row = Row(image, anything(info), (MethodCall("gradcam"),))
        try:
            with self.registry.held(info):
                async with asyncio.timeout(2 * self._settings.max_batch_seconds):
                    await self.batcher.submit(pass_, [row], lambda _, result: found.append(result))
        except Exception as error:  # noqa: BLE001 -- whatever the model raises
            log.warning("a canary failed: %s", str(error) or type(error).__name__)
            return False
        if not math.isfinite(found[0].score):
            log.warning("a canary failed: its score is not finite")
            return False
        return True


def _any_cpu(devices: Sequence[str]) -> bool:
    return any(device_of(name).is_cpu for name in devices)


def _all_cpus(devices: Sequence[str]) -> bool:
    return all(device_of(name).is_cpu for name in devices)


def _in_a_thread(function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    """Run something in a thread that ends then, and that nobody waits for when the server stops.

    OpenMP keeps workers for every thread that ever computed, and with more of them than cores it lets all sleep between
    two loops, the engine's too.
    """
    done = Future[T]()
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            done.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 -- whoever waits for it takes it
            done.set_exception(contained(error))
        except BaseException:  # noqa: BLE001 -- a model may call sys.exit as it is made
            done.set_exception(Internal("the model tried to end the server"))

    threading.Thread(target=work, name=LOADING, daemon=True).start()
    return asyncio.wrap_future(done)


def _sound(found: T | BaseException) -> T:
    if isinstance(found, BaseException):
        raise found
    return found


def _together(infos: Sequence[ModelInfo]) -> ModelInfo:
    """Return what is known of one model on several devices; which of them will answer is not known before."""
    if len({info.digest for info in infos}) > 1:
        raise ConfigError(f"model {infos[0].name} has other weights on each device: seed what makes them")
    return replace(infos[0], device=",".join(dict.fromkeys(info.device for info in infos)))
