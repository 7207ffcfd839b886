"""Event loop in a thread of its own, and the crossing between event loops."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Event loop that runs in a thread of its own, of the same kind as the current one.

    Args:
        name: name of the thread.

    Attributes:
        loop: the event loop.
    """

    def __init__(self, name: str) -> None:
        self.loop = type(asyncio.get_running_loop())()
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._closed.wait())

    async def close(self) -> None:
        """Cancel the tasks of the event loop, and wait for the end of its threads."""
        self.loop.call_soon_threadsafe(self._closed.set)
        await asyncio.to_thread(self._thread.join)


async def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a task on another event loop, with the current context variables; return its result.

    If the caller is cancelled, the task is cancelled. In every case the task has ended when this function returns: what
    the caller then releases is not in use any more.
    """
    here, ended = asyncio.get_running_loop(), asyncio.Event()
    tasks: list[asyncio.Task[T]] = []

    def start() -> None:
        tasks.append(loop.create_task(work))
        tasks[0].add_done_callback(end)

    def end(task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # otherwise asyncio would log an error that a cancelled caller does not look at
        here.call_soon_threadsafe(ended.set)

    def cancel() -> None:
        tasks[0].cancel()

    loop.call_soon_threadsafe(start)
    cancelled = False
    while not ended.is_set():
        try:
            await ended.wait()
        except asyncio.CancelledError:
            cancelled = True
            loop.call_soon_threadsafe(cancel)
    if cancelled:
        raise asyncio.CancelledError
    return tasks.pop().result()  # popped: an error's traceback refers to this frame, which would refer to the error
