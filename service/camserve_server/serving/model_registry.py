"""Which models there are, in which version, and who still needs one that is about to go."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from camserve_server.models.values import KnownModel, ModelInfo, UnavailableModel


class Registry:
    """The models of a server, and the requests that hold them. Used on one event loop.

    A request keeps the version that it was read against, whatever comes after it: it holds that until it is answered.

    Attributes:
        models: by the names that requests use, those of the configuration in its order; the first is the default.
    """

    def __init__(self) -> None:
        self.models: dict[str, KnownModel] = {}
        self._holders = Counter[str]()
        self._waiting: dict[str, asyncio.Event] = {}

    def first(self) -> ModelInfo | None:
        """Return the first model that answers, if one does."""
        return next((model for model in self.models.values() if isinstance(model, ModelInfo)), None)

    @contextmanager
    def held(self, model: ModelInfo) -> Iterator[None]:
        """Keep a version of a model inside the block."""
        self._holders[model.key] += 1
        try:
            yield
        finally:
            self._holders[model.key] -= 1
            if not self._holders[model.key]:
                del self._holders[model.key]
                self._waiting.pop(model.key, asyncio.Event()).set()

    def is_bereft(self) -> bool:
        """Tell whether every model has failed, so that nothing will be answered until one is loaded again."""
        states = [one.state if isinstance(one, UnavailableModel) else "" for one in self.models.values()]
        return bool(states) and set(states) == {"failed"}

    def lose(self, key: str) -> ModelInfo | None:
        """Take a version for failed; return it, or None where it is not among the models any more."""
        found = next((one for one in self.models.values() if isinstance(one, ModelInfo) and one.key == key), None)
        if found:
            self.models[found.name] = UnavailableModel(found.name, found.source, "failed", found.version)
        return found

    async def let_go(self, model: ModelInfo) -> None:
        """Wait until nobody holds a version; nobody new does, since it is no longer among the models."""
        if model.key in self._holders:
            await self._waiting.setdefault(model.key, asyncio.Event()).wait()
