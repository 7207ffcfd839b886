"""Run blocking functions in threads, without blocking the event loop."""

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads(Protocol):
    """Protocol of a thread pool."""

    def submit(self, function: Callable[[], object], /) -> object:
        """Run a function in one of the threads."""


async def in_thread(threads: Threads, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in one of the threads, and return its result; it is skipped if the caller was cancelled.

    It replaces the event loop's `run_in_executor`, which uses two futures and calls about sixty more functions.
    An exception that would end a loop, a task or the program is raised here as a RuntimeError: see `contained`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        if done.cancelled():
            return
        try:
            result = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 -- any error is passed on to the caller
            # The traceback must not contain this frame, which refers to the future: that cycle would keep the
            # function's arguments in memory until the next garbage collection.
            stripped = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            loop.call_soon_threadsafe(_set_exception, done, contained(stripped))
            del stripped
        else:
            loop.call_soon_threadsafe(_set_result, done, result)

    threads.submit(work)
    return await done


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
