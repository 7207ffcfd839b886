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
from camserve_server.telemetry import RequestTimings

CAM = Pass("net", "cam", (8, 8), ("layer4",))


def rows(number):
    return [Row(np.full((1, 1, 3), value, np.uint8), ClassTarget(value)) for value in range(number)]


class BlockedWorker:
    """Fake worker that blocks the batches of each partition until the partition is released."""

    def __init__(self):
        self.started = threading.Semaphore(0)
        self.released = {partition: threading.Event() for partition in (0, 1, None)}

    def __call__(self, _pass, batch, partition=None):
        self.started.release()
        assert self.released[partition].wait(60)
        return [RowResult(np.zeros(1, np.float32), row.target, 0.0) for row in batch]

    async def wait_until_started(self, batches):
        for _ in range(batches):
            assert await asyncio.to_thread(self.started.acquire, timeout=60)


@pytest.fixture
async def clock(monkeypatch):
    """The event loop's clock: it stands still until the test sets it, but no two readings are equal."""
    now, readings = [100.0], itertools.count()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0] + next(readings) * 1e-9)
    return now


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def test_waiting_while_a_batch_runs_counts_as_compute_once():
    timings = RequestTimings()
    timings.change(0.0, submitted=1)
    timings.change(1.0, running=1)
    timings.change(2.0, submitted=1)  # more rows wait while the first batch runs
    timings.change(3.0, running=1)  # now two batches run at once
    timings.change(5.0, running=-1)
    timings.change(6.0, running=-1)
    timings.change(8.0, submitted=-2)
    timings.change(99.0, submitted=1)  # time between two calls belongs to neither

    assert (timings.queue, timings.compute) == (1.0 + 2.0, 5.0)


async def test_two_batches_of_one_request_at_once_count_their_time_once(clock):
    worker = BlockedWorker()
    async with Batcher(worker, max_batch_rows=4, partitioned=True) as batcher:
        call = asyncio.create_task(batcher.submit(CAM, rows(8), lambda *_: None))
        await worker.wait_until_started(2)
        clock[0] += 3.0
        for partition in (0, 1):
            worker.released[partition].set()
        timings = await call

    assert (timings.queue, timings.compute) == pytest.approx((0.0, 3.0), abs=1e-3)


async def test_passes_submitted_together_share_the_time_of_their_request(clock):
    """An evaluation makes several submissions, and each waits while the others run."""
    worker, timings = BlockedWorker(), RequestTimings()
    worker.released[None].set()
    other = Pass("net", "cam", (8, 8), ("layer3",))
    async with Batcher(worker, max_batch_rows=4) as batcher:
        batcher.pause()
        calls = [
            asyncio.create_task(batcher.submit(pass_, rows(4), lambda *_: None, timings=timings))
            for pass_ in (CAM, other)
        ]
        await settle()
        clock[0] += 2.0
        batcher.resume()
        await asyncio.gather(*calls)

    assert (timings.queue, timings.compute) == pytest.approx((2.0, 0.0), abs=1e-3)
    assert (timings.submitted, timings.running) == (0, 0)
