"""Functions that run in a thread while the event loop goes on."""

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads(Protocol):
    """Threads that run functions."""

    def submit(self, function: Callable[[], object], /) -> object:
        """Run a function in one of them."""


async def in_thread(threads: Threads, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in one of some threads; one whose caller has given up meanwhile is not begun.

    As the event loop's own `run_in_executor`, which keeps two futures for it, and calls some sixty functions more.
    An exception that would end a loop, a task or the program is raised here as a RuntimeError: see `contained`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        if done.cancelled():
            return
        try:
            result = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, it is the caller's
            # Without this frame, which refers to the future: the cycle would keep the function's arguments in memory
            # until the next garbage collection.
            own = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            loop.call_soon_threadsafe(_fail, done, contained(own))
            del own
        else:
            loop.call_soon_threadsafe(_settle, done, result)

    threads.submit(work)
    return await done


def _settle(done: asyncio.Future[Any], result: object) -> None:
    if not done.done():
        done.set_result(result)


def contained(error: BaseException) -> Exception:
    """Return an error that affects only the caller that waits for the function which raised it.

    A future refuses a StopIteration, so the caller would wait for ever. StopAsyncIteration would end an asynchronous
    loop, CancelledError the task that waits, SystemExit and KeyboardInterrupt the program.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    raised = RuntimeError(f"{type(error).__name__} was raised in a thread")
    raised.__cause__ = error
    return raised


def _fail(done: asyncio.Future[Any], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
