"""A request's queue and compute times never add up to more than the request took."""

import asyncio
import itertools
import threading

import numpy as np
import pytest

from camserve_server.engine.values import Row, RowResult
from camserve_server.models.values import Pass
from camserve_server.scheduling import Batcher
from camserve_server.targets.values import ClassTarget
from camserve_server.telemetry import Spent

CAM = Pass("net", "cam", (8, 8), ("layer4",))


def rows(number):
    return [Row(np.full((1, 1, 3), value, np.uint8), ClassTarget(value)) for value in range(number)]


class HeldEngine:
    """Runs a batch on each half once its half is released; counts the batches that have begun."""

    def __init__(self):
        self.begun = threading.Semaphore(0)
        self.released = {half: threading.Event() for half in (0, 1, None)}

    def __call__(self, _pass, batch, half=None):
        self.begun.release()
        assert self.released[half].wait(60)
        return [RowResult(np.zeros(1, np.float32), row.target, 0.0) for row in batch]

    async def wait_until_begun(self, batches):
        for _ in range(batches):
            assert await asyncio.to_thread(self.begun.acquire, timeout=60)


@pytest.fixture
async def clock(monkeypatch):
    """The event loop's clock, which stands still until the test sets it, except that no two readings are equal."""
    now, readings = [100.0], itertools.count()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0] + next(readings) * 1e-9)
    return now


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def test_waiting_beside_a_batch_that_runs_counts_as_compute_once():
    spent = Spent()
    spent.change(0.0, submitted=1)
    spent.change(1.0, running=1)
    spent.change(2.0, submitted=1)  # more rows wait while the first batch runs
    spent.change(3.0, running=1)  # and two batches run at once
    spent.change(5.0, running=-1)
    spent.change(6.0, running=-1)
    spent.change(8.0, submitted=-2)
    spent.change(99.0, submitted=1)  # time between two calls belongs to neither

    assert (spent.queue, spent.compute) == (1.0 + 2.0, 5.0)


async def test_two_half_batches_of_one_request_count_their_common_time_once(clock):
    engine = HeldEngine()
    async with Batcher(engine, max_batch_rows=4, partitioned=True) as batcher:
        call = asyncio.create_task(batcher.submit(CAM, rows(8), lambda *_: None))
        await engine.wait_until_begun(2)
        clock[0] += 3.0
        for half in (0, 1):
            engine.released[half].set()
        spent = await call

    assert (spent.queue, spent.compute) == pytest.approx((0.0, 3.0), abs=1e-3)


async def test_passes_submitted_together_share_the_time_of_their_request(clock):
    """An evaluation gathers several submissions, and each of them waits while the others run."""
    engine, spent = HeldEngine(), Spent()
    engine.released[None].set()
    other = Pass("net", "cam", (8, 8), ("layer3",))
    async with Batcher(engine, max_batch_rows=4) as batcher:
        batcher.pause()
        calls = [
            asyncio.create_task(batcher.submit(one, rows(4), lambda *_: None, spent=spent)) for one in (CAM, other)
        ]
        await settle()
        clock[0] += 2.0
        batcher.resume()
        await asyncio.gather(*calls)

    assert (spent.queue, spent.compute) == pytest.approx((2.0, 0.0), abs=1e-3)
    assert (spent.submitted, spent.running) == (0, 0)
