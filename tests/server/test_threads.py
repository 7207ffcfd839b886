"""Functions in threads, beside an event loop that goes on."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from camserve_server.scheduling.admission import FairThreads
from camserve_server.scheduling.threads import in_thread


@pytest.fixture
def one():
    with ThreadPoolExecutor(1) as threads:
        yield threads


async def test_a_function_runs_in_a_thread_and_its_result_comes_back(one):
    def work(first, *, second):
        return threading.get_ident(), first + second

    where, what = await in_thread(one, work, 1, second=2)

    assert (where != threading.get_ident(), what) == (True, 3)


def raising(error):
    def work():
        raise error

    return work


async def test_an_error_reaches_the_caller_as_it_is(one):
    error = ValueError("no")
    with pytest.raises(ValueError, match="no") as found:
        await in_thread(one, raising(error))

    assert found.value is error
    assert await in_thread(one, int) == 0  # the thread is there for others


@pytest.mark.parametrize(
    "error",
    [StopIteration(), StopAsyncIteration(), asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
async def test_error_that_would_end_more_than_a_request_is_contained(one, error):
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match=type(error).__name__) as found:
            await in_thread(one, raising(error))

    assert found.value.__cause__ is error
    assert await in_thread(one, int) == 0


async def test_callers_take_turns_in_threads_one_step_each(one):
    """A new caller is next, however many steps another caller has sent."""
    threads, order, begun, go = FairThreads(one), [], threading.Event(), threading.Event()

    def step(caller):
        order.append(caller)
        begun.set()
        go.wait(10)

    def ask(caller, count):
        return [in_thread(threads.of(caller), step, caller) for _ in range(count)]

    async def asked(caller, count):
        await asyncio.gather(*ask(caller, count))

    greedy = asyncio.create_task(asked("greedy", 34))
    await asyncio.to_thread(begun.wait, 10)
    modest = [asyncio.create_task(asked("modest", 2)), asyncio.create_task(asked("other", 1))]
    for _ in range(5):
        await asyncio.sleep(0)
    go.set()
    await asyncio.gather(greedy, *modest)

    assert order[:6] == ["greedy", "modest", "other", "greedy", "modest", "greedy"]


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
