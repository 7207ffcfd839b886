"""An engine in this process: for embedded use, and inside of a worker."""

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch

from camserve_server import logs, process
from camserve_server.devices import device_of
from camserve_server.engine import Engine
from camserve_server.errors import Unavailable
from camserve_server.methods import add_plugins
from camserve_server.models import LoadedModel, load
from camserve_server.models.spec import ModelSpec
from camserve_server.telemetry import Memory
from camserve_server.types import Half, ModelInfo, Pass, Row, RowResult
from camserve_server.workers.messages import Setup
from camserve_server.workers.warmup import warm_up, warm_up_all_sizes

log = logging.getLogger(__name__)

LARGE = frozenset({"bias", "curvature"})
"""Kinds of pass whose batches take so much memory that what earlier ones have left is given back before."""

InTurn: TypeAlias = Callable[[Callable[[], object]], object]
"""Calls a function between two batches, and returns once it has returned."""

_LOADING = threading.Lock()
"""One model after another: random weights come from a generator that the whole process has in common."""


class Local:
    """An engine in this process.

    Each thread makes the engine's device its current one before it computes. Otherwise torch would also take memory of
    the first GPU, which is every thread's current device at first.

    Args:
        setup: of the engine.
        in_turn: calls a function in the thread that runs batches. A GPU is warmed up there, because torch keeps cuDNN's
            plans for each thread. If not given, in the calling thread.

    Raises:
        RuntimeError: the device does not compute.
    """

    def __init__(self, setup: Setup, in_turn: InTurn = lambda function: function()) -> None:
        add_plugins()
        self._in_turn = in_turn
        self._setup, self._device = setup, device_of(setup.device)
        self._device.initialize()
        self._models: dict[str, LoadedModel] = {}
        self._twins: dict[str, LoadedModel] = {}
        self._halves = self._engine_of(self._models), self._engine_of(self._twins)
        self._turns = threading.Lock(), threading.Lock()

    def _engine_of(self, models: dict[str, LoadedModel]) -> Engine:
        return Engine(models, device=self._setup.device, beside=self._setup.beside)

    def load(self, name: str, spec: ModelSpec) -> ModelInfo:
        """Load a model and warm it up; see `Port.load`."""
        self._device.make_current()
        with _LOADING:
            torch.set_num_threads(self._setup.threads)
            model = self._warmed(name, load(spec, self._setup.device, rows=self._setup.max_rows))
            if self._setup.halves and (twin := model.twin()):
                self._add_twin(name, twin)
        fields = logs.fields(source=model.info.source, layer=model.info.default_layer, device=self._setup.device)
        log.info("model %s is warm", name, extra=fields)
        return model.info

    def _warmed(self, name: str, model: LoadedModel) -> LoadedModel:
        """Add a model and warm it up, without its quicker copy if that fails.

        Raises:
            Exception: whatever the model itself raises.
        """
        try:
            self._add(name, model)
        except Exception as error:
            if model.quick is None:
                raise
            reason = f"{type(error).__name__}: {error}"
        else:
            return model
        model = replace(model, quick=None)
        self._add(name, model)
        log.warning("model %s runs without its quicker copy, which failed to warm up (%s)", model.info.name, reason)
        return model

    def _add(self, name: str, model: LoadedModel) -> None:
        """Add a model and warm it up; rows name it only once it is loaded."""
        self._models[name] = model
        try:
            if self._device.is_cpu:
                warm_up(self._halves[0].run, name, model.info)  # beside the batches of other models
            else:
                warm_up_all_sizes(self._run_in_turn, name, model.info, self._setup.max_rows)
        except BaseException:  # a model may call sys.exit
            self._models.pop(name, None)
            raise

    def _run_in_turn(self, pass_: Pass, rows: Sequence[Row]) -> None:
        self._in_turn(partial(self.run, pass_, rows))

    def _add_twin(self, name: str, twin: LoadedModel) -> None:
        """Add a model's twin, if it can be warmed up."""
        self._twins[name] = twin
        try:
            warm_up(self._halves[1].run, name, twin.info)
        except Exception as error:  # noqa: BLE001 -- whatever a user's module raises: one batch after the other, then
            self._twins.pop(name, None)
            reason = f"{type(error).__name__}: {error}"
            log.warning("model %s runs one batch at a time: its twin failed to warm up (%s)", twin.info.name, reason)

    def drop(self, name: str) -> None:
        """Forget a model; see `Port.drop`."""
        self._device.make_current()
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
        self._device.make_current()
        if pass_.model not in self._models:
            words = f"the model {pass_.model} was lost: it could not be loaded again"
            raise Unavailable(words, retry_after=5.0, shed="model_failed")
        twin = pass_.model in self._twins
        # What is oneDNN's or compiled in the twin computes with the model's own parameters: those stay as they are.
        place = 1 if twin and (half or pass_.randomised) else 0
        threads = max(1, (self._setup.threads + 1 - half) // 2) if twin and half is not None else self._setup.threads
        with self._turns[place]:
            if self._device.is_cpu and pass_.kind in LARGE:
                process.give_back()
            self._take(threads)
            return self._halves[place].run(pass_, rows)

    def _take(self, threads: int) -> None:
        """Have torch compute with so many threads in this one."""
        if self._setup.halves and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    def memory(self) -> Memory:
        """Return how much memory it has; see `Port.memory`."""
        return Memory(process.resident(), *(self._device.memory() or ()))

    def close(self) -> None:
        """Let the models go."""
        self._models.clear()
        self._twins.clear()
