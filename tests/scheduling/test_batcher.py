"""Behaviour of the batcher, tested with a fake worker that can be blocked, counted and poisoned."""

import asyncio
import gc
import itertools
import threading
import time
import weakref

import numpy as np
import pytest

from camserve_server.core.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    OutOfMemory,
    ResourceExhausted,
    Unavailable,
    WorkerLost,
)
from camserve_server.engine.values import Row, RowResult
from camserve_server.imaging.values import Preprocess
from camserve_server.methods.values import MethodCall
from camserve_server.models.values import LayerInfo, ModelInfo, Pass
from camserve_server.scheduling import Batcher, policy
from camserve_server.scheduling import capacity as capacity_module
from camserve_server.targets.values import ClassTarget
from camserve_server.telemetry import Origin
from support import StoppedClock, wait_in_loop_until

CAM = Pass("net", "cam", (8, 8), ("layer4",))
SALIENCY = Pass("net", "saliency", (8, 8))


@pytest.fixture(autouse=True)
async def clock():
    """The event loop's clock. It stands still, so that a slow machine changes no order."""
    with StoppedClock() as stopped:
        yield stopped


def row(value, poison=None):
    """Return a row whose score is its own value; a poisoned one fails its batch."""
    image = np.full((1, 1, 3), value % 256, np.uint8)
    return Row(image, ClassTarget(value), copy=0 if poison is None else poison)


class FakeWorker:
    """Fake worker: the score of a row is its target's index.

    Attributes:
        batches: pass and target indices of each batch.
        error: error that poisoned rows raise.
        largest: rows of the largest batch that does not run out of memory; None for no limit.
        free: event; while it is cleared, batches block.
    """

    def __init__(self, error=None, largest=None):
        self.batches = []
        self.error, self.largest = error, largest
        self.free = threading.Event()
        self.free.set()

    def __call__(self, pass_, rows):
        assert self.free.wait(60)
        self.batches.append((pass_, [item.target.index for item in rows]))
        if any(item.copy for item in rows):
            raise self.error
        if self.largest and len(rows) > self.largest:
            raise OutOfMemory("no memory")
        return [RowResult(np.zeros(1, np.float32), item.target, float(item.target.index)) for item in rows]

    @property
    def executed(self):
        return [index for _, indices in self.batches for index in indices]


async def ask(batcher, values, pass_=CAM, poison=(), **options):
    """Submit rows; return their scores in order. A result that arrives twice is an error."""
    scores = {}

    def collect(index, result):
        assert index not in scores
        scores[index] = result.score

    rows = [row(value, poison=1 if value in poison else None) for value in values]
    await batcher.submit(pass_, rows, collect, **options)
    return [scores[index] for index in range(len(values))]


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_each_row_gets_its_own_answer_in_a_shared_batch():
    worker = FakeWorker()
    async with Batcher(worker, max_batch_rows=8) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [i, 1000 + i])) for i in range(100)]
        await settle()
        batcher.resume()
        answers = await asyncio.gather(*calls)

    assert answers == [[float(i), float(1000 + i)] for i in range(100)]


async def test_only_rows_of_the_same_pass_share_a_batch():
    worker = FakeWorker()
    async with Batcher(worker, max_batch_rows=8) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [i], CAM if i % 2 else SALIENCY)) for i in range(16)]
        await settle()
        batcher.resume()
        await asyncio.gather(*calls)

    assert [len(indices) for _, indices in worker.batches] == [8, 8]
    assert all(len({index % 2 for index in indices}) == 1 for _, indices in worker.batches)


@pytest.mark.parametrize("extra", [1, 2, 50])
async def test_full_queue_refuses_exactly_what_does_not_fit(extra):
    worker = FakeWorker()
    refused = []

    async def call(batcher, value):
        try:
            async with batcher.admit(1):
                return await ask(batcher, [value])
        except ResourceExhausted as error:
            refused.append(error)

    async with Batcher(worker, max_batch_rows=4, max_queue_rows=8) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(call(batcher, value)) for value in range(8 + extra)]
        await settle()

        assert len(refused) == batcher.stats.refused == extra
        assert all(0 < error.retry_after <= 5 for error in refused)

        batcher.resume()
        answers = await asyncio.gather(*calls)

    assert sorted(a[0] for a in answers if a) == [float(value) for value in range(8)]
    assert batcher.admitted == 0


async def test_full_queue_refuses_just_as_exactly_while_the_worker_is_busy():
    worker = FakeWorker()
    worker.free.clear()
    async with Batcher(worker, max_batch_rows=4, max_queue_rows=8) as batcher:

        async def call(value):
            async with batcher.admit(1):
                return await ask(batcher, [value])

        calls = [asyncio.create_task(call(value)) for value in range(20)]
        await settle()
        worker.free.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)

    assert sum(isinstance(answer, ResourceExhausted) for answer in answers) == 12


async def test_waiting_requests_are_admitted_in_turn():
    async with Batcher(FakeWorker(), max_queue_rows=2) as batcher:
        most = 0

        async def call(value):
            nonlocal most
            async with batcher.admit(2, wait=True):
                most = max(most, batcher.admitted)
                return await ask(batcher, [value])

        answers = await asyncio.gather(*map(call, range(20)))

    assert most == 2
    assert answers == [[float(value)] for value in range(20)]


