"""Functions in threads, beside an event loop that goes on."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from camserve_server.threads import in_thread


@pytest.fixture
def one():
    with ThreadPoolExecutor(1) as threads:
        yield threads


async def test_a_function_runs_in_a_thread_and_its_result_comes_back(one):
    def work(first, *, second):
        return threading.get_ident(), first + second

    where, what = await in_thread(one, work, 1, second=2)

    assert (where != threading.get_ident(), what) == (True, 3)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), asyncio.CancelledError()])
async def test_what_it_raises_its_caller_gets(one, error):
    def work():
        raise error

    with pytest.raises(type(error)) as found:
        await in_thread(one, work)
    assert found.value is error or isinstance(error, asyncio.CancelledError)
    assert await in_thread(one, int) == 0  # the thread is there for others


async def test_what_waits_for_a_thread_is_not_begun_once_its_caller_has_given_up(one):
    go, begun = threading.Event(), []
    running = asyncio.create_task(in_thread(one, go.wait, 10))
    waiting = asyncio.create_task(in_thread(one, begun.append, 1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()

    assert await running
    assert await in_thread(one, len, begun) == 0


@pytest.mark.parametrize("error", [None, ValueError("no")])
async def test_what_comes_after_its_caller_has_given_up_is_nobodys(one, error):
    begun, go, unheard = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unheard.append(context))

    def work():
        loop.call_soon_threadsafe(begun.set)
        go.wait(10)
        if error:
            raise error

    running = asyncio.create_task(in_thread(one, work))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    go.set()
    await in_thread(one, int)
    await asyncio.sleep(0)

    assert unheard == []
