"""Models come and go while the server runs: each load is a new version, and the old one answers until that is warm."""

import asyncio
import functools
import logging
import os
import re
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from camserve_server.core import logs
from camserve_server.core.config import Settings
from camserve_server.core.errors import ConfigError, FailedPrecondition, InvalidArgument, NotFound, ServiceError
from camserve_server.models import ModelSpec
from camserve_server.models.values import KnownModel, ModelInfo, UnavailableModel
from camserve_server.serving.requests import LoadRequest
from camserve_server.serving.worker_pool import WorkerPool
from camserve_server.telemetry import Engine

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE = 5.0  # seconds that the next load waits for the requests that hold an old version
_PART = re.compile(r"[\w-][\w.-]*", re.ASCII)  # of a path: no folder above, and nothing hidden
_KINDS = (".safetensors", ".pth", ".pt")


class Lifecycle:
    """Loads models and unloads them, one after another.

    Args:
        fleet: whose engines have them.
        specs: which models there are, by the names that requests use; the first is the default.
        settings: of the server.

    Raises:
        ConfigError: the model folder is none.
    """

    def __init__(self, fleet: WorkerPool, specs: Mapping[str, ModelSpec], settings: Settings) -> None:
        self._fleet, self._registry, self._specs = fleet, fleet.registry, specs
        self._admin, self._folder = settings.admin, settings.model_folder
        if self._folder and not Path(self._folder).is_dir():
            raise ConfigError(f"model_folder = {self._folder}: there is no such folder")
        self._registry.models.update(
            {name: UnavailableModel(name, spec.origin, "loading") for name, spec in specs.items()}
        )
        self._versions = dict.fromkeys(specs, 0)
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def models(self) -> Mapping[str, KnownModel]:
        """The models that the configuration names, in its order."""
        return self._registry.models

    def engines(self) -> list[Engine]:
        """Return what can be said of each engine now; from any thread."""
        return self._fleet.engines()

    def held(self, model: ModelInfo) -> AbstractContextManager[None]:
        """Keep a version of a model inside the block."""
        return self._registry.held(model)

    async def start(self) -> None:
        """Load every model; one that cannot be loaded does not keep the others from it.

        Raises:
            ConfigError: none can be loaded.
        """
        errors = {name: error for name, spec in self._specs.items() if (error := await self._started(spec))}
        if len(errors) == len(self._specs) > 1:
            raise ConfigError("; ".join(f"{name}: {error}" for name, error in errors.items()))
        if len(errors) == len(self._specs):
            raise next(iter(errors.values()))

    async def _started(self, spec: ModelSpec) -> ConfigError | None:
        try:
            await self._replace(spec)
        except ConfigError as error:
            if len(self._specs) > 1:  # else it is what the server ends with
                _complain(spec, error)
            return error
        return None

    async def load(self, asked: LoadRequest) -> ModelInfo:
        """Load a model, or load it again.

        A caller that gives up before its turn leaves nothing behind; what has begun goes on without it.

        Raises:
            FailedPrecondition: that is not allowed, or it cannot be loaded; the version before goes on answering.
            NotFound: there is no such file of weights.
            InvalidArgument: what is said of the weights makes no sense.
        """
        self._check_allowed()
        spec = self._spec(asked)
        await self._turn.acquire()
        try:
            return await asyncio.shield(self._begin(self._again(spec), self._turn.release))
        except ConfigError as error:
            now = self._registry.models[spec.name]
            still = f" again: version {now.version} goes on answering" if isinstance(now, ModelInfo) else ""
            words = f"model {spec.name} could not be loaded{still}; the server's log says why"
            raise FailedPrecondition(words) from error

    async def reload(self, name: str) -> ModelInfo:
        """Load a model again; the version before answers meanwhile.

        Raises:
            ConfigError: it cannot be loaded; the version before goes on answering.
        """
        async with self._turn:
            return await self._replace(self._specs[name])

    async def unload(self, name: str) -> KnownModel:
        """Unload a model, and return when its last request is answered; one that is not loaded stays so.

        Raises:
            FailedPrecondition: that is not allowed.
        """
        self._check_allowed()
        async with self._turn:
            model = self._registry.models[name]
            if isinstance(model, UnavailableModel) and model.state == "unloading":
                return model
            going = self._mark(name, "unloading" if isinstance(model, ModelInfo) else "unloaded")
        if isinstance(model, ModelInfo):
            await asyncio.shield(self._begin(self._unloaded(model, going)))
        return self._registry.models[name]

    async def close(self) -> None:
        """Wait for nothing any more: the engines are about to go."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _check_allowed(self) -> None:
        if not self._admin:
            raise FailedPrecondition("models are not loaded or unloaded here: the server's setting admin is off")

    def _begin(self, work: Coroutine[Any, Any, T], then: Callable[[], object] = lambda: None) -> asyncio.Task[T]:
        """Begin something that goes on to its end, whether or not its caller still waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._ended, then))
        return task

    def _ended(self, then: Callable[[], object], task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # which its own words in the log have told, should nobody wait for it
        then()

    async def _again(self, spec: ModelSpec) -> ModelInfo:
        """Load a model, and tell the log if it cannot be: there may be nobody else to be told any more."""
        try:
            return await self._replace(spec)
        except ConfigError as error:
            _complain(spec, error)
            raise

    async def _replace(self, spec: ModelSpec) -> ModelInfo:
        """Load the next version of a model, and let the one before go."""
        name, old = spec.name, self._registry.models[spec.name]
        if isinstance(old, UnavailableModel):
            self._mark(name, "loading")
        version = self._versions[name] + 1
        try:
            info = replace(await self._fleet.load(f"{name}@{version}", spec), version=version)
        except Exception as error:
            if isinstance(old, UnavailableModel):
                self._mark(name, "failed")
            raise _ours(spec, error) from error
        self._versions[name], self._registry.models[name] = version, info
        if isinstance(old, ModelInfo):
            await asyncio.wait((self._begin(self._dropped(old)),), timeout=PATIENCE)
        return info

    async def _dropped(self, model: ModelInfo) -> None:
        await self._registry.let_go(model)
        await self._fleet.drop(model.key)
        log.info("model %s: a version is gone", model.name, extra=logs.fields(version=model.version))

    async def _unloaded(self, model: ModelInfo, going: UnavailableModel) -> None:
        await self._dropped(model)
        if self._registry.models[model.name] is going:  # and it was not loaded again meanwhile
            self._mark(model.name, "unloaded")

    def _mark(self, name: str, state: Any) -> UnavailableModel:
        now = UnavailableModel(name, self._specs[name].origin, state, self._versions[name])
        self._registry.models[name] = now
        return now

    def _spec(self, asked: LoadRequest) -> ModelSpec:
        """Return which model that is, with the weights that were asked for."""
        spec = self._specs[asked.name]
        if asked.weights:
            folder = os.path.realpath(self._folder)
            weights = str(self._file(asked.weights))
            return replace(spec, weights=weights, sha256=asked.sha256, model_folder=folder)
        if asked.sha256 and spec.weights in ("default", "none"):
            fault = f"is of a file of weights, and the configuration of {spec.name} names none"
            raise InvalidArgument.of_field("sha256", fault)
        if asked.sha256 and spec.sha256 not in ("", asked.sha256):
            raise InvalidArgument(f"the configuration of {spec.name} has another sha256", field="sha256")
        return replace(spec, sha256=asked.sha256 or spec.sha256)

    def _file(self, name: str) -> Path:
        """Find a file of weights in the model folder. Nothing outside of it is looked at, whatever the name is.

        Raises:
            FailedPrecondition: there is no such folder.
            InvalidArgument: it is no path inside of one.
            NotFound: there is no such file, or it is a link to one outside.
        """
        if not self._folder:
            fault = "cannot be named here: the server's setting model_folder is empty"
            raise FailedPrecondition.of_field("weights", fault)
        if not (name.endswith(_KINDS) and all(map(_PART.fullmatch, name.split("/")))):
            fault = f"is a path inside of the model folder, such as net-2.safetensors: {', '.join(_KINDS)}"
            raise InvalidArgument.of_field("weights", fault)
        folder = os.path.realpath(self._folder)
        path = Path(os.path.realpath(Path(folder, name)))
        if not (path.is_relative_to(folder) and path.is_file()):
            raise NotFound("there is no such file in the model folder", field="weights")
        return path


def _complain(spec: ModelSpec, error: ConfigError) -> None:
    log.error("model %s could not be loaded: %s", spec.name, error)


def _ours(spec: ModelSpec, error: Exception) -> ConfigError:
    """Return our own error as it is, and any other, of which the log has more, in words for the operator."""
    if isinstance(error, ConfigError):
        return error
    if not isinstance(error, ServiceError):
        log.error("loading model %s failed", spec.name, exc_info=error)
    return ConfigError(f"model {spec.name} ({spec.origin}): {error}")