async def test_waiting_large_request_is_not_starved_by_small_ones():
    async with Batcher(FakeWorker(), max_queue_rows=4) as batcher:
        got_in = asyncio.Event()

        async def small():
            while not got_in.is_set():
                async with batcher.admit(1, wait=True):
                    await ask(batcher, [1])

        async def large():
            async with batcher.admit(4, wait=True):
                got_in.set()

        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(small())
            await settle()
            group.create_task(large())

    assert batcher.admitted == 0


async def test_cancelled_waiting_request_takes_no_slots():
    async with Batcher(FakeWorker(), max_queue_rows=1) as batcher:

        async def wait():
            async with batcher.admit(1, wait=True):
                pass

        async with batcher.admit(1):
            waiting = [asyncio.create_task(wait()) for _ in range(3)]
            await settle()
            waiting[0].cancel()
        waiting[1].cancel()  # in the same turn of the event loop in which it is admitted
        await asyncio.gather(*waiting, return_exceptions=True)

    assert not waiting[2].cancelled()
    assert batcher.admitted == 0


async def test_request_larger_than_the_queue_is_refused_at_once():
    async with Batcher(FakeWorker(), max_queue_rows=4) as batcher:
        with pytest.raises(InvalidArgument, match="costs 5 rows, and 4 is the limit"):
            async with batcher.admit(5, wait=True):
                pass


async def test_request_whose_deadline_passes_in_the_queue_never_runs(clock):
    worker = FakeWorker()
    async with Batcher(worker) as batcher:
        batcher.pause()
        deadline = asyncio.get_running_loop().time() + 1
        calls = [asyncio.create_task(ask(batcher, [value], deadline=deadline)) for value in range(100)]
        await settle()
        clock.advance(1)
        batcher.resume()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        late = await ask(batcher, [7])

    assert all(isinstance(answer, DeadlineExceeded) for answer in answers)
    assert worker.executed == [7]
    assert late == [7.0]
    assert batcher.stats.expired == 100


async def test_cancelled_request_never_runs():
    worker = FakeWorker()
    async with Batcher(worker) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [value])) for value in range(100)]
        await settle()
        for call in calls[::2]:
            call.cancel()
        await settle()
        batcher.resume()
        await asyncio.gather(*calls, return_exceptions=True)

    assert sorted(worker.executed) == list(range(1, 100, 2))


async def test_cancelled_long_request_stops_after_its_current_batch():
    worker = FakeWorker()
    async with Batcher(worker, max_batch_rows=4) as batcher:
        worker.free.clear()
        call = asyncio.create_task(ask(batcher, range(400)))
        await settle()
        call.cancel()
        await settle()
        worker.free.set()
        await ask(batcher, [1000])

    assert worker.executed == [0, 1, 2, 3, 1000]


async def test_long_request_shares_batches_and_starves_no_other():
    worker = FakeWorker()
    async with Batcher(worker, max_batch_rows=8) as batcher:
        batcher.pause()
        long = asyncio.create_task(ask(batcher, range(512), SALIENCY))
        await settle()
        short = [asyncio.create_task(ask(batcher, [1000 + i], SALIENCY)) for i in range(4)]
        other = asyncio.create_task(ask(batcher, [2000], CAM))
        await settle()
        batcher.resume()
        await asyncio.gather(long, *short, other)

    # The first batch has all short requests, and a part for the long one: none waits for a batch full of its rows.
    assert worker.batches[0] == (SALIENCY, [0, 1, 1000, 1001, 1002, 1003])
    assert worker.batches[1] == (CAM, [2000])  # the other pass has its turn before the remaining 510 rows


async def test_long_request_alone_gets_whole_batches():
    worker = FakeWorker()
    async with Batcher(worker, max_batch_rows=8) as batcher:
        await ask(batcher, range(64), SALIENCY)

    assert [len(indices) for _, indices in worker.batches] == [8] * 8


async def test_short_request_of_another_pass_goes_before_an_older_long_one():
    worker = FakeWorker()
    async with Batcher(worker, max_batch_rows=8) as batcher:
        batcher.pause()
        long = asyncio.create_task(ask(batcher, range(64), SALIENCY))
        await settle()
        short = asyncio.create_task(ask(batcher, [1000], CAM))
        await settle()
        batcher.resume()
        await asyncio.gather(long, short)

    assert worker.batches[0] == (CAM, [1000])
    assert len(worker.batches[1][1]) == 2  # another short request may arrive while this runs


async def test_short_requests_of_other_passes_put_off_a_long_one_for_a_second(clock):
    worker = FakeWorker()

    def timed(pass_, rows):
        clock.advance(0.1)
        return worker(pass_, rows)

    async with Batcher(timed, max_batch_rows=8) as batcher:
        batcher.pause()
        long = asyncio.create_task(ask(batcher, range(9), SALIENCY))

        async def short():
            while not long.done():
                await ask(batcher, [7], CAM)

        calls = [asyncio.create_task(short()) for _ in range(9)]
        await settle()
        batcher.resume()
        await asyncio.gather(*calls)

    turns = [index for index, (pass_, _) in enumerate(worker.batches) if pass_ is SALIENCY]
    between = [later - earlier - 1 for earlier, later in itertools.pairwise([-1, *turns])]
    # Nine rows in batches of two, each after ten batches of short requests, which take a second on this clock.
    assert between == [10] + 4 * [9]


