"""Functions that run in threads, without blocking the event loop."""

import asyncio
import gc
import logging
import threading
import weakref
from contextlib import closing
from functools import partial

import pytest

from camserve_server.scheduling.admission import FairThreads
from camserve_server.scheduling.threads import ThreadPool, in_thread


@pytest.fixture
def pool():
    with closing(ThreadPool(1, "test")) as threads:
        yield threads


def test_closing_a_pool_runs_what_was_submitted_and_ends_its_threads():
    ran, go = [], threading.Event()
    pool = ThreadPool(2, "closing")
    pool.submit(lambda: go.wait(60))
    for number in range(20):
        pool.submit(lambda number=number: ran.append(number))
    go.set()
    pool.close()

    assert sorted(ran) == list(range(20))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("closing")]


def test_thread_outlives_a_function_that_raises(pool, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("camserve_server"), "propagate", True)
    done = threading.Event()
    pool.submit(lambda: 1 / 0)
    pool.submit(done.set)

    assert done.wait(60)
    assert "a function in a thread failed" in caplog.text


def test_idle_thread_keeps_no_reference_to_its_last_function(pool):
    class Photo:
        pass

    photo, done = Photo(), threading.Event()
    gone = weakref.ref(photo)
    pool.submit(partial(id, photo))
    del photo
    pool.submit(done.set)
    assert done.wait(60)
    gc.collect()

    assert gone() is None


async def test_function_runs_in_a_thread_and_its_result_is_returned(pool):
    def work(first, *, second):
        return threading.get_ident(), first + second

    thread, result = await in_thread(pool, work, 1, second=2)

    assert thread != threading.get_ident()
    assert result == 3


def raising(error):
    def work():
        raise error

    return work


async def test_error_reaches_the_caller_unchanged(pool):
    error = ValueError("no")
    with pytest.raises(ValueError, match="no") as caught:
        await in_thread(pool, raising(error))

    assert caught.value is error
    assert await in_thread(pool, int) == 0  # the thread still runs other functions


@pytest.mark.parametrize(
    "error",
    [StopIteration(), StopAsyncIteration(), asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
async def test_error_that_would_end_more_than_a_request_is_contained(pool, error):
    with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
        await in_thread(pool, raising(error))

    assert caught.value.__cause__ is error
    assert await in_thread(pool, int) == 0


async def test_callers_take_turns_in_threads_one_step_each(pool):
    """A new caller is next, however many steps another one has submitted."""
    threads, order, started, go = FairThreads(pool), [], threading.Event(), threading.Event()

    def step(caller):
        order.append(caller)
        started.set()
        go.wait(60)

    async def run(caller, count):
        await asyncio.gather(*(in_thread(threads.of(caller), step, caller) for _ in range(count)))

    greedy = asyncio.create_task(run("greedy", 34))
    await asyncio.to_thread(started.wait, 60)
    modest = [asyncio.create_task(run("modest", 2)), asyncio.create_task(run("other", 1))]
    for _ in range(5):
        await asyncio.sleep(0)
    go.set()
    await asyncio.gather(greedy, *modest)

    assert order[:6] == ["greedy", "modest", "other", "greedy", "modest", "greedy"]


async def test_function_of_a_cancelled_caller_does_not_start(pool):
    go, started = threading.Event(), []
    running = asyncio.create_task(in_thread(pool, go.wait, 60))
    waiting = asyncio.create_task(in_thread(pool, started.append, 1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()

    assert await running
    assert await in_thread(pool, len, started) == 0


async def test_function_of_a_cancelled_caller_is_not_kept(pool):
    class Message:
        pass

    go, message = threading.Event(), Message()
    gone = weakref.ref(message)
    running = asyncio.create_task(in_thread(pool, go.wait, 60))
    waiting = asyncio.create_task(in_thread(pool, id, message))
    del message
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    del waiting
    gc.collect()

    assert gone() is None
    go.set()
    assert await running


@pytest.mark.parametrize("error", [None, ValueError("no")])
async def test_result_for_a_cancelled_caller_is_dropped_silently(pool, error):
    started, go, unhandled = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unhandled.append(context))

    def work():
        loop.call_soon_threadsafe(started.set)
        go.wait(60)
        if error:
            raise error

    running = asyncio.create_task(in_thread(pool, work))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    go.set()
    await in_thread(pool, int)
    await asyncio.sleep(0)

    assert unhandled == []
