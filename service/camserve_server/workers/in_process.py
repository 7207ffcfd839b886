"""An engine in this process: for embedded use, and inside of a worker."""

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
from camserve_server.core.devices import Device, device_of
from camserve_server.core.errors import OutOfMemory, Unavailable
from camserve_server.engine import Engine
from camserve_server.engine.values import Partition, Row, RowResult
from camserve_server.methods import add_plugins
from camserve_server.models import LoadedModel, load
from camserve_server.models.spec import ModelSpec
from camserve_server.models.values import Kind, ModelInfo, Pass
from camserve_server.telemetry import Memory
from camserve_server.workers import sizing
from camserve_server.workers.messages import Setup
from camserve_server.workers.warmup import warm_up, warm_up_all_sizes

log = logging.getLogger(__name__)

LARGE = frozenset({"bias", "curvature"})
"""Kinds of pass whose batches take so much memory that what earlier ones have left is given back before."""

_LOADING = threading.Lock()
"""One model after another: random weights come from a generator that the whole process has in common."""


class _Lane:
    """Runs one batch at a time: on a CPU in the caller's thread, on a GPU in one thread that stays.

    cuDNN's plans (`thread_local` in ATen's Conv_v8.cpp) and cuBLAS's handles belong to the thread that made them. So a
    new thread for each batch would make them for each batch, and a model that was warmed up elsewhere would be cold.

    Args:
        engine: that computes.
        device: that it computes on.

    Attributes:
        turn: held while a batch runs.
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
        """Let the thread end, after what it runs."""
        if self._thread:
            self._thread.shutdown(wait=False)


class InProcessWorker:
    """An engine in this process.

    Each thread makes the engine's device its current one before it computes. Otherwise torch would also take memory of
    the first GPU, which is every thread's current device at first.

    Args:
        setup: of the engine.

    Raises:
        RuntimeError: the device does not compute.
    """

    def __init__(self, setup: Setup) -> None:
        add_plugins()
        self._setup, self._device = setup, device_of(setup.device)
        self._device.initialize()
        self._models: dict[str, LoadedModel] = {}
        self._replicas: dict[str, LoadedModel] = {}
        self._lanes = self._lane_of(self._models), self._lane_of(self._replicas)

    def _lane_of(self, models: dict[str, LoadedModel]) -> _Lane:
        setup = self._setup
        engine = Engine(models, device=setup.device, shares_device=setup.shares_device or setup.streams)
        return _Lane(engine, self._device)

    def load(self, name: str, spec: ModelSpec) -> ModelInfo:
        """Load a model and warm it up; see `WorkerProtocol.load`."""
        self._device.make_current()
        with _LOADING:
            torch.set_num_threads(self._setup.threads)
            model = self._warmed(name, load(spec, self._setup.device, rows=self._setup.max_rows))
            if (self._setup.partitioned or self._setup.streams) and (replica := model.replica()):
                self._add_replica(name, replica)
        fields = logs.fields(source=model.info.source, layer=model.info.default_layer, device=self._setup.device)
        log.info("model %s is warm", name, extra=fields)
        return model.info

    def _warmed(self, name: str, model: LoadedModel) -> LoadedModel:
        """Add a model and warm it up, without its accelerated copy if that fails.

        Raises:
            Exception: whatever the model itself raises.
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
        words = "model %s runs without its accelerated copy, which failed to warm up (%s)"
        log.warning(words, model.info.name, reason)
        return model

    def _add_replica(self, name: str, replica: LoadedModel) -> None:
        """Add a model's twin, if it can be warmed up."""
        try:
            self._add(1, name, replica)
        except Exception as error:  # noqa: BLE001 -- whatever a user's module raises: one batch after the other, then
            reason = f"{type(error).__name__}: {error}"
            log.warning("model %s runs one batch at a time: its twin failed to warm up (%s)", replica.info.name, reason)

    def _add(self, place: int, name: str, model: LoadedModel) -> None:
        """Add a model, or its twin, and warm it up where it will run; rows name it only once it is loaded."""
        known, run = (self._models, self._replicas)[place], partial(self._run_in, self._lanes[place])
        known[name] = model
        self._device.synchronize()  # the weights come in another stream than the lanes'
        try:
            if self._device.is_cpu:
                warm_up(run, name, model.info)  # beside the batches of other models
            else:
                warm_up_all_sizes(run, name, model.info, self._setup.max_rows)
        except BaseException:  # a model may call sys.exit
            known.pop(name, None)
            raise

    def drop(self, name: str) -> None:
        """Forget a model; see `WorkerProtocol.drop`."""
        self._device.make_current()
        models = [known.pop(name, None) for known in (self._replicas, self._models)]
        gone = [weakref.ref(model.module) for model in models if model]
        del models
        gc.collect()
        if any(module() is not None for module in gone):
            # In a cycle that was taken out of the collector's rounds. To look at everything takes half a second.
            gc.unfreeze()
            process.keep_objects()
        self._device.release_memory()
        process.give_back()

    def run(self, pass_: Pass, rows: Sequence[Row], partition: Partition | None = None) -> list[RowResult]:
        """Run one batch; see `WorkerProtocol.run`."""
        self._device.make_current()
        if pass_.model not in self._models:
            words = f"the model {pass_.model} was lost: it could not be loaded again"
            raise Unavailable(words, retry_after=5.0, shed="model_failed")
        replica = pass_.model in self._replicas
        # What is oneDNN's or compiled in the twin computes with the model's own parameters: those stay as they are.
        place = 1 if replica and (partition or pass_.randomised) else 0
        threads = (
            max(1, (self._setup.threads + 1 - partition) // 2)
            if replica and partition is not None
            else self._setup.threads
        )
        lane = self._lanes[place]
        with lane.turn:
            if self._device.is_cpu and pass_.kind in LARGE:
                process.give_back()
            self._take(threads)
            return self._run_in(lane, pass_, rows)

    def _run_in(self, lane: _Lane, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
        try:
            return lane.run(pass_, rows)
        except OutOfMemory:
            self._release_memory()
            raise

    def _take(self, threads: int) -> None:
        """Have torch compute with so many threads in this one."""
        if self._setup.partitioned and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    def _release_memory(self) -> None:
        """Give back what a batch left that found no memory: what is tried next may need it in another stream."""
        gc.collect()
        self._device.release_memory()

    def row_bytes(self, name: str) -> Mapping[Kind, int]:
        """Measure how much memory one input of a model takes; see `WorkerProtocol.row_bytes`."""
        self._device.make_current()
        if not self._device.free_memory():
            return {}  # neither does it tell what a batch takes
        return sizing.row_bytes(self._models[name].info, name, self._peak)

    def _peak(self, pass_: Pass, rows: Sequence[Row]) -> int:
        first, second = self._lanes
        with _LOADING, first.turn, second.turn:
            return self._device.peak_of(lambda: first.run(pass_, rows))

    def free_bytes(self) -> int:
        """Return how much memory batches can take together; see `WorkerProtocol.free_bytes`."""
        self._device.make_current()
        first, second = self._lanes
        with first.turn, second.turn:
            self._device.release_memory()
            return self._device.free_memory()

    def memory(self) -> Memory:
        """Return how much memory it has; see `WorkerProtocol.memory`."""
        return Memory(process.resident(), *(self._device.memory() or ()))

    def close(self) -> None:
        """Let the models go."""
        self._models.clear()
        self._replicas.clear()
        for lane in self._lanes:
            lane.close()
