"""Handle of one worker: its threads, and the state of the one or two batches that it runs."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from camserve_server.core.errors import Internal
from camserve_server.engine.values import Partition, Row, RowResult
from camserve_server.models.values import Pass
from camserve_server.scheduling.threads import ThreadPool, in_thread

Run: TypeAlias = Callable[..., list[RowResult]]
"""Function that runs one batch: takes a `Pass` and rows, returns results, and blocks its thread.

For a worker that can run two batches at once, it also takes the partition, 0 or 1: half of the cores, or a stream.
"""


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker, which runs one batch at a time, or two at once on its partitions.

    A batch on the whole worker counts as one of partition 0.

    Attributes:
        run: function that runs a batch.
        threads: threads that wait for it, or compute; one for each batch that may run at once.
        resumed: event, cleared while the worker is paused.
        shared: event, set while partition 1 may run a batch beside that of partition 0.
        inputs: number of inputs that each partition works on.
        second_idle: event, cleared while partition 1 runs a batch.
        running: number of batches that run.
        work: seconds of computing in all batches so far; of a time in which two run, each has half.
        changed: time at which `running` last changed.
    """

    run: Run
    threads: ThreadPool
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    shared: asyncio.Event = field(default_factory=asyncio.Event)
    inputs: list[int] = field(default_factory=lambda: [0, 0])
    second_idle: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    work: float = 0.0
    changed: float = 0.0

    def __post_init__(self) -> None:
        self.second_idle.set()

    def count(self, now: float, batches: int) -> float:
        """Record that a batch begins (1) or ends (-1); return the seconds of work that one batch has had so far.

        The difference of two such values is the time that a batch between them would have taken alone.
        """
        if self.running:
            self.work += (now - self.changed) / self.running
        self.changed = now
        self.running += batches
        return self.work

    async def call(self, pass_: Pass, rows: Sequence[Row], partition: Partition | None) -> list[RowResult]:
        """Run a batch on one partition, or on the whole worker."""
        partitions = () if partition is None else (partition,)
        return await in_thread(self.threads, _run_contained, self.run, pass_, rows, *partitions)

    async def reserve(self) -> None:
        """Wait until partition 1 is idle, and keep it idle."""
        self.shared.clear()
        await self.second_idle.wait()


def _run_contained(run: Run, *arguments: object) -> list[RowResult]:
    """Run a batch; a model that calls `sys.exit` fails its rows, and does not end the server."""
    try:
        return run(*arguments)
    except Exception:
        raise
    except BaseException as error:
        raise Internal("the model tried to end the server") from error