async def test_first_of_many_equal_long_requests_ends_first():
    worker, ended = FakeWorker(), []
    async with Batcher(worker, max_batch_rows=8) as batcher:

        async def long(number):
            await ask(batcher, range(64))
            ended.append((number, len(worker.executed)))

        await asyncio.gather(*map(long, range(16)))

    assert [number for number, _ in ended] == list(range(16))
    assert ended[0][1] <= 2 * 64  # not at the end, together with all others


async def test_long_request_advances_beside_any_number_of_short_ones():
    worker = FakeWorker()
    for room in (1, 2, 8):
        async with Batcher(worker, max_batch_rows=room) as batcher:
            long = asyncio.create_task(ask(batcher, range(40), SALIENCY))
            before = batcher.stats.batches

            async def short(batcher=batcher, long=long):
                while not long.done():
                    await ask(batcher, [7], SALIENCY)

            await asyncio.gather(*(short() for _ in range(30)))

            # At least every fourth batch has a row of the long request; then each short one ends its current call.
            assert batcher.stats.batches - before <= 4 * 40 + 30 + 1


async def test_stream_of_short_requests_does_not_starve_a_long_one():
    worker = FakeWorker()
    async with Batcher(worker, max_batch_rows=2) as batcher:
        long = asyncio.create_task(ask(batcher, range(20), SALIENCY))
        for value in range(2000):
            await ask(batcher, [1000 + value], CAM)
            if long.done():
                break

    assert long.done()
    assert len(worker.batches) < 100


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("error", [NotFound("bad layer"), ValueError("a hook raised"), OutOfMemory("no memory")])
async def test_bad_row_in_a_batch_of_eight_fails_alone(position, error):
    worker = FakeWorker(error=error)
    async with Batcher(worker, max_batch_rows=8) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [value], poison={position})) for value in range(8)]
        await settle()
        batcher.resume()
        answers = await asyncio.gather(*calls, return_exceptions=True)

    assert answers[position] is error
    assert [a for i, a in enumerate(answers) if i != position] == [[float(v)] for v in range(8) if v != position]


async def test_batch_too_large_for_the_device_is_split_and_its_size_remembered():
    worker = FakeWorker(largest=2)
    async with Batcher(worker, max_batch_rows=8) as batcher:
        first = await ask(batcher, range(8))
        tries = len(worker.batches)
        second = await ask(batcher, range(8))

    assert first == second == [float(value) for value in range(8)]
    assert all(len(indices) <= 2 for _, indices in worker.batches[tries:])


async def test_single_row_without_memory_does_not_shrink_later_batches():
    worker = FakeWorker(error=OutOfMemory("no memory"))
    async with Batcher(worker, max_batch_rows=8) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [value], poison={3})) for value in range(8)]
        await settle()
        batcher.resume()
        await asyncio.gather(*calls, return_exceptions=True)
        await ask(batcher, range(8))

    assert len(worker.batches[-1][1]) == 8


async def test_batches_reduced_for_want_of_memory_grow_again(monkeypatch):
    worker = FakeWorker(largest=2)
    async with Batcher(worker, max_batch_rows=8) as batcher:
        await ask(batcher, range(8))
        worker.largest = None
        monkeypatch.setattr(policy, "SHORT_REQUEST_WINDOW", 0.0)  # no short request arrived recently
        await ask(batcher, range(2000))

    assert max(len(indices) for _, indices in worker.batches[20:]) > 2


async def test_model_that_ends_the_program_fails_only_its_own_rows():
    def leave(_pass, rows):
        if rows[0].target.index == 1:
            raise SystemExit
        return [RowResult(np.zeros(1, np.float32), item.target, 7.0) for item in rows]

    async with Batcher(leave) as batcher:
        with pytest.raises(Internal):
            await ask(batcher, [1])

        assert await ask(batcher, [2]) == [7.0]


async def test_error_of_a_collect_callback_fails_only_its_request():
    async with Batcher(FakeWorker()) as batcher:

        def refuse(_index, _result):
            raise ValueError("full")

        with pytest.raises(ValueError, match="full"):
            await batcher.submit(CAM, [row(1)], refuse)

        assert await ask(batcher, [2]) == [2.0]


async def test_missing_result_of_a_row_is_an_error():
    def lossy(_pass, rows):
        return [RowResult(np.zeros(1, np.float32), item.target, 0.0) for item in rows[1:]]

    async with Batcher(lossy) as batcher:
        with pytest.raises(Internal):
            await ask(batcher, [1])


async def test_batch_is_held_back_no_longer_than_max_delay(clock):
    worker = FakeWorker()
    async with Batcher(worker, max_batch_rows=4, max_delay=100) as batcher:
        first = asyncio.create_task(ask(batcher, [1]))
        await settle()
        clock.advance(60)
        second = asyncio.create_task(ask(batcher, [2]))
        await settle()
        held_back = batcher.stats.batches == 0
        clock.advance(40)  # 100 s after the first request arrived
        await asyncio.gather(first, second)
        await ask(batcher, range(4))  # a full batch is not held back: the clock stands still

    assert held_back
    assert [sorted(indices) for _, indices in worker.batches] == [[1, 2], [0, 1, 2, 3]]


