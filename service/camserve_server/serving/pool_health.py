"""Health of a worker pool: workers that are lost and return, and canary requests.

The pool is unhealthy while it has no worker that is ready, after several canaries in a row have failed, and when every
model has failed. Requests wait for a lost worker to return, but not forever.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable

import numpy as np

from camserve_server.engine.values import Row, RowResult
from camserve_server.methods.values import MethodCall
from camserve_server.models.values import Pass
from camserve_server.scheduling import Batcher
from camserve_server.serving.model_registry import Registry
from camserve_server.targets import anything

log = logging.getLogger(__name__)

RECOVERY_TIMEOUT = 30.0  # seconds that requests wait for a worker to return, before they are refused at once
CANARY_INTERVAL = 10.0  # seconds between two checks that an explanation can be computed
FAILURE_THRESHOLD = 2  # canaries that fail in a row before the pool is unhealthy

HealthListener = Callable[[bool], object]
"""Callback on the event loop: True when explanations can be computed again, False when they no longer can."""


class PoolHealth:
    """Tracks whether a pool can compute explanations.

    Args:
        batcher: batcher of the pool; its workers are paused while they are lost.
        registry: models of the server.
        listener: callback for each change.
        canary_timeout: seconds that a canary may take.
        ready: indices of the workers that are ready at first.
    """

    def __init__(
        self,
        batcher: Batcher,
        registry: Registry,
        listener: HealthListener,
        *,
        canary_timeout: float,
        ready: Iterable[int] = (),
    ) -> None:
        self._batcher, self._registry, self._listener = batcher, registry, listener
        self._canary_timeout = canary_timeout
        self._ready = set(ready)
        self._failures = 0
        self._healthy = True
        self._recovery_timer: asyncio.TimerHandle | None = None

    def is_ready(self, index: int) -> bool:
        """Return True if a worker runs batches."""
        return index in self._ready

    def worker_ready(self, index: int) -> None:
        """Let a worker run batches."""
        self._ready.add(index)
        self._batcher.resume(index)
        if self._recovery_timer:
            self._recovery_timer.cancel()
        self.update()

    def worker_lost(self, index: int) -> None:
        """Give a worker no further batch; without any worker, requests wait until `RECOVERY_TIMEOUT`."""
        self._ready.discard(index)
        self._batcher.pause(index)
        if not self._ready:
            reason = "no worker is available: it was lost, and could not be started again yet"
            loop = asyncio.get_running_loop()
            self._recovery_timer = loop.call_later(RECOVERY_TIMEOUT, self._batcher.fail_pending, reason)
        self.update()

    def update(self) -> None:
        """Notify the listener if the health changed."""
        healthy = bool(self._ready) and self._failures < FAILURE_THRESHOLD and not self._registry.all_failed()
        if healthy != self._healthy:
            self._healthy = healthy
            self._listener(healthy)

    def close(self) -> None:
        """Notify the listener no more, and cancel the timer."""
        if self._recovery_timer:
            self._recovery_timer.cancel()
        self._listener = lambda _healthy: None

    async def watch(self, *, canaries: bool) -> None:
        """Update the health regularly, until cancelled.

        Args:
            canaries: True to send a canary whenever no row was answered since the last check.
        """
        answered = -1
        while True:
            await asyncio.sleep(CANARY_INTERVAL)
            if canaries and self._registry.first() and self._ready and self._batcher.stats.answered == answered:
                self._failures = 0 if await self._canary_succeeds() else self._failures + 1
            self.update()
            answered = self._batcher.stats.answered

    async def _canary_succeeds(self) -> bool:
        """Explain a grey image with the first loaded model; return True if the result is a finite score."""
        info, results = self._registry.first(), list[RowResult]()
        if info is None:
            return True
        image = np.full((*info.preprocess.size, info.channels), 128, np.uint8)
        pass_ = Pass(info.key, info.usual_pass, info.preprocess.size, info.default_layers)
        row = Row(image, anything(info), (MethodCall("gradcam"),) if info.default_layers else ())
        try:
            with self._registry.held(info):
                async with asyncio.timeout(self._canary_timeout), self._batcher.admit_stranger(image.nbytes):
                    await self._batcher.submit(pass_, [row], lambda _, result: results.append(result))
        except Exception as error:  # noqa: BLE001 -- whatever the model raises
            log.warning("a canary failed: %s", str(error) or type(error).__name__)
            return False
        if not math.isfinite(results[0].score):
            log.warning("a canary failed: its score is not finite")
            return False
        return True
