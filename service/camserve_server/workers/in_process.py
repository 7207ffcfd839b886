"""Worker in this process: for embedded use, and inside a worker process."""

import gc
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from camserve_server.core import logs, process
from camserve_server.core.devices import Device, device_for
from camserve_server.core.errors import OutOfMemory, Unavailable
from camserve_server.core.spinning import SpinLimiter
from camserve_server.engine import Engine
from camserve_server.engine.values import Partition, Row, RowResult
from camserve_server.jobs.footprint import typical
from camserve_server.methods import add_plugins
from camserve_server.models import LoadedModel, load
from camserve_server.models.spec import ModelSpec
from camserve_server.models.values import Kind, ModelInfo, Pass
from camserve_server.telemetry import Memory
from camserve_server.workers import sizing
from camserve_server.workers.messages import Setup
from camserve_server.workers.sizing import rows_of
from camserve_server.workers.warmup import warm_up, warm_up_all_sizes

log = logging.getLogger(__name__)

LARGE_KINDS = frozenset({"bias", "curvature"})
"""Kinds of pass that take much memory: memory freed by earlier batches is given back to the system before them."""

_LOADING = threading.Lock()
"""Lock to load one model at a time, since random weights come from a generator that the whole process shares."""


class _Lane:
    """Runs one batch at a time: on a CPU in the caller's thread, on a GPU in one persistent thread.

    cuDNN's plans (`thread_local` in ATen's Conv_v8.cpp) and cuBLAS's handles belong to the thread that made them. A new
    thread for each batch would make them anew, and a model that was warmed up in another thread would be cold.

    Args:
        engine: engine that computes.
        device: device that it computes on.

    Attributes:
        turn: lock that is held while a batch runs.
    """

    def __init__(self, engine: Engine, device: Device) -> None:
        self.turn = threading.Lock()
        self.engine = engine
        self._thread = None if device.is_cpu else ThreadPoolExecutor(1, "stream", device.make_current)

    def run(self, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
        """Run one batch; see `Engine.run`."""
        if self._thread is None:
            return self.engine.run(pass_, rows)
        return self._thread.submit(self.engine.run, pass_, rows).result()

    def close(self) -> None:
        """End the thread after the batch that it runs."""
        if self._thread:
            self._thread.shutdown(wait=False)


class InProcessWorker:
    """Worker in this process.

    Each thread makes the worker's device its current one before it computes. Otherwise torch would also take memory of
    the first GPU, which is every thread's current device at first.

    Args:
        setup: configuration of the worker.

    Raises:
        RuntimeError: the device does not compute.
    """

    def __init__(self, setup: Setup) -> None:
        add_plugins()
        self._setup, self._device = setup, device_for(setup.device)
        self._device.initialize()
        self._spin_limiter = SpinLimiter(setup.threads if self._device.is_cpu else 1)
        self._models: dict[str, LoadedModel] = {}
        self._replicas: dict[str, LoadedModel] = {}
        self._lanes = self._make_lane(self._models), self._make_lane(self._replicas)

    def _make_lane(self, models: dict[str, LoadedModel]) -> _Lane:
        setup = self._setup
        engine = Engine(models, device=setup.device, shares_device=setup.shares_device or setup.streams)
        return _Lane(engine, self._device)

    def load(self, name: str, spec: ModelSpec) -> ModelInfo:
        """Load a model and warm it up; see `WorkerProtocol.load`."""
        self._device.make_current()
        with self._spin_limiter.watch(), _LOADING:
            torch.set_num_threads(self._setup.threads)
            model = self._add_warm(name, load(spec, self._setup.device, rows=self._setup.max_rows))
            if (self._setup.partitioned or self._setup.streams) and (replica := model.replica()):
                self._add_replica(name, replica)
        fields = logs.fields(source=model.info.source, layer=model.info.default_layer, device=self._setup.device)
        log.info("model %s is warm", name, extra=fields)
        return model.info

    def _add_warm(self, name: str, model: LoadedModel) -> LoadedModel:
        """Add a model and warm it up; without its accelerated copy if that fails.

        Raises:
            Exception: any error of the model itself.
        """
        try:
            self._add(0, name, model)
        except Exception as error:
            if model.accelerated is None:
                raise
            reason = f"{type(error).__name__}: {error}"
        else:
            return model
        model = replace(model, accelerated=None)
        self._add(0, name, model)
        message = "model %s runs without its accelerated copy, which failed to warm up (%s)"
        log.warning(message, model.info.name, reason)
        return model

    def _add_replica(self, name: str, replica: LoadedModel) -> None:
        """Add a model's replica, if it can be warmed up."""
        try:
            self._add(1, name, replica)
        except Exception as error:  # noqa: BLE001 -- any error of a user's module; batches then run one at a time
            reason = f"{type(error).__name__}: {error}"
            message = "model %s runs one batch at a time: its replica failed to warm up (%s)"
            log.warning(message, replica.info.name, reason)

    def _add(self, index: int, name: str, model: LoadedModel) -> None:
        """Add a model, or its replica, and warm it up in the lane that will run it."""
        models, run = (self._models, self._replicas)[index], partial(self._run_in, self._lanes[index])
        models[name] = model
        self._device.synchronize()  # the weights are copied in another stream than those of the lanes
        try:
            if self._device.is_cpu:
                warm_up(run, name, model.info)  # batches of other models run meanwhile
            else:
                warm_up_all_sizes(run, name, model.info, self._setup.max_rows)
        except BaseException:  # a model may call sys.exit
            models.pop(name, None)
            raise

    def warm(self, name: str) -> Sequence[RowResult]:
        """Run two batches of a model in the calling thread, and return the results of the second.

        On a GPU nothing runs: its lanes have threads of their own.
        """
        results: Sequence[RowResult] = ()
        for _ in range(2 if self._device.is_cpu else 0):  # with one, the first request took 62 ms, with two 51
            info = self._models[name].info
            results = self.run(typical(info, info.usual_pass, name), rows_of(info, info.usual_pass, 1))
        return results

    def drop(self, name: str) -> None:
        """Drop a model; see `WorkerProtocol.drop`."""
        self._device.make_current()
        dropped = [models.pop(name, None) for models in (self._replicas, self._models)]
        modules = [weakref.ref(model.module) for model in dropped if model]
        del dropped
        gc.collect()
        if any(module() is not None for module in modules):
            # A cycle of frozen objects, which the collector skips, keeps it alive. A full collection takes 0.5 s.
            gc.unfreeze()
            process.freeze_objects()
        self._device.release_memory()
        process.release_free_memory()

    def run(self, pass_: Pass, rows: Sequence[Row], partition: Partition | None = None) -> list[RowResult]:
        """Run one batch; see `WorkerProtocol.run`."""
        self._device.make_current()
        if pass_.model not in self._models:
            message = f"the model {pass_.model} was lost: it could not be loaded again"
            raise Unavailable(message, retry_after=5.0, shed_reason="model_failed")
        replica = pass_.model in self._replicas
        # A randomised pass exchanges parameters, so it runs on the replica. The accelerated copies of both compute with
        # the parameters of the model itself, which must not change.
        index = 1 if replica and (partition or pass_.randomised) else 0
        threads = self._setup.threads
        if replica and partition is not None:
            threads = max(1, (threads + 1 - partition) // 2)
        lane = self._lanes[index]
        with lane.turn, self._spin_limiter.watch():
            if self._device.is_cpu and pass_.kind in LARGE_KINDS:
                process.release_free_memory()
            self._set_threads(threads)
            return self._run_in(lane, pass_, rows)

    def _run_in(self, lane: _Lane, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
        try:
            return lane.run(pass_, rows)
        except OutOfMemory:
            self._release_memory()
            raise

    def _set_threads(self, threads: int) -> None:
        """Set how many threads torch computes with in the current thread."""
        if self._setup.partitioned and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    def _release_memory(self) -> None:
        """Free the memory of a batch that ran out of it, since the next try may need it in another stream."""
        gc.collect()
        self._device.release_memory()

    def row_bytes(self, name: str) -> Mapping[Kind, int]:
        """Measure how many bytes one input of a model takes; see `WorkerProtocol.row_bytes`."""
        self._device.make_current()
        if not self._device.free_memory():
            return {}  # such a device does not report the memory of a batch either
        return sizing.row_bytes(self._models[name].info, name, self._peak)

    def _peak(self, pass_: Pass, rows: Sequence[Row]) -> int:
        first, second = self._lanes
        with _LOADING, first.turn, second.turn:
            return self._device.peak_of(lambda: first.run(pass_, rows))

    def free_bytes(self) -> int:
        """Return how many bytes batches can take together; see `WorkerProtocol.free_bytes`."""
        self._device.make_current()
        first, second = self._lanes
        with first.turn, second.turn:
            self._device.release_memory()
            return self._device.free_memory()

    def memory(self) -> Memory:
        """Return how much memory the worker uses; see `WorkerProtocol.memory`."""
        return Memory(process.resident(), *(self._device.memory() or ()))

    def close(self) -> None:
        """Drop all models, end the threads of the lanes, and let OpenMP's threads spin again."""
        self._spin_limiter.close()
        self._models.clear()
        self._replicas.clear()
        for lane in self._lanes:
            lane.close()