async def test_targets_of_one_image_do_not_fill_a_held_back_batch():
    """Four rows of one input leave room for three more inputs: the batch waits for them."""
    worker, image = FakeWorker(), np.zeros((1, 1, 3), np.uint8)
    targets = [Row(image, ClassTarget(index)) for index in range(4)]
    async with Batcher(worker, max_batch_rows=4, max_delay=100) as batcher:
        first = asyncio.create_task(batcher.submit(CAM, targets, lambda *_: None))
        await settle()
        held_back = batcher.stats.batches == 0
        await asyncio.gather(first, *(ask(batcher, [value]) for value in (5, 6, 7)))

    assert held_back
    assert [sorted(indices) for _, indices in worker.batches] == [[0, 1, 2, 3, 5, 6, 7]]


async def test_near_deadline_goes_first():
    worker = FakeWorker()
    async with Batcher(worker, max_batch_rows=1) as batcher:
        batcher.pause()
        now = asyncio.get_running_loop().time()
        calls = [asyncio.create_task(ask(batcher, [value])) for value in range(3)]
        await settle()
        calls.append(asyncio.create_task(ask(batcher, [9], deadline=now + 0.9)))
        await settle()
        batcher.resume()
        await asyncio.gather(*calls)

    assert worker.executed == [9, 0, 1, 2]


async def test_waiting_request_is_answered_when_the_batcher_closes():
    async with Batcher(FakeWorker()) as batcher:
        batcher.pause()
        waiting = asyncio.create_task(ask(batcher, [1]))
        await settle()

    with pytest.raises(Unavailable):
        await waiting


async def test_queue_and_compute_time_are_measured(clock):

    def worker(pass_, rows):
        clock.advance(2)
        return FakeWorker()(pass_, rows)

    async with Batcher(worker, max_batch_rows=8) as batcher:
        batcher.pause()
        calls = asyncio.create_task(batcher.submit(CAM, [row(1), row(2)], lambda _i, _r: None))
        await settle()
        clock.advance(3)
        batcher.resume()
        timings = await calls

    assert (round(timings.queue, 3), round(timings.compute, 3), timings.batch_rows) == (3, 2, 2)


async def test_rows_of_one_input_count_once_in_a_batch():
    """Ten classes of one image need one forward pass, even if a batch has room for only two inputs."""
    worker, image = FakeWorker(), np.zeros((1, 1, 3), np.uint8)
    async with Batcher(worker, max_batch_rows=2) as batcher:
        batcher.pause()
        rows = [Row(image, ClassTarget(value)) for value in range(10)]
        calls = [asyncio.create_task(batcher.submit(CAM, rows, lambda *_: None))]
        calls.append(asyncio.create_task(ask(batcher, [20, 21])))
        await settle()
        batcher.resume()
        await asyncio.gather(*calls)

    assert sorted(len(indices) for _, indices in worker.batches) in ([1, 11], [2, 10])
    assert sorted(worker.executed) == [*range(10), 20, 21]


async def test_workers_run_in_parallel_and_each_row_gets_its_own_answer():
    """The barrier opens only if both run at the same time."""
    meet = threading.Barrier(2)

    class MeetingWorker(FakeWorker):
        def __call__(self, pass_, rows):
            meet.wait(60)
            return super().__call__(pass_, rows)

    workers = MeetingWorker(), MeetingWorker()
    async with Batcher(*workers, max_batch_rows=4) as batcher:
        answers = await asyncio.gather(*(ask(batcher, [value]) for value in range(8)))

    assert answers == [[float(value)] for value in range(8)]
    assert sorted(workers[0].executed + workers[1].executed) == list(range(8))
    assert [len(worker.batches) for worker in workers] == [1, 1]


async def test_rows_go_to_a_free_worker_while_another_is_busy():
    busy, free = FakeWorker(), FakeWorker()
    busy.free.clear()
    async with Batcher(busy, free, max_batch_rows=1) as batcher:
        held = asyncio.create_task(ask(batcher, [0]))
        await settle()
        answers = await asyncio.gather(*(ask(batcher, [value]) for value in range(1, 9)))
        waiting = not held.done()
        busy.free.set()
        await held

    assert waiting
    assert answers == [[float(value)] for value in range(1, 9)]
    assert free.executed == list(range(1, 9))


@pytest.mark.parametrize("slow", [0, 1])
async def test_results_arrive_in_row_order_whichever_worker_is_done_first(slow):
    workers = FakeWorker(), FakeWorker()
    workers[slow].free.clear()
    order = []
    async with Batcher(*workers, max_batch_rows=2) as batcher:
        rows = [row(value) for value in range(12)]
        submitted = asyncio.create_task(
            batcher.submit(CAM, rows, lambda index, result: order.append((index, result.score)))
        )
        await wait_in_loop_until(lambda: len(workers[1 - slow].executed) == 10)
        workers[slow].free.set()
        await submitted

    assert order == [(value, float(value)) for value in range(12)]


async def test_row_that_fails_on_any_worker_fails_alone():
    error = ValueError("a hook raised")
    workers = FakeWorker(error=error), FakeWorker(error=error)
    async with Batcher(*workers, max_batch_rows=4) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [value], poison={5})) for value in range(16)]
        await settle()
        batcher.resume()
        answers = await asyncio.gather(*calls, return_exceptions=True)

    assert answers.pop(5) is error
    assert answers == [[float(value)] for value in range(16) if value != 5]


