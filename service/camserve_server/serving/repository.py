"""Loading, reloading and unloading of models while the server runs.

Each load is a new version of the model. The old version answers requests until the new one is warm.
"""

import asyncio
import functools
import logging
import os
import re
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from camserve_server.core import logs
from camserve_server.core.config import Settings
from camserve_server.core.errors import ConfigError, FailedPrecondition, InvalidArgument, NotFound, ServiceError
from camserve_server.models import ModelSpec
from camserve_server.models.values import KnownModel, ModelInfo, UnavailableModel
from camserve_server.serving.requests import LoadRequest
from camserve_server.serving.worker_pool import WorkerPool
from camserve_server.telemetry import WorkerSnapshot

log = logging.getLogger(__name__)

T = TypeVar("T")

DROP_TIMEOUT = 5.0  # seconds that a load waits for the requests that hold the old version
_PATH_PART = re.compile(r"[\w-][\w.-]*", re.ASCII)  # no parent folder, and nothing hidden
_SUFFIXES = (".safetensors", ".pth", ".pt")


class ModelChanges(Protocol):
    """Object that loads and unloads models: the repository of this process, or a relay to those of several."""

    async def load(self, request: LoadRequest) -> ModelInfo:
        """Load a model, or load it again; see `ModelRepository.load`."""

    async def unload(self, name: str) -> KnownModel:
        """Unload a model; see `ModelRepository.unload`."""


