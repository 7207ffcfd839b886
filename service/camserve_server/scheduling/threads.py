"""Run blocking functions in threads, without blocking the event loop."""

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Threads(Protocol):
    """Protocol of a thread pool."""

    def submit(self, function: Callable[[], object], /) -> object:
        """Run a function in one of the threads."""


class ThreadPool:
    """Threads that run functions in the order in which they are submitted.

    A `concurrent.futures.ThreadPoolExecutor` makes a future with a lock for each function, which nobody here waits for:
    submitting takes 8 us instead of 1.

    Args:
        count: number of threads.
        name: name of the threads, which is followed by their number.
    """

    def __init__(self, count: int, name: str) -> None:
        self._functions: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}_{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Run what was submitted, and wait for the threads to end."""
        for _thread in self._threads:
            self._functions.put(None)
        for thread in self._threads:
            thread.join()

    def submit(self, function: Callable[[], object], /) -> None:
        """Run a function in one of the threads; an error that it raises is logged."""
        self._functions.put(function)

    def _work(self) -> None:
        while (function := self._functions.get()) is not None:
            try:
                function()
            except Exception:  # such as an event loop that was closed meanwhile; the thread must stay
                log.exception("a function in a thread failed")
            del function  # it may refer to a photo


async def in_thread(threads: Threads, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in one of the threads, and return its result; it is skipped if the caller was cancelled.

    It replaces the event loop's `run_in_executor`, which uses two futures and calls about sixty more functions.
    An exception that would end a loop, a task or the program is raised here as a RuntimeError: see `contained`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    waiting = [partial(function, *args, **kwargs)]  # emptied when this call is cancelled: the queue keeps `work` longer
    del function, args, kwargs

    def work() -> None:
        try:
            run = waiting.pop()
        except IndexError:  # cancelled
            return
        try:
            result = run()
        except BaseException as error:  # noqa: BLE001 -- any error is passed on to the caller
            # The traceback must not contain this frame, which refers to the future: that cycle would keep the
            # function's arguments in memory until the next garbage collection.
            stripped = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            loop.call_soon_threadsafe(_set_exception, done, contained(stripped))
            del stripped
        else:
            loop.call_soon_threadsafe(_set_result, done, result)

    threads.submit(work)
    try:
        return await done
    finally:
        waiting.clear()


def _set_result(done: asyncio.Future[Any], result: object) -> None:
    if not done.done():
        done.set_result(result)


def contained(error: BaseException) -> Exception:
    """Return an error as one that is safe to set on a future and raise in the waiting caller.

    A future refuses a StopIteration, so the caller would wait forever. StopAsyncIteration would end an asynchronous
    loop, CancelledError the task that waits, and SystemExit and KeyboardInterrupt the program.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    raised = RuntimeError(f"{type(error).__name__} was raised in a thread")
    raised.__cause__ = error
    return raised


def _set_exception(done: asyncio.Future[Any], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