@pytest.mark.parametrize("workers", [1, 2])
async def test_held_back_rows_of_two_passes_both_run(workers, clock):
    """No new request arrives that would wake a worker for the second pass."""
    async with Batcher(*(FakeWorker() for _ in range(workers)), max_batch_rows=4, max_delay=100) as batcher:
        calls = [asyncio.create_task(ask(batcher, [1], CAM)), asyncio.create_task(ask(batcher, [2], SALIENCY))]
        await settle()
        assert batcher.stats.batches == 0
        clock.advance(100)
        answers = await asyncio.gather(*calls)

    assert answers == [[1.0], [2.0]]


async def test_retry_after_is_shorter_with_more_workers():
    async def retry_after(*workers):
        async with Batcher(*workers, max_queue_rows=100) as batcher, batcher.admit(100):
            with pytest.raises(ResourceExhausted) as refused:
                async with batcher.admit(1):
                    pass
        return refused.value.retry_after

    assert await retry_after(FakeWorker(), FakeWorker()) == pytest.approx(await retry_after(FakeWorker()) / 2)


class Partitions(FakeWorker):
    """Records the partition of each batch, and how many ran at once. The first shared batch waits for a second one."""

    def __init__(self):
        super().__init__()
        self.partitions, self.now, self.most, self.lock = [], 0, 0, threading.Condition()

    def __call__(self, pass_, rows, partition=None):
        with self.lock:
            self.partitions.append((partition, len(rows)))
            self.now += 1
            self.most = max(self.most, self.now)
            self.lock.notify_all()
            assert partition is None or self.lock.wait_for(lambda: self.most == 2, 60)
        try:
            return super().__call__(pass_, rows)
        finally:
            with self.lock:
                self.now -= 1


async def _run_sizes(worker, sizes, **options):
    """Queue one request for each size, in rows, and run them all; return the worker."""
    async with Batcher(worker, max_batch_rows=8, partitioned=True, **options) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [100 * n + i for i in range(size)])) for n, size in enumerate(sizes)]
        await settle()
        batcher.resume()
        answers = await asyncio.gather(*calls)
    assert answers == [[100.0 * n + i for i in range(size)] for n, size in enumerate(sizes)]
    return worker


async def test_waiting_rows_run_in_two_batches_at_once():
    worker = await _run_sizes(Partitions(), [1] * 32)

    assert worker.most == 2
    assert sorted(worker.partitions[:2]) == [(0, 8), (1, 8)]


@pytest.mark.parametrize(("sizes", "first"), [([1] * 2, [1, 1]), ([1] * 7, [3, 4]), ([9], [4, 5]), ([5, 8], [6, 7])])
async def test_fewer_rows_are_divided_evenly_between_two_batches(sizes, first):
    worker = await _run_sizes(Partitions(), sizes)

    assert worker.most == 2
    assert sorted(rows for _, rows in worker.partitions) == first


async def test_single_row_gets_the_whole_worker():
    worker = await _run_sizes(Partitions(), [1])

    assert worker.partitions == [(None, 1)]


async def test_full_batch_that_was_held_back_is_not_divided():
    worker = await _run_sizes(Partitions(), [1] * 8, max_delay=100)

    assert worker.partitions == [(None, 8)]


async def test_partition_that_is_free_first_leaves_half_to_the_other():
    partitions, free, begun = [], (threading.Event(), threading.Event()), threading.Semaphore(0)

    def worker(pass_, rows, partition):
        partitions.append((partition, len(rows)))
        begun.release()
        assert free[partition].wait(60)
        return FakeWorker()(pass_, rows)

    async with Batcher(worker, max_batch_rows=8, partitioned=True) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [i])) for i in range(2)]
        await settle()
        batcher.resume()
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=60)
        calls += [asyncio.create_task(ask(batcher, [i])) for i in range(7)]
        await settle()
        free[1].set()
        assert await asyncio.to_thread(begun.acquire, timeout=60)
        free[0].set()
        await asyncio.gather(*calls)

    assert sorted(partitions[:2]) == [(0, 1), (1, 1)]
    assert partitions[2] == (1, 4)


async def test_targets_of_one_image_are_not_divided_between_partitions():
    """Each partition would have to run the image."""
    worker = Partitions()
    image = np.zeros((1, 1, 3), np.uint8)
    async with Batcher(worker, partitioned=True) as batcher:
        await batcher.submit(CAM, [Row(image, ClassTarget(index)) for index in range(6)], lambda _index, _result: None)

    assert worker.partitions == [(None, 6)]


async def test_long_request_shares_no_worker_while_short_ones_arrive():
    worker = await _run_sizes(Partitions(), [1, 200])

    assert {partition for partition, _ in worker.partitions} == {None}


async def test_long_requests_alone_share_a_worker(monkeypatch):
    monkeypatch.setattr(policy, "SHORT_REQUEST_WINDOW", -1.0)

    assert (await _run_sizes(Partitions(), [200])).most == 2


async def test_bad_row_in_a_partition_fails_alone():
    worker = Partitions()
    worker.error = NotFound("bad layer")
    async with Batcher(worker, max_batch_rows=8, partitioned=True) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [i], poison={3, 12})) for i in range(32)]
        await settle()
        batcher.resume()
        answers = await asyncio.gather(*calls, return_exceptions=True)

    assert [i for i, answer in enumerate(answers) if isinstance(answer, NotFound)] == [3, 12]
    assert all(answers[i] == [float(i)] for i in set(range(32)) - {3, 12})


