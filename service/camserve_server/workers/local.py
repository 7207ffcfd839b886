"""An engine in this process: for embedded use, and inside of a worker."""

import gc
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from camserve_server import logs, process
from camserve_server.devices import Device, device_of
from camserve_server.engine import Engine
from camserve_server.errors import OutOfMemory, Unavailable
from camserve_server.methods import add_plugins
from camserve_server.models import LoadedModel, load
from camserve_server.models.spec import ModelSpec
from camserve_server.targets import anything
from camserve_server.telemetry import Memory
from camserve_server.types import Half, Kind, MethodCall, ModelInfo, Pass, Row, RowResult
from camserve_server.workers import sizing
from camserve_server.workers.messages import Setup

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
        return self.run_on(self.engine, pass_, rows)

    def run_on(self, engine: Engine, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
        """Run one batch, for other models; see `Engine.with_models`."""
        if self._thread is None:
            return engine.run(pass_, rows)
        return self._thread.submit(engine.run, pass_, rows).result()

    def close(self) -> None:
        """Let the thread end, after what it runs."""
        if self._thread:
            self._thread.shutdown(wait=False)


class Local:
    """An engine in this process.

    Args:
        setup: of the engine.
    """

    def __init__(self, setup: Setup) -> None:
        add_plugins()
        self._setup, self._device = setup, device_of(setup.device)
        self._models: dict[str, LoadedModel] = {}
        self._twins: dict[str, LoadedModel] = {}
        self._lanes = self._lane_of(self._models), self._lane_of(self._twins)

    def _lane_of(self, models: dict[str, LoadedModel]) -> _Lane:
        setup = self._setup
        engine = Engine(models, device=setup.device, beside=setup.beside or setup.streams)
        return _Lane(engine, self._device)

    def load(self, name: str, spec: ModelSpec) -> ModelInfo:
        """Load a model and warm it up; see `Port.load`."""
        with _LOADING:
            torch.set_num_threads(self._setup.threads)
            model = load(spec, self._setup.device)
            self._device.synchronize()  # the weights come in another stream than the lanes'
            for lane in self._lanes if self._setup.streams else self._lanes[:1]:
                _warm_up(lane, model)
            twin = model.twin() if self._setup.halves or self._setup.streams else None
            self._models[name] = model
            if twin:
                self._twins[name] = twin
        fields = logs.fields(source=model.info.source, layer=model.info.default_layer, device=self._setup.device)
        log.info("model %s is warm", name, extra=fields)
        return model.info

    def drop(self, name: str) -> None:
        """Forget a model; see `Port.drop`."""
        models = [known.pop(name, None) for known in (self._twins, self._models)]
        gone = [weakref.ref(model.module) for model in models if model]
        del models
        gc.collect()
        if any(module() is not None for module in gone):
            # In a cycle that was taken out of the collector's rounds. To look at everything takes half a second.
            gc.unfreeze()
            process.keep_objects()
        self._device.release_memory()
        process.give_back()

    def run(self, pass_: Pass, rows: Sequence[Row], half: Half | None = None) -> list[RowResult]:
        """Run one batch; see `Port.run`."""
        if pass_.model not in self._models:
            words = f"the model {pass_.model} was lost: it could not be loaded again"
            raise Unavailable(words, retry_after=5.0, shed="model_failed")
        twin = pass_.model in self._twins
        # What is oneDNN's or compiled in the twin computes with the model's own parameters: those stay as they are.
        place = 1 if twin and (half or pass_.randomised) else 0
        threads = max(1, (self._setup.threads + 1 - half) // 2) if twin and half is not None else self._setup.threads
        lane = self._lanes[place]
        with lane.turn:
            if self._device.is_cpu and pass_.kind in LARGE:
                process.give_back()
            self._take(threads)
            try:
                return lane.run(pass_, rows)
            except OutOfMemory:
                self._release_memory()
                raise

    def _take(self, threads: int) -> None:
        """Have torch compute with so many threads in this one."""
        if self._setup.halves and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    def _release_memory(self) -> None:
        """Give back what a batch left that found no memory: what is tried next may need it in another stream."""
        gc.collect()
        self._device.release_memory()

    def row_bytes(self, name: str) -> Mapping[Kind, int]:
        """Measure how much memory one input of a model takes; see `Port.row_bytes`."""
        if not self._device.free_memory():
            return {}  # neither does it tell what a batch takes
        return sizing.row_bytes(self._models[name].info, name, self._peak)

    def _peak(self, pass_: Pass, rows: Sequence[Row]) -> int:
        first, second = self._lanes
        with _LOADING, first.turn, second.turn:
            return self._device.peak_of(lambda: first.run(pass_, rows))

    def free_bytes(self) -> int:
        """Return how much memory batches can take together; see `Port.free_bytes`."""
        first, second = self._lanes
        with first.turn, second.turn:
            self._device.release_memory()
            return self._device.free_memory()

    def memory(self) -> Memory:
        """Return how much memory it has; see `Port.memory`."""
        return Memory(process.resident(), *(self._device.memory() or ()))

    def close(self) -> None:
        """Let the models go."""
        self._models.clear()
        self._twins.clear()
        for lane in self._lanes:
            lane.close()


def _warm_up(lane: _Lane, model: LoadedModel) -> None:
    """Run one row of each kind, so that the first request does not pay for what is made on first use."""
    info, engine = model.info, lane.engine.with_models({model.info.name: model})
    image = np.full((*info.preprocess.size, 3), 128, np.uint8)
    for name, pass_ in (
        ("gradcam", Pass(info.name, "cam", info.preprocess.size, (info.default_layer,))),
        ("saliency", Pass(info.name, "saliency", info.preprocess.size)),
    ):
        lane.run_on(engine, pass_, [Row(image, anything(info), (MethodCall(name),))])
