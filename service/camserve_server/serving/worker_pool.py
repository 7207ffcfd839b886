"""Worker pool: the workers of a server, the batcher that uses them, and their models.

A worker that dies or hangs is paused until a new process has taken its place and warmed up its models again. Without
any worker the pool is unhealthy. Requests wait meanwhile, but not forever.
"""

import asyncio
import sys
from contextlib import ExitStack
from functools import partial
from typing import Self

import torch

from camserve_server.core import torch_threads
from camserve_server.core.config import Settings
from camserve_server.core.device_names import parse_devices
from camserve_server.models import ModelSpec
from camserve_server.models.values import ModelInfo
from camserve_server.scheduling import Batcher
from camserve_server.serving.model_loading import ModelLoader
from camserve_server.serving.model_registry import Registry
from camserve_server.serving.pool_health import HealthListener, PoolHealth
from camserve_server.serving.pool_sizing import PoolSizing
from camserve_server.telemetry import TelemetrySink, WorkerSnapshot
from camserve_server.workers import InProcessWorker, Setup, Worker, WorkerProtocol


class WorkerPool:
    """Workers that share one batcher.

    Args:
        settings: settings of the server.
        on_health: callback for each change of the health.
        telemetry: sink for batches, loads and lost workers, or None.
        watch: True to send a canary request now and then while the pool is idle.

    Attributes:
        batcher: batcher that runs rows on the workers.
        registry: models of the server.
    """

    def __init__(
        self,
        settings: Settings,
        on_health: HealthListener = lambda _healthy: None,
        telemetry: TelemetrySink | None = None,
        *,
        watch: bool = True,
    ) -> None:
        self._settings, self._telemetry, self._sends_canaries = settings, telemetry, watch
        self._devices = tuple(parse_devices(settings.device))
        self._loop = asyncio.get_running_loop()
        self._blocks = ExitStack()
        self._dropping: set[asyncio.Task[None]] = set()
        sizing = PoolSizing(settings, self._devices)
        self._workers = [self._start_worker(index, sizing) for index in range(len(self._devices))]
        self.registry = Registry()
        self.batcher = Batcher(
            *(worker.run for worker in self._workers),
            max_batch_rows=sizing.max_rows,
            max_queue_rows=settings.max_queue_rows,
            max_delay=settings.max_queue_delay_ms / 1e3,
            partitioned=sizing.partitioned,
            streams=sizing.streams,
            max_batch_seconds=settings.max_batch_seconds,
        )
        self.batcher.allow(sizing.cpu_batch_bytes)
        self.batcher.telemetry = telemetry
        self._loader = ModelLoader(self._workers, sizing, self.batcher, telemetry)
        self._health = PoolHealth(
            self.batcher,
            self.registry,
            on_health,
            canary_timeout=2 * settings.max_batch_seconds,
            ready=range(len(self._workers)) if settings.isolation == "thread" else (),
        )

    def _start_worker(self, index: int, sizing: PoolSizing) -> WorkerProtocol:
        settings = self._settings
        setup = Setup(
            device=self._devices[index],
            threads=sizing.threads,
            shares_device=len(self._devices) > 1,
            log_level=settings.log_level,
            log_format=settings.log_format,
            path=tuple(sys.path),
            partitioned=sizing.partitioned,
            streams=sizing.streams,
            measure=bool(settings.metrics_address),
            max_rows=sizing.max_rows,
        )
        if self._telemetry:
            self._telemetry.worker_started(index, setup.device)
        if settings.isolation == "thread":
            return InProcessWorker(setup)
        on_loop = self._loop.call_soon_threadsafe  # a worker calls its listeners in its own threads
        return Worker(
            setup,
            batch_seconds=settings.max_batch_seconds,
            on_ready=partial(on_loop, self._on_worker_ready, index),
            on_exit=partial(on_loop, self._on_worker_exit, index),
            on_model_lost=lambda key: on_loop(self._on_model_lost, key),
        )

    async def __aenter__(self) -> Self:
        """Start to run batches and to watch the health; no model is loaded yet."""
        self._blocks.enter_context(torch_threads.restored())
        if self._settings.isolation == "process":
            torch.set_num_threads(1)  # this process does not compute
        await self.batcher.__aenter__()
        self._watcher = asyncio.create_task(self._health.watch(canaries=self._sends_canaries))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the workers; a batch that runs is finished."""
        self._watcher.cancel()
        self._health.close()
        self._telemetry = self._loader.telemetry = None
        await self.batcher.__aexit__()
        for worker in self._workers:
            await asyncio.to_thread(worker.close)
        self._blocks.close()

    async def load(self, key: str, spec: ModelSpec) -> ModelInfo:
        """Load a model on every worker; see `ModelLoader.load`."""
        return await self._loader.load(key, spec)

    async def drop(self, key: str) -> None:
        """Drop a model; see `ModelLoader.drop`."""
        await self._loader.drop(key)

    def engines(self) -> list[WorkerSnapshot]:
        """Return the current state of each worker; from any thread."""
        return [
            WorkerSnapshot(device, self._health.is_ready(index), worker.memory())
            for index, (device, worker) in enumerate(zip(self._devices, self._workers, strict=True))
        ]

    def _on_worker_ready(self, index: int) -> None:
        self._health.worker_ready(index)

    def _on_worker_exit(self, index: int) -> None:
        if self._telemetry:
            self._telemetry.worker_lost(index, self._devices[index])
        self._health.worker_lost(index)

    def _on_model_lost(self, key: str) -> None:
        """List a model as failed that a worker has lost; other workers drop it when its last request is answered."""
        model = self.registry.mark_failed(key)
        if model is None:
            self._loader.fail_load(key)
        else:
            self._dropping.add(task := asyncio.create_task(self._drop_when_unused(model)))
            task.add_done_callback(self._dropping.discard)
        self._health.update()

    async def _drop_when_unused(self, model: ModelInfo) -> None:
        await self.registry.wait_until_unused(model)
        await self.drop(model.key)