async def test_no_batch_gets_the_whole_worker_while_another_runs():
    worker, starts = Partitions(), []

    def recorded(pass_, rows, partition=None):
        with worker.lock:
            starts.append((partition, worker.now))
        return worker(pass_, rows, partition)

    async with Batcher(recorded, max_batch_rows=4, partitioned=True) as batcher:
        for burst in (40, 3, 17, 9, 1, 30):
            calls = [asyncio.create_task(ask(batcher, [i])) for i in range(burst)]
            await asyncio.gather(*calls)

    assert {partition for partition, _ in starts} == {None, 0, 1}
    assert all(running == 0 for partition, running in starts if partition is None)


async def test_row_that_arrives_while_partition_1_holds_back_is_not_forgotten(clock):
    free = {0: threading.Event(), 1: threading.Event()}

    def worker(pass_, rows, partition=None):
        assert partition is None or free[partition].wait(60)
        return FakeWorker()(pass_, rows)

    async with Batcher(worker, max_batch_rows=2, max_delay=100, partitioned=True) as batcher:
        calls = [asyncio.create_task(ask(batcher, [i])) for i in range(4)]
        await settle()
        free[1].set()
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        calls.append(asyncio.create_task(ask(batcher, [9])))
        await settle()  # partition 1 holds that row back for a full batch
        free[0].set()
        await asyncio.wait(calls[:4])
        await settle()
        clock.advance(100)
        assert await asyncio.gather(*calls) == [[0.0], [1.0], [2.0], [3.0], [9.0]]


async def test_running_requests_are_answered_when_the_batcher_closes():
    worker = FakeWorker()
    worker.free.clear()
    async with Batcher(worker) as batcher:
        calls = [asyncio.create_task(ask(batcher, [i])) for i in range(3)]
        await settle()
        calls[0].add_done_callback(lambda _: worker.free.set())
    answers = await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(answer, Unavailable) for answer in answers)


async def test_error_of_the_telemetry_sink_fails_no_batch(caplog):
    class BrokenSink:
        def batch_finished(self, _ran):
            raise RuntimeError("no room for another series")

    worker = FakeWorker()
    async with Batcher(worker) as batcher:
        batcher.telemetry = BrokenSink()
        assert await ask(batcher, [1, 2, 3]) == [1.0, 2.0, 3.0]

    assert len(worker.batches) == 1
    assert "a batch could not be reported to telemetry" in caplog.text


def asked_by(caller, *arguments, **options):
    """Submit rows as a caller; return the task."""
    return asyncio.create_task(ask(*arguments, origin=Origin(caller), **options))


def passes(number):
    return [Pass("net", "cam", (8, 8), (f"layer{place}",)) for place in range(number)]


@pytest.mark.parametrize("returning", [False, True])
async def test_at_most_one_batch_of_others_runs_before_a_new_caller(returning):
    """Even if the greedy caller has 150 older and more urgent requests, each of its own pass."""
    worker = FakeWorker()
    async with Batcher(worker, max_batch_rows=8) as batcher:
        if returning:
            await asked_by("modest", batcher, [7])
        worker.free.clear()
        soon = asyncio.get_running_loop().time() + policy.DEADLINE_MARGIN
        greedy = [asked_by("greedy", batcher, [1], pass_, deadline=soon) for pass_ in passes(150)]
        await wait_in_loop_until(lambda: batcher.stats.batches == 1 + returning)
        modest = asked_by("modest", batcher, [1000], SALIENCY)
        await settle()
        worker.free.set()
        await asyncio.gather(*greedy, modest)

    before = worker.executed[returning:].index(1000)
    assert before <= 1


async def test_callers_take_turns():
    worker = FakeWorker()
    async with Batcher(worker, max_batch_rows=8) as batcher:
        batcher.pause()
        calls = [asked_by("a", batcher, [1], pass_) for pass_ in passes(20)]
        calls += [asked_by("b", batcher, [2], Pass("net", "score", (8, 8))), asked_by("b", batcher, [2], SALIENCY)]
        calls += [asked_by("c", batcher, list(range(100, 140)), Pass("net", "bias", (8, 8)))]
        await settle()
        batcher.resume()
        await asyncio.gather(*calls)

    first = [indices[0] for _, indices in worker.batches[:6]]
    assert first == [1, 2, 100, 1, 2, 102]


async def test_batch_starts_with_the_next_caller_and_is_filled_by_others():
    worker = FakeWorker()
    async with Batcher(worker, max_batch_rows=4) as batcher:
        batcher.pause()
        calls = [asked_by("greedy", batcher, [1]) for _ in range(100)]
        await settle()
        calls += [asked_by("modest", batcher, [2]), asked_by("other", batcher, [3])]
        await settle()
        batcher.resume()
        await asyncio.gather(*calls)

    assert [sorted(indices) for _, indices in worker.batches[:2]] == [[1, 1, 2, 3], [1, 1, 1, 1]]


