"""Loading and dropping of models on all workers of a pool, and measuring of the memory that they take."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from camserve_server.core import logs
from camserve_server.core.errors import ConfigError, Internal
from camserve_server.models import ModelSpec
from camserve_server.models.values import Kind, ModelInfo
from camserve_server.scheduling import Batcher
from camserve_server.scheduling.threads import contained
from camserve_server.serving.pool_sizing import PoolSizing
from camserve_server.telemetry import TelemetrySink
from camserve_server.workers import WorkerProtocol

log = logging.getLogger(__name__)

LOADING_THREAD = "loading"  # name of the threads in which models are loaded

T = TypeVar("T")


class ModelLoader:
    """Loads models on every worker of a pool, and drops them.

    Args:
        workers: workers of the pool.
        sizing: devices of the workers, and sizes of their batches.
        batcher: batcher, which gets the memory limits of batches.
        telemetry: sink that each load is reported to, or None.
    """

    def __init__(
        self,
        workers: Sequence[WorkerProtocol],
        sizing: PoolSizing,
        batcher: Batcher,
        telemetry: TelemetrySink | None,
    ) -> None:
        self._workers, self._sizing, self._batcher = workers, sizing, batcher
        self.telemetry = telemetry
        self._lost_early: set[str] = set()  # keys of models that a worker lost before they were listed

    async def load(self, key: str, spec: ModelSpec) -> ModelInfo:
        """Load a model on every worker, and warm it up; on none if one worker cannot load it.

        Args:
            key: key of the model version, as rows will name it.
            spec: source and options of the model.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        with self._measure_seconds(spec.name):
            loads = (_run_in_thread(worker.load, key, spec) for worker in self._workers)
            outcomes = await asyncio.gather(*loads, return_exceptions=True)
            try:
                info = _merge_infos([_unwrap(outcome) for outcome in outcomes])
                row_bytes = await self._measure_row_bytes(key)
                await self._update_batch_bytes()
                self._check_not_lost(key, info)
            except Exception:
                await self.drop(key)
                raise
            self._batcher.learn(key, info, row_bytes)
            return info

    async def drop(self, key: str) -> None:
        """Drop a model that no row names any more, and free its memory."""
        self._batcher.forget(key)
        self._lost_early.discard(key)
        await asyncio.gather(*(_run_in_thread(worker.drop, key) for worker in self._workers))
        await self._update_batch_bytes()

    def fail_load(self, key: str) -> None:
        """Make the load of a model fail, because a worker has lost the model meanwhile."""
        self._lost_early.add(key)

    def _check_not_lost(self, key: str, info: ModelInfo) -> None:
        if key in self._lost_early:
            raise ConfigError(f"model {info.name}: a worker lost it while another one loaded it")

    async def _measure_row_bytes(self, key: str) -> Mapping[Kind, int]:
        """Return how much memory one input takes in each kind of pass, in bytes, on the GPU where it takes most."""
        row_bytes: dict[Kind, int] = {}
        for sizes in await self._measure_gpus(lambda worker: worker.row_bytes(key)):
            row_bytes |= {kind: max(size, row_bytes.get(kind, 0)) for kind, size in (sizes or {}).items()}
        if row_bytes:
            log.info("model %s was measured", key, extra=logs.fields(row_bytes=row_bytes))
        return row_bytes

    async def _update_batch_bytes(self) -> None:
        """Limit the batches of a GPU to the memory that its models leave."""
        free_bytes = await self._measure_gpus(lambda worker: worker.free_bytes())
        if batch_bytes := self._sizing.gpu_batch_bytes(free_bytes):
            log.info("a batch may take %d MiB", batch_bytes // 2**20)
            self._batcher.allow(batch_bytes)

    async def _measure_gpus(self, measure: Callable[[WorkerProtocol], T]) -> list[T | None]:
        """Measure the GPU of each worker; None for one that fails, and an empty list on a CPU."""
        if self._sizing.any_cpu:
            return []
        measurements = (_run_in_thread(measure, worker) for worker in self._workers)
        outcomes = await asyncio.gather(*measurements, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                log.warning("a worker did not measure its memory: %s", outcome)
        return [None if isinstance(outcome, BaseException) else outcome for outcome in outcomes]

    @contextmanager
    def _measure_seconds(self, model: str) -> Iterator[None]:
        """Report to telemetry how long a load took, and whether it succeeded."""
        clock, succeeded = asyncio.get_running_loop().time, False
        began = clock()
        try:
            yield
            succeeded = True
        finally:
            if self.telemetry:
                self.telemetry.model_loaded(model, clock() - began, succeeded=succeeded)


def _run_in_thread(function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    """Run a function in a thread that ends with it. The server does not wait for the thread when it stops.

    A thread of a pool would stay, and OpenMP keeps workers for every thread that ever computed. With more of them than
    cores, all sleep between two loops, also those of the thread that runs batches.
    """
    done = Future[T]()
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            done.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 -- passed on to the caller
            done.set_exception(contained(error))
        except BaseException:  # noqa: BLE001 -- a model's code may call sys.exit
            done.set_exception(Internal("the model tried to end the server"))

    threading.Thread(target=work, name=LOADING_THREAD, daemon=True).start()
    return asyncio.wrap_future(done)


def _unwrap(outcome: T | BaseException) -> T:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _merge_infos(infos: Sequence[ModelInfo]) -> ModelInfo:
    """Return one description of a model that is loaded on several devices, since any of them may answer."""
    if len({info.digest for info in infos}) > 1:
        raise ConfigError(f"model {infos[0].name} has other weights on each device: seed what makes them")
    return replace(infos[0], device=",".join(dict.fromkeys(info.device for info in infos)))
