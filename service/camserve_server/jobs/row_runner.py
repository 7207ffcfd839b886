"""Run the rows of a request, a limited number at a time."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import partial
from typing import Protocol, TypeVar

from camserve_server.engine.values import Row, RowResult
from camserve_server.jobs.values import Collect, Submit
from camserve_server.methods.kinds import Array
from camserve_server.methods.values import Edit
from camserve_server.models.values import Pass

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with the number of rows done and the number of all rows."""


class Executor(Protocol):
    """Runs a slow function without blocking the event loop."""

    def __call__(self, function: Callable[..., T], /, *args: object) -> Awaitable[T]:
        """Return the function's result."""


async def call_directly(function: Callable[..., T], /, *args: object) -> T:
    """Call a function in the current thread: the executor of tests and tools."""
    return function(*args)


def ignore_progress(_done: int, _rows: int) -> None:
    """Ignore the progress of a request."""


def next_edits(search: Generator[Sequence[Edit], Array, T], results: Array | None) -> tuple[Sequence[Edit], T | None]:
    """Send a method or metric the results of its last edits.

    Args:
        search: the generator of the method or metric: it yields edits, and returns what it made of their results.
        results: the results of its last edits; None to start it.

    Returns:
        The next edits and None; at the end, no edits and the return value of the generator.
    """
    try:
        return (next(search) if results is None else search.send(results)), None
    except StopIteration as stop:
        return (), stop.value


class RowRunner:
    """Runs the rows of a request, a limited number at a time, and reports its progress.

    Args:
        submit: runs rows.
        chunk: maximum number of rows queued or running at a time.
        rows: number of all rows of the request.
        progress: called after each chunk with the number of rows done and the number of all rows.
        execute: runs slow functions without blocking the event loop.
    """

    def __init__(self, submit: Submit, chunk: int, rows: int, progress: Progress, execute: Executor) -> None:
        self.execute = execute
        self._submit = submit
        self._rows = rows
        self._progress = progress
        self._done = 0
        self._chunk = chunk
        self._slots = _Slots(chunk)

    async def run(self, pass_: Pass, rows: Sequence[Row], collect: Collect) -> None:
        """Run rows; call `collect` with the index and the result of each row as soon as it is available."""
        if len(rows) <= self._chunk:
            await self._run_chunk(pass_, rows, collect)
            return
        for start in range(0, len(rows), self._chunk):
            await self._run_chunk(pass_, rows[start : start + self._chunk], partial(_collect_from, start, collect))

    async def gather(self, parts: Sequence[tuple[int, Callable[[], Awaitable[T]]]]) -> list[T]:
        """Run parts of the request concurrently, and return their results in order.

        A part makes its edits and maps while it runs. So parts run at the same time only if the sum of their rows is
        within the limit on rows under way; a part with more rows than that runs alone.

        Args:
            parts: the number of rows of each part, and the function that runs it.
        """
        slots = _Slots(self._chunk)

        async def run(rows: int, part: Callable[[], Awaitable[T]]) -> T:
            needed = min(rows, self._chunk)
            await slots.acquire(needed)
            try:
                return await part()
            finally:
                slots.release(needed)

        tasks = [asyncio.ensure_future(run(*part)) for part in parts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _run_chunk(self, pass_: Pass, rows: Sequence[Row], collect: Collect) -> None:
        await self._slots.acquire(len(rows))
        try:
            await self._submit(pass_, rows, collect)
        finally:
            self._slots.release(len(rows))
        self._done += len(rows)
        self._progress(self._done, self._rows)


class _Slots:
    """Semaphore of which a task takes several slots at a time; tasks get them in the order in which they ask.

    Args:
        count: the number of slots.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, count: int) -> None:
        """Take slots, at most as many as the semaphore has, or wait for them."""
        if not self._waiters and count <= self._free:
            self._free -= count
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append((count, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # the slots came in the same turn of the event loop
                self.release(count)
            raise

    def release(self, count: int) -> None:
        """Return slots, and give them to the tasks that wait."""
        self._free += count
        while self._waiters and (self._waiters[0][1].done() or self._waiters[0][0] <= self._free):
            needed, waiter = self._waiters.popleft()
            if not waiter.done():
                self._free -= needed
                waiter.set_result(None)


def _collect_from(start: int, collect: Collect, index: int, result: RowResult) -> None:
    collect(start + index, result)