async def test_cancelled_requests_release_their_images_at_once():
    async with Batcher(FakeWorker()) as batcher:
        batcher.pause()
        rows = [row(value) for value in range(50)]
        images = [weakref.ref(item.image) for item in rows]
        calls = [asyncio.create_task(batcher.submit(CAM, [rows.pop()], lambda *_: None)) for _ in range(50)]
        await settle()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        del calls, call
        await settle()
        gc.collect()

        assert batcher.waiting == 0
        assert [image() for image in images if image() is not None] == []


@pytest.mark.parametrize(
    "kind", [StopIteration, StopAsyncIteration, asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit]
)
async def test_error_from_a_model_fails_only_its_own_request(kind):
    def worker(_pass, rows):
        if rows[0].target.index == 1:
            raise kind
        return [RowResult(np.zeros(1, np.float32), item.target, 7.0) for item in rows]

    async with Batcher(worker, max_batch_rows=1) as batcher:
        bad, good = await asyncio.gather(ask(batcher, [1]), ask(batcher, [2]), return_exceptions=True)

        assert isinstance(bad, Internal | RuntimeError)
        assert good == [7.0]
        assert await ask(batcher, [3]) == [7.0]


# --- capacity of a batch ---


def heavy(image, target, methods=4):
    return Row(image, ClassTarget(target), tuple(MethodCall("kpcacam", {"kernel": str(k)}) for k in range(methods)))


async def test_first_batch_of_unmeasured_heavy_maps_is_small():
    worker, image = FakeWorker(), np.zeros((1, 1, 3), np.uint8)
    async with Batcher(worker) as batcher:
        await batcher.submit(CAM, [heavy(image, target) for target in range(16)], lambda *_: None)

    assert len(worker.batches[0][1]) * 4 <= capacity_module.UNMEASURED // 4


def test_batch_size_is_bounded_by_the_measured_cost_of_rows():
    capacity = capacity_module.Capacity(8, 60.0)
    kind, rows = capacity_module.kind_of(CAM, row(1)), [row(value) for value in range(9)]

    def fits():
        budget = capacity.budget(CAM, 8)
        return sum(budget.take(item, capacity.seconds_of(kind), 8) for item in rows)

    assert fits() == 8
    for each, most in ((0.1, 8), (0.5, 6), (0.6, 4), (60.0, 1)):
        capacity.record_seconds({kind: fits()}, each * fits())
        assert fits() == most
    for _ in range(2):
        capacity.record_seconds({kind: 1}, 0.01)
    assert fits() == 8


def test_batch_has_at_least_one_row():
    room, (first, second) = capacity_module.Capacity(8, 60.0).budget(CAM, 8), (row(1), row(2))

    assert room.take(first, 1e9, 8)
    assert not room.take(second, 0.1, 8)


def test_number_of_remembered_row_costs_is_limited():
    capacity = capacity_module.Capacity(8, 60.0)
    for pass_ in passes(3 * capacity_module.MAX_REMEMBERED_KINDS):
        capacity.record_seconds({capacity_module.kind_of(pass_, row(1)): 1}, 1.0)

    assert len(capacity._costs) == capacity_module.MAX_REMEMBERED_KINDS
    capacity.forget("net")
    assert not capacity._costs


# --- lost workers ---


class Deadly(FakeWorker):
    """Fake worker that dies for a poisoned row, together with a batch that runs beside it."""

    def __init__(self, never_began=0):
        super().__init__()
        self.deaths, self.never_began, self.lock = 0, never_began, threading.Condition()
        self.running, self.partitions, self.dead = [], [], {}

    def __call__(self, pass_, rows, partition=None):
        batch = [item.target.index for item in rows]
        with self.lock:
            if self.never_began:
                self.never_began -= 1
                raise WorkerLost("lost before")
            self.batches.append((pass_, batch))
            self.running.append(batch)
            self.partitions.append((len(batch), partition, len(self.running)))
            self.lock.notify_all()
            # The first two batches run beside each other.
            assert partition is None or self.lock.wait_for(lambda: len(self.partitions) > 1, 60)
            if any(item.copy for item in rows) and id(batch) not in self.dead:
                self.deaths += 1
                self.dead |= {id(other): (self.deaths, len(self.running) - 1) for other in self.running}
            self.running.remove(batch)
        if id(batch) in self.dead:
            death, others = self.dead[id(batch)]
            raise WorkerLost("the worker crashed: exit -11", process_id=death, others=others)
        return [RowResult(np.zeros(1, np.float32), item.target, float(item.target.index)) for item in rows]


async def run_on(worker, count=8, poison=(), partitioned=False):
    """Queue requests of one row each, and run them; return the answers or errors."""
    async with Batcher(worker, max_batch_rows=8, partitioned=partitioned) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [value], poison=poison)) for value in range(count)]
        await settle()
        batcher.resume()
        return await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("position", [0, 5, 7])
async def test_lethal_request_runs_at_most_twice_and_fails_no_other(position, partitioned):
    worker = Deadly()
    answers = await run_on(worker, poison={position}, partitioned=partitioned)

    assert worker.deaths == 2
    assert isinstance(answers[position], Internal)
    assert "the worker crashed: exit -11" in str(answers[position])
    assert [answer for i, answer in enumerate(answers) if i != position] == [
        [float(i)] for i in range(8) if i != position
    ]


async def test_request_that_was_alone_when_its_worker_died_is_not_run_again():
    worker = Deadly()
    (answer,) = await run_on(worker, 1, poison={0})

    assert worker.deaths == len(worker.batches) == 1
    assert isinstance(answer, Internal)


