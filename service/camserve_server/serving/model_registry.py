"""Registry of the models of a server: their current versions, and the requests that hold a version."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from camserve_server.models.values import KnownModel, ModelInfo, UnavailableModel


class Registry:
    """The models of a server, and the requests that hold them. For use on one event loop.

    A request holds the version that it was parsed for until it is answered, even if a newer one is loaded meanwhile.

    Attributes:
        models: models by the names that requests use, in the order of the configuration; the first is the default.
    """

    def __init__(self) -> None:
        self.models: dict[str, KnownModel] = {}
        self._holders = Counter[str]()
        self._waiting: dict[str, asyncio.Event] = {}

    def first(self) -> ModelInfo | None:
        """Return the first model that is loaded, or None."""
        return next((model for model in self.models.values() if isinstance(model, ModelInfo)), None)

    @contextmanager
    def held(self, model: ModelInfo) -> Iterator[None]:
        """Hold a version of a model inside the block."""
        self._holders[model.key] += 1
        try:
            yield
        finally:
            self._holders[model.key] -= 1
            if not self._holders[model.key]:
                del self._holders[model.key]
                self._waiting.pop(model.key, asyncio.Event()).set()

    def all_failed(self) -> bool:
        """Return True if every model has failed, so that no request can be answered until one is loaded again."""
        states = [model.state if isinstance(model, UnavailableModel) else "" for model in self.models.values()]
        return bool(states) and set(states) == {"failed"}

    def mark_failed(self, key: str) -> ModelInfo | None:
        """Mark a version as failed; return it, or None if it is no longer the current version of a model."""
        loaded = (model for model in self.models.values() if isinstance(model, ModelInfo))
        failed = next((model for model in loaded if model.key == key), None)
        if failed:
            self.models[failed.name] = UnavailableModel(failed.name, failed.source, "failed", failed.version)
        return failed

    async def wait_until_unused(self, model: ModelInfo) -> None:
        """Wait until no request holds a version that is no longer current, and so gets no new requests."""
        if model.key in self._holders:
            await self._waiting.setdefault(model.key, asyncio.Event()).wait()
