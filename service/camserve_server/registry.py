"""Which models there are, in which version, and who still needs one that is about to go."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from camserve_server.types import KnownModel, ModelInfo


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

    async def let_go(self, model: ModelInfo) -> None:
        """Wait until nobody holds a version; nobody new does, since it is no longer among the models."""
        if model.key in self._holders:
            await self._waiting.setdefault(model.key, asyncio.Event()).wait()