async def test_batch_that_its_worker_never_received_is_run_again():
    worker = Deadly(never_began=3)

    assert await run_on(worker, 2) == [[0.0], [1.0]]


async def test_neighbour_of_a_lethal_request_is_answered_if_no_process_received_its_rerun():
    """The process that the lethal request ended is not yet replaced when the neighbours are run again."""
    worker = Deadly()

    def run(*batch):
        if worker.deaths and len(worker.batches) in (1, 2, 4):
            worker.batches.append(None)
            raise WorkerLost("lost before")
        return worker(*batch)

    answers = await run_on(run, poison={0})

    assert worker.batches.count(None) == 3
    assert isinstance(answers[0], Internal)
    assert answers[1:] == [[float(value)] for value in range(1, 8)]


async def test_request_that_may_have_killed_a_worker_runs_alone():
    worker = Deadly()
    answers = await run_on(worker, 16, poison={3, 12}, partitioned=True)

    assert worker.partitions[2:] == [(1, None, 1)] * 16
    assert [i for i, answer in enumerate(answers) if isinstance(answer, Internal)] == [3, 12]


async def test_request_waiting_for_a_rerun_fails_if_no_worker_returns():
    worker, loop = Deadly(), asyncio.get_running_loop()

    def dying(*batch):
        try:
            return worker(*batch)
        finally:
            loop.call_soon_threadsafe(batcher.pause)

    async with Batcher(dying) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [value], poison={1})) for value in range(3)]
        await settle()
        batcher.resume()
        await wait_in_loop_until(lambda: batcher._executor.reruns)
        batcher.fail_pending("no worker is available")
        answers = await asyncio.gather(*calls, return_exceptions=True)

    assert {type(answer) for answer in answers} == {Unavailable}


def layered(**sizes):
    """Return a model with these modules, by the number of values that each outputs."""
    layers = {name: LayerInfo(name, "Conv2d", (1, size, 1, 1), 0, 1, None) for name, size in sizes.items()}
    preprocess = Preprocess((8, 8), 8, "bilinear", (0, 0, 0), (1, 1, 1))
    return ModelInfo("net", "", "none", "", (), 1, 0, preprocess, layers, "layer4", "float32", "cpu")


@pytest.mark.parametrize(
    ("kind", "layers", "inputs"),
    [
        ("score", (), 8),
        ("cam", ("layer16",), 3),  # nothing after it is kept, and there are eight copies of its own maps
        ("saliency", (), 3),  # nearly all outputs of 16 layers of 16 KiB
        ("cam", ("layer1",), 2),
        ("bias", (), 1),
        ("inspect", (), 1),
        ("curvature", ("layer1",), 1),
    ],
)
async def test_number_of_inputs_in_a_batch_is_limited_by_memory(kind, layers, inputs):
    worker, pass_ = FakeWorker(), Pass("net", kind, (8, 8), layers)
    async with Batcher(worker, max_batch_rows=8) as batcher:
        batcher.allow(768 * 2**10)
        batcher.learn("net", layered(**{f"layer{place}": 4096 for place in range(1, 17)}))
        await batcher.submit(pass_, [row(value) for value in range(24)], lambda *_: None)

    assert max(len(batch) for _, batch in worker.batches) == inputs


class ParallelRecorder(FakeWorker):
    """Records for each batch which others run when it starts."""

    def __init__(self):
        super().__init__()
        self.running, self.starts, self.lock = [], [], threading.Lock()

    def __call__(self, pass_, rows, partition=None):
        with self.lock:
            self.running.append(pass_.kind)
            self.starts.append((partition, *self.running))
        time.sleep(0.002)  # real timeout: another batch may start meanwhile, and none of those that must not
        try:
            return super().__call__(pass_, rows)
        finally:
            with self.lock:
                self.running.remove(pass_.kind)


async def test_input_that_needs_more_than_half_of_the_memory_runs_alone():
    worker = ParallelRecorder()
    passes = [Pass("net", "bias", (8, 8)), Pass("net", "cam", (8, 8), ("layer16",))]
    async with Batcher(worker, partitioned=True) as batcher:
        batcher.allow(300 * 2**10)
        batcher.learn("net", layered(**{f"layer{place}": 4096 for place in range(1, 17)}))
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [i], passes[i % 2])) for i in range(40)]
        await settle()
        batcher.resume()
        answers = await asyncio.gather(*calls)

    assert answers == [[float(i)] for i in range(40)]
    assert {(partition, len(running)) for partition, *running in worker.starts if "bias" in running} == {(None, 1)}
    assert sum(running == ["bias"] for _, *running in worker.starts) == 20


async def test_forgotten_model_does_not_limit_batches_of_others():
    worker = FakeWorker()
    async with Batcher(worker, max_batch_rows=8) as batcher:
        batcher.allow(1)
        batcher.learn("net", layered(layer4=1024))
        await batcher.submit(SALIENCY, [row(value) for value in range(8)], lambda *_: None)
        batcher.forget("net")
        await batcher.submit(SALIENCY, [row(value) for value in range(8)], lambda *_: None)

    assert [len(batch) for _, batch in worker.batches[:8]] == [1] * 8
    assert len(worker.batches) < 16
