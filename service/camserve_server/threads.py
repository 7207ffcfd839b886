"""Functions that run in a thread while the event loop goes on."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(threads: Executor, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in one of some threads; one whose caller has given up meanwhile is not begun.

    As the event loop's own `run_in_executor`, which keeps two futures for it, and calls some sixty functions more.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        if done.cancelled():
            return
        try:
            result = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, it is the caller's
            loop.call_soon_threadsafe(_fail, done, error)
        else:
            loop.call_soon_threadsafe(_settle, done, result)

    threads.submit(work)
    return await done


def _settle(done: asyncio.Future[Any], result: object) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: asyncio.Future[Any], error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)