class ModelRepository:
    """Loads models and unloads them, one after another.

    Args:
        pool: workers that run the models.
        specs: sources and options of the models, by the names that requests use; the first is the default.
        settings: settings of the server.

    Raises:
        ConfigError: the model folder does not exist.
    """

    def __init__(self, pool: WorkerPool, specs: Mapping[str, ModelSpec], settings: Settings) -> None:
        self._pool, self._registry, self._specs = pool, pool.registry, specs
        self._admin, self._folder = settings.admin, settings.model_folder
        if self._folder and not Path(self._folder).is_dir():
            raise ConfigError(f"model_folder = {self._folder}: there is no such folder")
        self._registry.models.update(
            {name: UnavailableModel(name, spec.origin, "loading") for name, spec in specs.items()}
        )
        self._versions = dict.fromkeys(specs, 0)
        self._lock = asyncio.Lock()  # one load or unload at a time
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def models(self) -> Mapping[str, KnownModel]:
        """The models by name, in the order of the configuration."""
        return self._registry.models

    def engines(self) -> list[WorkerSnapshot]:
        """Return the current state of each worker; from any thread."""
        return self._pool.engines()

    def held(self, model: ModelInfo) -> AbstractContextManager[None]:
        """Hold a version of a model inside the block: it is not dropped."""
        return self._registry.held(model)

    async def start(self) -> None:
        """Load every model. One that cannot be loaded does not stop the others.

        Raises:
            ConfigError: no model can be loaded.
        """
        errors = {name: error for name, spec in self._specs.items() if (error := await self._load_first(spec))}
        if len(errors) == len(self._specs) > 1:
            raise ConfigError("; ".join(f"{name}: {error}" for name, error in errors.items()))
        if len(errors) == len(self._specs):
            raise next(iter(errors.values()))

    async def _load_first(self, spec: ModelSpec) -> ConfigError | None:
        try:
            await self._replace(spec)
        except ConfigError as error:
            if len(self._specs) > 1:  # otherwise the server ends with this error
                _log_failure(spec, error)
            return error
        return None

    async def load(self, request: LoadRequest, version: int = 0) -> ModelInfo:
        """Load a model, or load it again, as a version with this number; 0 for the next number.

        A load whose caller is cancelled before its turn does not start. One that has started goes on.

        Raises:
            FailedPrecondition: loading is not allowed, or failed; the old version goes on answering.
            NotFound: the file of weights does not exist.
            InvalidArgument: the weights or their sha256 are not valid for this model.
        """
        self._check_allowed()
        spec = self._resolve_spec(request)
        await self._lock.acquire()
        try:
            return await asyncio.shield(self._start(self._replace_or_log(spec, version), self._lock.release))
        except ConfigError as error:
            current = self._registry.models[spec.name]
            still = f" again: version {current.version} goes on answering" if isinstance(current, ModelInfo) else ""
            message = f"model {spec.name} could not be loaded{still}; the server's log says why"
            raise FailedPrecondition(message) from error

    async def reload(self, name: str) -> ModelInfo:
        """Load a model again; the old version answers meanwhile.

        Raises:
            ConfigError: the model cannot be loaded; the old version goes on answering.
        """
        async with self._lock:
            return await self._replace(self._specs[name])

    async def unload(self, name: str, version: int = 0) -> KnownModel:
        """Unload a model, and return when its last request is answered. A model that is not loaded stays so.

        A number other than 0 becomes the number of its version.

        Raises:
            FailedPrecondition: unloading is not allowed.
        """
        self._check_allowed()
        async with self._lock:
            self._versions[name] = version or self._versions[name]
            model = self._registry.models[name]
            if isinstance(model, UnavailableModel) and model.state == "unloading":
                return model
            marked = self._mark(name, "unloading" if isinstance(model, ModelInfo) else "unloaded")
        if isinstance(model, ModelInfo):
            await asyncio.shield(self._start(self._unload(model, marked)))
        return self._registry.models[name]

    async def close(self) -> None:
        """Cancel all loads and drops, because the workers are about to stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _check_allowed(self) -> None:
        if not self._admin:
            raise FailedPrecondition("models cannot be loaded or unloaded: the server's setting admin is off")

    def _start(self, work: Coroutine[Any, Any, T], then: Callable[[], object] = lambda: None) -> asyncio.Task[T]:
        """Start a task that goes on to its end even if its caller is cancelled, and call `then` after it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._finish, then))
        return task

    def _finish(self, then: Callable[[], object], task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved; it is in the log already, in case no caller waits for it
        then()

    async def _replace_or_log(self, spec: ModelSpec, version: int) -> ModelInfo:
        """Load a model, and log an error, because its caller may be gone."""
        try:
            return await self._replace(spec, version)
        except ConfigError as error:
            _log_failure(spec, error)
            raise

    async def _replace(self, spec: ModelSpec, version: int = 0) -> ModelInfo:
        """Load a version of a model, 0 for the next one, and drop the old one."""
        name, old = spec.name, self._registry.models[spec.name]
        if isinstance(old, UnavailableModel):
            self._mark(name, "loading")
        version = version or self._versions[name] + 1
        try:
            info = replace(await self._pool.load(f"{name}@{version}", spec), version=version)
        except Exception as error:
            if isinstance(old, UnavailableModel):
                self._mark(name, "failed")
            raise _as_config_error(spec, error) from error
        self._versions[name], self._registry.models[name] = version, info
        if isinstance(old, ModelInfo):
            await asyncio.wait((self._start(self._drop(old)),), timeout=DROP_TIMEOUT)
        return info

    async def _drop(self, model: ModelInfo) -> None:
        await self._registry.wait_until_unused(model)
        await self._pool.drop(model.key)
        log.info("model %s: a version was dropped", model.name, extra=logs.fields(version=model.version))

    async def _unload(self, model: ModelInfo, marked: UnavailableModel) -> None:
        await self._drop(model)
        if self._registry.models[model.name] is marked:  # it was not loaded again meanwhile
            self._mark(model.name, "unloaded")

    def _mark(self, name: str, state: Any) -> UnavailableModel:
        model = UnavailableModel(name, self._specs[name].origin, state, self._versions[name])
        self._registry.models[name] = model
        return model

    def _resolve_spec(self, request: LoadRequest) -> ModelSpec:
        """Return the spec of the requested model, with the requested weights."""
        spec = self._specs[request.name]
        if request.weights:
            folder = os.path.realpath(self._folder)
            weights = str(_file(self._folder, request.weights))
            return replace(spec, weights=weights, sha256=request.sha256, model_folder=folder)
        if request.sha256 and spec.weights in ("default", "none"):
            fault = f"belongs to a file of weights, and the configuration of {spec.name} names none"
            raise InvalidArgument.of_field("sha256", fault)
        if request.sha256 and spec.sha256 not in ("", request.sha256):
            raise InvalidArgument(f"the configuration of {spec.name} has another sha256", field="sha256")
        return replace(spec, sha256=request.sha256 or spec.sha256)


def _file(model_folder: str, name: str) -> Path:
    """Return the path of a file of weights in the model folder. Nothing outside of the folder is accessed.

    Raises:
        FailedPrecondition: the setting model_folder is empty.
        InvalidArgument: the name is not a path inside of the folder.
        NotFound: the file does not exist, or is a link to a file outside.
    """
    if not model_folder:
        fault = "cannot be chosen: the server's setting model_folder is empty"
        raise FailedPrecondition.of_field("weights", fault)
    if not (name.endswith(_SUFFIXES) and all(map(_PATH_PART.fullmatch, name.split("/")))):
        fault = f"must be a path inside of the model folder, such as net-2.safetensors: {', '.join(_SUFFIXES)}"
        raise InvalidArgument.of_field("weights", fault)
    folder = os.path.realpath(model_folder)
    path = Path(os.path.realpath(Path(folder, name)))
    if not (path.is_relative_to(folder) and path.is_file()):
        raise NotFound("no such file in the model folder", field="weights")
    return path


def _log_failure(spec: ModelSpec, error: ConfigError) -> None:
    log.error("model %s could not be loaded: %s", spec.name, error)


def _as_config_error(spec: ModelSpec, error: Exception) -> ConfigError:
    """Return any error as a ConfigError. One that is not ours is logged with its traceback."""
    if isinstance(error, ConfigError):
        return error
    if not isinstance(error, ServiceError):
        log.error("loading model %s failed", spec.name, exc_info=error)
    return ConfigError(f"model {spec.name} ({spec.origin}): {error}")
