"""What the batcher promises, shown with an engine that can be held, counted and poisoned."""

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


def row(value, poison=None):
    """A row that is answered with its own value, or that fails its batch."""
    image = np.full((1, 1, 3), value % 256, np.uint8)
    return Row(image, ClassTarget(value), copy=0 if poison is None else poison)


class Engine:
    """Answers every row with its target's index; remembers the batches; can be held."""

    def __init__(self, error=None, largest=None):
        self.batches = []
        self.error, self.largest = error, largest
        self.free = threading.Event()
        self.free.set()

    def __call__(self, pass_, rows):
        assert self.free.wait(60)
        self.batches.append((pass_, [one.target.index for one in rows]))
        if any(one.copy for one in rows):
            raise self.error
        if self.largest and len(rows) > self.largest:
            raise OutOfMemory("no memory")
        return [RowResult(np.zeros(1, np.float32), one.target, float(one.target.index)) for one in rows]

    @property
    def executed(self):
        return [index for _, indices in self.batches for index in indices]


async def ask(batcher, values, pass_=CAM, poison=(), **options):
    """Submit rows; return their scores in order, and complain if one comes twice."""
    found = {}

    def collect(index, result):
        assert index not in found
        found[index] = result.score

    rows = [row(value, poison=1 if value in poison else None) for value in values]
    await batcher.submit(pass_, rows, collect, **options)
    return [found[index] for index in range(len(values))]


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_each_row_gets_its_own_answer_whatever_shares_its_batch():
    engine = Engine()
    async with Batcher(engine, max_batch_rows=8) as batcher:
        batcher.pause()
        asked = [asyncio.create_task(ask(batcher, [i, 1000 + i])) for i in range(100)]
        await settle()
        batcher.resume()
        answers = await asyncio.gather(*asked)

    assert answers == [[float(i), float(1000 + i)] for i in range(100)]


async def test_rows_of_one_pass_share_batches_and_those_of_different_passes_never():
    engine = Engine()
    async with Batcher(engine, max_batch_rows=8) as batcher:
        batcher.pause()
        asked = [asyncio.create_task(ask(batcher, [i], CAM if i % 2 else SALIENCY)) for i in range(16)]
        await settle()
        batcher.resume()
        await asyncio.gather(*asked)

    assert [len(indices) for _, indices in engine.batches] == [8, 8]
    assert all(len({index % 2 for index in indices}) == 1 for _, indices in engine.batches)


@pytest.mark.parametrize("extra", [1, 2, 50])
async def test_a_full_queue_refuses_exactly_what_does_not_fit(extra):
    engine = Engine()
    refused = []

    async def call(batcher, value):
        try:
            async with batcher.admit(1):
                return await ask(batcher, [value])
        except ResourceExhausted as error:
            refused.append(error)

    async with Batcher(engine, max_batch_rows=4, max_queue_rows=8) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(call(batcher, value)) for value in range(8 + extra)]
        await settle()

        assert len(refused) == batcher.stats.refused == extra
        assert all(0 < error.retry_after <= 5 for error in refused)

        batcher.resume()
        answers = await asyncio.gather(*calls)

    assert sorted(a[0] for a in answers if a) == [float(value) for value in range(8)]
    assert batcher.admitted == 0


async def test_a_full_queue_refuses_just_as_exactly_while_the_engine_is_busy():
    engine = Engine()
    engine.free.clear()
    async with Batcher(engine, max_batch_rows=4, max_queue_rows=8) as batcher:

        async def call(value):
            async with batcher.admit(1):
                return await ask(batcher, [value])

        calls = [asyncio.create_task(call(value)) for value in range(20)]
        await settle()
        engine.free.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)

    assert sum(isinstance(answer, ResourceExhausted) for answer in answers) == 12


async def test_who_waits_for_room_gets_it_in_turn():
    async with Batcher(Engine(), max_queue_rows=2) as batcher:
        most = 0

        async def call(value):
            nonlocal most
            async with batcher.admit(2, wait=True):
                most = max(most, batcher.admitted)
                return await ask(batcher, [value])

        answers = await asyncio.gather(*map(call, range(20)))

    assert most == 2
    assert answers == [[float(value)] for value in range(20)]


async def test_a_large_request_that_waits_is_not_kept_out_by_small_ones_that_wait():
    async with Batcher(Engine(), max_queue_rows=4) as batcher:
        got_in = asyncio.Event()

        async def small():
            while not got_in.is_set():
                async with batcher.admit(1, wait=True):
                    await ask(batcher, [1])

        async def large():
            async with batcher.admit(4, wait=True):
                got_in.set()

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(small())
            await settle()
            group.create_task(large())

    assert batcher.admitted == 0


async def test_who_gives_up_waiting_for_room_leaves_none_taken():
    async with Batcher(Engine(), max_queue_rows=1) as batcher:

        async def wait():
            async with batcher.admit(1, wait=True):
                pass

        async with batcher.admit(1):
            waiting = [asyncio.create_task(wait()) for _ in range(3)]
            await settle()
            waiting[0].cancel()
        waiting[1].cancel()  # at the very moment when it has its turn
        await asyncio.gather(*waiting, return_exceptions=True)

    assert not waiting[2].cancelled()
    assert batcher.admitted == 0


async def test_what_can_never_fit_is_refused_rather_than_waited_for():
    async with Batcher(Engine(), max_queue_rows=4) as batcher:
        with pytest.raises(InvalidArgument, match="costs 5 rows, and 4 is the limit"):
            async with batcher.admit(5, wait=True):
                pass


async def test_a_request_whose_deadline_passes_in_the_queue_is_never_executed():
    engine = Engine()
    async with Batcher(engine) as batcher:
        with StoppedClock() as clock:
            batcher.pause()
            deadline = asyncio.get_running_loop().time() + 1
            calls = [asyncio.create_task(ask(batcher, [value], deadline=deadline)) for value in range(100)]
            await settle()
            clock.advance(1)
            batcher.resume()
            answers = await asyncio.gather(*calls, return_exceptions=True)
        late = await ask(batcher, [7])

    assert all(isinstance(answer, DeadlineExceeded) for answer in answers)
    assert engine.executed == [7]
    assert late == [7.0]
    assert batcher.stats.expired == 100


async def test_a_cancelled_request_is_never_executed():
    engine = Engine()
    async with Batcher(engine) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [value])) for value in range(100)]
        await settle()
        for call in calls[::2]:
            call.cancel()
        await settle()
        batcher.resume()
        await asyncio.gather(*calls, return_exceptions=True)

    assert sorted(engine.executed) == list(range(1, 100, 2))


async def test_a_cancelled_long_request_stops_between_chunks():
    engine = Engine()
    async with Batcher(engine, max_batch_rows=4) as batcher:
        engine.free.clear()
        call = asyncio.create_task(ask(batcher, range(400)))
        await settle()
        call.cancel()
        await settle()
        engine.free.set()
        await ask(batcher, [1000])

    assert engine.executed == [0, 1, 2, 3, 1000]


async def test_a_long_request_shares_batches_and_starves_nobody():
    engine = Engine()
    async with Batcher(engine, max_batch_rows=8) as batcher:
        batcher.pause()
        long = asyncio.create_task(ask(batcher, range(512), SALIENCY))
        await settle()
        short = [asyncio.create_task(ask(batcher, [1000 + i], SALIENCY)) for i in range(4)]
        other = asyncio.create_task(ask(batcher, [2000], CAM))
        await settle()
        batcher.resume()
        await asyncio.gather(long, *short, other)

    # The first batch has all the short ones, and a part for the long one: nobody waits for a batch that is full of it.
    assert engine.batches[0] == (SALIENCY, [0, 1, 1000, 1001, 1002, 1003])
    assert engine.batches[1] == (CAM, [2000])  # and the other pass has its turn before the next 500 rows


async def test_a_long_request_alone_gets_whole_batches():
    engine = Engine()
    async with Batcher(engine, max_batch_rows=8) as batcher:
        await ask(batcher, range(64), SALIENCY)

    assert [len(indices) for _, indices in engine.batches] == [8] * 8


async def test_a_short_request_of_another_pass_goes_before_a_long_one_that_came_first():
    engine = Engine()
    async with Batcher(engine, max_batch_rows=8) as batcher:
        batcher.pause()
        long = asyncio.create_task(ask(batcher, range(64), SALIENCY))
        await settle()
        short = asyncio.create_task(ask(batcher, [1000], CAM))
        await settle()
        batcher.resume()
        await asyncio.gather(long, short)

    assert engine.batches[0] == (CAM, [1000])
    assert len(engine.batches[1][1]) == 2  # another short one may come while this runs


async def test_a_long_request_is_put_off_by_short_ones_of_other_passes_for_a_second_and_no_longer():
    engine = Engine()
    with StoppedClock() as clock:

        def timed(pass_, rows):
            clock.advance(0.1)
            return engine(pass_, rows)

        async with Batcher(timed, max_batch_rows=8) as batcher:
            batcher.pause()
            long = asyncio.create_task(ask(batcher, range(9), SALIENCY))

            async def short():
                while not long.done():
                    await ask(batcher, [7], CAM)

            asked = [asyncio.create_task(short()) for _ in range(9)]
            await settle()
            batcher.resume()
            await asyncio.gather(*asked)

    turns = [index for index, (pass_, _) in enumerate(engine.batches) if pass_ is SALIENCY]
    between = [later - earlier - 1 for earlier, later in itertools.pairwise([-1, *turns])]
    # Nine rows in batches of two, each after ten batches of short ones, which are a second on this clock.
    assert between == [10] + 4 * [9]


async def test_of_many_equal_long_requests_the_first_to_begin_is_the_first_to_end():
    engine, ended = Engine(), []
    async with Batcher(engine, max_batch_rows=8) as batcher:

        async def long(number):
            await ask(batcher, range(64))
            ended.append((number, len(engine.executed)))

        await asyncio.gather(*map(long, range(16)))

    assert [number for number, _ in ended] == list(range(16))
    assert ended[0][1] <= 2 * 64  # not with all the others at the end


async def test_a_long_request_gets_on_beside_any_number_of_short_ones_in_its_pass():
    engine = Engine()
    for room in (1, 2, 8):
        async with Batcher(engine, max_batch_rows=room) as batcher:
            long = asyncio.create_task(ask(batcher, range(40), SALIENCY))
            before = batcher.stats.batches

            async def short(batcher=batcher, long=long):
                while not long.done():
                    await ask(batcher, [7], SALIENCY)

            await asyncio.gather(*(short() for _ in range(30)))

            # Every fourth batch at least has a row of the long one; then each short one ends what it has begun.
            assert batcher.stats.batches - before <= 4 * 40 + 30 + 1


async def test_a_stream_of_short_requests_does_not_starve_a_long_one():
    engine = Engine()
    async with Batcher(engine, max_batch_rows=2) as batcher:
        long = asyncio.create_task(ask(batcher, range(20), SALIENCY))
        for value in range(2000):
            await ask(batcher, [1000 + value], CAM)
            if long.done():
                break

    assert long.done()
    assert len(engine.batches) < 100


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("error", [NotFound("bad layer"), ValueError("a hook raised"), OutOfMemory("no memory")])
async def test_one_bad_row_in_a_batch_of_eight_fails_alone(position, error):
    engine = Engine(error=error)
    async with Batcher(engine, max_batch_rows=8) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [value], poison={position})) for value in range(8)]
        await settle()
        batcher.resume()
        answers = await asyncio.gather(*calls, return_exceptions=True)

    assert answers[position] is error
    assert [a for i, a in enumerate(answers) if i != position] == [[float(v)] for v in range(8) if v != position]


async def test_a_batch_too_large_for_the_device_is_halved_and_the_size_remembered():
    engine = Engine(largest=2)
    async with Batcher(engine, max_batch_rows=8) as batcher:
        first = await ask(batcher, range(8))
        tries = len(engine.batches)
        second = await ask(batcher, range(8))

    assert first == second == [float(value) for value in range(8)]
    assert all(len(indices) <= 2 for _, indices in engine.batches[tries:])


async def test_one_row_that_takes_all_memory_does_not_shrink_everyones_batches():
    engine = Engine(error=OutOfMemory("no memory"))
    async with Batcher(engine, max_batch_rows=8) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [value], poison={3})) for value in range(8)]
        await settle()
        batcher.resume()
        await asyncio.gather(*calls, return_exceptions=True)
        await ask(batcher, range(8))

    assert len(engine.batches[-1][1]) == 8


async def test_batches_cut_for_want_of_memory_grow_again(monkeypatch):
    engine = Engine(largest=2)
    async with Batcher(engine, max_batch_rows=8) as batcher:
        await ask(batcher, range(8))
        engine.largest = None
        monkeypatch.setattr(policy, "SHORT_REQUEST_WINDOW", 0.0)  # no short request came lately
        await ask(batcher, range(2000))

    assert max(len(indices) for _, indices in engine.batches[20:]) > 2


async def test_a_model_that_ends_the_program_fails_its_own_rows_only():
    def leave(_pass, rows):
        if rows[0].target.index == 1:
            raise SystemExit
        return [RowResult(np.zeros(1, np.float32), one.target, 7.0) for one in rows]

    async with Batcher(leave) as batcher:
        with pytest.raises(Internal):
            await ask(batcher, [1])

        assert await ask(batcher, [2]) == [7.0]


async def test_a_request_that_cannot_take_its_result_fails_alone():
    async with Batcher(Engine()) as batcher:

        def refuse(_index, _result):
            raise ValueError("full")

        with pytest.raises(ValueError, match="full"):
            await batcher.submit(CAM, [row(1)], refuse)

        assert await ask(batcher, [2]) == [2.0]


async def test_an_engine_that_loses_a_row_is_found_out():
    def lossy(_pass, rows):
        return [RowResult(np.zeros(1, np.float32), one.target, 0.0) for one in rows[1:]]

    async with Batcher(lossy) as batcher:
        with pytest.raises(Internal):
            await ask(batcher, [1])


async def test_a_batch_is_held_back_for_company_no_longer_than_asked():
    engine = Engine()
    with StoppedClock() as clock:
        async with Batcher(engine, max_batch_rows=4, max_delay=0.5) as batcher:
            first = asyncio.create_task(ask(batcher, [1]))
            await settle()
            clock.advance(0.3)
            second = asyncio.create_task(ask(batcher, [2]))
            await settle()
            held_back = batcher.stats.batches == 0
            clock.advance(0.2)  # half a second after the first came
            await asyncio.gather(first, second)
            await ask(batcher, range(4))  # a full batch is not held back: the clock stands still

    assert held_back
    assert [sorted(indices) for _, indices in engine.batches] == [[1, 2], [0, 1, 2, 3]]


async def test_a_tight_deadline_goes_first():
    engine = Engine()
    with StoppedClock():
        async with Batcher(engine, max_batch_rows=1) as batcher:
            batcher.pause()
            now = asyncio.get_running_loop().time()
            calls = [asyncio.create_task(ask(batcher, [value])) for value in range(3)]
            await settle()
            calls.append(asyncio.create_task(ask(batcher, [9], deadline=now + 0.9)))
            await settle()
            batcher.resume()
            await asyncio.gather(*calls)

    assert engine.executed == [9, 0, 1, 2]


async def test_what_still_waits_when_the_batcher_closes_is_answered():
    async with Batcher(Engine()) as batcher:
        batcher.pause()
        waiting = asyncio.create_task(ask(batcher, [1]))
        await settle()

    with pytest.raises(Unavailable):
        await waiting


async def test_time_spent_is_accounted_for():
    with StoppedClock() as clock:

        def engine(pass_, rows):
            clock.advance(2)
            return Engine()(pass_, rows)

        async with Batcher(engine, max_batch_rows=8) as batcher:
            batcher.pause()
            asked = asyncio.create_task(batcher.submit(CAM, [row(1), row(2)], lambda _i, _r: None))
            await settle()
            clock.advance(3)
            batcher.resume()
            spent = await asked

    assert (round(spent.queue, 3), round(spent.compute, 3), spent.batch_rows) == (3, 2, 2)


async def test_rows_of_one_input_share_a_place_in_a_batch_whatever_their_targets():
    """Ten classes of one image cost one forward pass, also where a batch has room for eight."""
    engine, image = Engine(), np.zeros((1, 1, 3), np.uint8)
    async with Batcher(engine, max_batch_rows=2) as batcher:
        batcher.pause()
        rows = [Row(image, ClassTarget(value)) for value in range(10)]
        calls = [asyncio.create_task(batcher.submit(CAM, rows, lambda *_: None))]
        calls.append(asyncio.create_task(ask(batcher, [20, 21])))
        await settle()
        batcher.resume()
        await asyncio.gather(*calls)

    assert sorted(len(indices) for _, indices in engine.batches) in ([1, 11], [2, 10])
    assert sorted(engine.executed) == [*range(10), 20, 21]


async def test_engines_work_side_by_side_and_each_answer_is_its_rows_own():
    """Both are at work at once, or the barrier would never open."""
    meet = threading.Barrier(2)

    class Met(Engine):
        def __call__(self, pass_, rows):
            meet.wait(60)
            return super().__call__(pass_, rows)

    engines = Met(), Met()
    async with Batcher(*engines, max_batch_rows=4) as batcher:
        answers = await asyncio.gather(*(ask(batcher, [value]) for value in range(8)))

    assert answers == [[float(value)] for value in range(8)]
    assert sorted(engines[0].executed + engines[1].executed) == list(range(8))
    assert [len(engine.batches) for engine in engines] == [1, 1]


async def test_an_engine_that_is_busy_leaves_the_rows_to_another():
    busy, free = Engine(), Engine()
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
async def test_results_come_in_the_rows_order_whichever_engine_is_done_first(slow):
    engines = Engine(), Engine()
    engines[slow].free.clear()
    order = []
    async with Batcher(*engines, max_batch_rows=2) as batcher:
        rows = [row(value) for value in range(12)]
        submitted = asyncio.create_task(
            batcher.submit(CAM, rows, lambda index, result: order.append((index, result.score)))
        )
        while len(engines[1 - slow].executed) < 10:  # noqa: ASYNC110 -- it works in a thread
            await asyncio.sleep(0.001)
        engines[slow].free.set()
        await submitted

    assert order == [(value, float(value)) for value in range(12)]


async def test_a_batch_that_fails_on_one_engine_fails_alone():
    error = ValueError("a hook raised")
    engines = Engine(error=error), Engine(error=error)
    async with Batcher(*engines, max_batch_rows=4) as batcher:
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [value], poison={5})) for value in range(16)]
        await settle()
        batcher.resume()
        answers = await asyncio.gather(*calls, return_exceptions=True)

    assert answers.pop(5) is error
    assert answers == [[float(value)] for value in range(16) if value != 5]


@pytest.mark.parametrize("engines", [1, 2])
async def test_rows_of_another_pass_that_were_held_back_too_are_not_forgotten(engines):
    """Nothing arrives that would wake an engine for them."""
    async with Batcher(*(Engine() for _ in range(engines)), max_batch_rows=4, max_delay=0.02) as batcher:
        async with asyncio.timeout(60):
            answers = await asyncio.gather(ask(batcher, [1], CAM), ask(batcher, [2], SALIENCY))

    assert answers == [[1.0], [2.0]]


async def test_a_guess_at_when_there_is_room_knows_of_every_engine():
    async def guess(*engines):
        async with Batcher(*engines, max_queue_rows=100) as batcher, batcher.admit(100):
            with pytest.raises(ResourceExhausted) as refused:
                async with batcher.admit(1):
                    pass
        return refused.value.retry_after

    assert await guess(Engine(), Engine()) == pytest.approx(await guess(Engine()) / 2)


class Halves(Engine):
    """Notes on which half of it each batch was, and the most that ran at once; the first batch waits for a second."""

    def __init__(self):
        super().__init__()
        self.halves, self.now, self.most, self.lock = [], 0, 0, threading.Condition()

    def __call__(self, pass_, rows, partition=None):
        with self.lock:
            self.halves.append((partition, len(rows)))
            self.now += 1
            self.most = max(self.most, self.now)
            self.lock.notify_all()
            assert partition is None or self.lock.wait_for(lambda: self.most == 2, 60)
        try:
            return super().__call__(pass_, rows)
        finally:
            with self.lock:
                self.now -= 1


async def _filled(engine, sizes, **options):
    """Let requests of so many rows wait together, and then be answered."""
    async with Batcher(engine, max_batch_rows=8, partitioned=True, **options) as batcher:
        batcher.pause()
        asked = [asyncio.create_task(ask(batcher, [100 * n + i for i in range(size)])) for n, size in enumerate(sizes)]
        await settle()
        batcher.resume()
        answers = await asyncio.gather(*asked)
    assert answers == [[100.0 * n + i for i in range(size)] for n, size in enumerate(sizes)]
    return engine


async def test_rows_that_wait_run_in_two_batches_at_once_each_on_a_half():
    engine = await _filled(Halves(), [1] * 32)

    assert engine.most == 2
    assert sorted(engine.halves[:2]) == [(0, 8), (1, 8)]


@pytest.mark.parametrize(("sizes", "first"), [([1] * 2, [1, 1]), ([1] * 7, [3, 4]), ([9], [4, 5]), ([5, 8], [6, 7])])
async def test_fewer_rows_are_shared_evenly_by_two_batches_at_once(sizes, first):
    engine = await _filled(Halves(), sizes)

    assert engine.most == 2
    assert sorted(rows for _, rows in engine.halves) == first


async def test_a_row_that_is_alone_has_the_whole_engine():
    engine = await _filled(Halves(), [1])

    assert engine.halves == [(None, 1)]


async def test_a_full_batch_that_was_held_back_for_company_is_not_shared():
    engine = await _filled(Halves(), [1] * 8, max_delay=5.0)

    assert engine.halves == [(None, 8)]


async def test_the_half_that_is_free_first_leaves_as_much_to_the_other():
    halves, free, begun = [], (threading.Event(), threading.Event()), threading.Semaphore(0)

    def engine(pass_, rows, partition):
        halves.append((partition, len(rows)))
        begun.release()
        assert free[partition].wait(60)
        return Engine()(pass_, rows)

    async with Batcher(engine, max_batch_rows=8, partitioned=True) as batcher:
        batcher.pause()
        asked = [asyncio.create_task(ask(batcher, [i])) for i in range(2)]
        await settle()
        batcher.resume()
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=60)
        asked += [asyncio.create_task(ask(batcher, [i])) for i in range(7)]
        await settle()
        free[1].set()
        assert await asyncio.to_thread(begun.acquire, timeout=60)
        free[0].set()
        await asyncio.gather(*asked)

    assert sorted(halves[:2]) == [(0, 1), (1, 1)]
    assert halves[2] == (1, 4)


async def test_the_targets_of_one_image_are_not_shared_between_halves_as_each_would_run_the_image():
    engine = Halves()
    image = np.zeros((1, 1, 3), np.uint8)
    async with Batcher(engine, partitioned=True) as batcher:
        await batcher.submit(CAM, [Row(image, ClassTarget(index)) for index in range(6)], lambda _index, _result: None)

    assert engine.halves == [(None, 6)]


async def test_while_short_requests_come_a_long_one_does_not_halve_the_engine():
    engine = await _filled(Halves(), [1, 200])

    assert {partition for partition, _ in engine.halves} == {None}


async def test_long_requests_alone_halve_the_engine(monkeypatch):
    monkeypatch.setattr(policy, "SHORT_REQUEST_WINDOW", -1.0)

    assert (await _filled(Halves(), [200])).most == 2


async def test_a_batch_on_a_half_that_fails_is_split_there_and_its_neighbours_are_answered():
    engine = Halves()
    engine.error = NotFound("no such thing")
    async with Batcher(engine, max_batch_rows=8, partitioned=True) as batcher:
        batcher.pause()
        asked = [asyncio.create_task(ask(batcher, [i], poison={3, 12})) for i in range(32)]
        await settle()
        batcher.resume()
        answers = await asyncio.gather(*asked, return_exceptions=True)

    assert [i for i, one in enumerate(answers) if isinstance(one, NotFound)] == [3, 12]
    assert all(answers[i] == [float(i)] for i in set(range(32)) - {3, 12})


async def test_no_batch_has_the_whole_engine_while_another_runs():
    engine, seen = Halves(), []

    def watched(pass_, rows, partition=None):
        with engine.lock:
            seen.append((partition, engine.now))
        return engine(pass_, rows, partition)

    async with Batcher(watched, max_batch_rows=4, partitioned=True) as batcher:
        for burst in (40, 3, 17, 9, 1, 30):
            asked = [asyncio.create_task(ask(batcher, [i])) for i in range(burst)]
            await asyncio.gather(*asked)

    assert {partition for partition, _ in seen} == {None, 0, 1}
    assert all(running == 0 for partition, running in seen if partition is None)


async def test_a_row_that_came_as_the_second_half_waited_for_company_is_not_forgotten():
    free = {0: threading.Event(), 1: threading.Event()}

    def engine(pass_, rows, partition=None):
        assert partition is None or free[partition].wait(60)
        return Engine()(pass_, rows)

    with StoppedClock() as clock:
        async with Batcher(engine, max_batch_rows=2, max_delay=0.3, partitioned=True) as batcher:
            asked = [asyncio.create_task(ask(batcher, [i])) for i in range(4)]
            await settle()
            free[1].set()
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            asked.append(asyncio.create_task(ask(batcher, [9])))
            await settle()  # the second half waits for company for that one
            free[0].set()
            await asyncio.wait(asked[:4])
            await settle()
            clock.advance(0.3)
            assert await asyncio.gather(*asked) == [[0.0], [1.0], [2.0], [3.0], [9.0]]


async def test_a_batcher_that_stops_answers_what_runs_too():
    engine = Engine()
    engine.free.clear()
    async with Batcher(engine) as batcher:
        asked = [asyncio.create_task(ask(batcher, [i])) for i in range(3)]
        await settle()
        asked[0].add_done_callback(lambda _: engine.free.set())
    answers = await asyncio.gather(*asked, return_exceptions=True)

    assert all(isinstance(one, Unavailable) for one in answers)


async def test_whoever_hears_of_batches_cannot_make_one_fail(caplog):
    class Deaf:
        def ran(self, _ran):
            raise RuntimeError("no room for another series")

    engine = Engine()
    async with Batcher(engine) as batcher:
        batcher.telemetry = Deaf()
        assert await ask(batcher, [1, 2, 3]) == [1.0, 2.0, 3.0]

    assert len(engine.batches) == 1
    assert "a batch could not be reported to telemetry" in caplog.text


def asked_by(caller, *arguments, **options):
    """Ask as a caller; return the task."""
    return asyncio.create_task(ask(*arguments, origin=Origin(caller), **options))


def passes(number):
    return [Pass("net", "cam", (8, 8), (f"layer{place}",)) for place in range(number)]


@pytest.mark.parametrize("came_before", [False, True])
async def test_at_most_one_batch_of_others_runs_before_a_new_callers(came_before):
    """Also where the greedy caller has 150 requests of a pass of their own each, all older and more urgent."""
    engine = Engine()
    async with Batcher(engine, max_batch_rows=8) as batcher:
        if came_before:
            await asked_by("modest", batcher, [7])
        engine.free.clear()
        soon = asyncio.get_running_loop().time() + 30
        greedy = [asked_by("greedy", batcher, [1], pass_, deadline=soon) for pass_ in passes(150)]
        await wait_in_loop_until(lambda: batcher.stats.batches == 1 + came_before)
        modest = asked_by("modest", batcher, [1000], SALIENCY)
        await settle()
        engine.free.set()
        await asyncio.gather(*greedy, modest)

    before = engine.executed[came_before:].index(1000)
    assert before <= 1


async def test_callers_take_turns_at_batches():
    engine = Engine()
    async with Batcher(engine, max_batch_rows=8) as batcher:
        batcher.pause()
        asked = [asked_by("a", batcher, [1], pass_) for pass_ in passes(20)]
        asked += [asked_by("b", batcher, [2], Pass("net", "score", (8, 8))), asked_by("b", batcher, [2], SALIENCY)]
        asked += [asked_by("c", batcher, list(range(100, 140)), Pass("net", "bias", (8, 8)))]
        await settle()
        batcher.resume()
        await asyncio.gather(*asked)

    first = [indices[0] for _, indices in engine.batches[:6]]
    assert first == [1, 2, 100, 1, 2, 102]


async def test_batch_starts_with_the_next_caller_and_is_filled_by_others():
    engine = Engine()
    async with Batcher(engine, max_batch_rows=4) as batcher:
        batcher.pause()
        asked = [asked_by("greedy", batcher, [1]) for _ in range(100)]
        await settle()
        asked += [asked_by("modest", batcher, [2]), asked_by("other", batcher, [3])]
        await settle()
        batcher.resume()
        await asyncio.gather(*asked)

    assert [sorted(indices) for _, indices in engine.batches[:2]] == [[1, 1, 2, 3], [1, 1, 1, 1]]


async def test_cancelled_requests_release_their_images_at_once():
    async with Batcher(Engine()) as batcher:
        batcher.pause()
        rows = [row(value) for value in range(50)]
        images = [weakref.ref(one.image) for one in rows]
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
    def engine(_pass, rows):
        if rows[0].target.index == 1:
            raise kind
        return [RowResult(np.zeros(1, np.float32), one.target, 7.0) for one in rows]

    async with Batcher(engine, max_batch_rows=1) as batcher, asyncio.timeout(10):
        bad, good = await asyncio.gather(ask(batcher, [1]), ask(batcher, [2]), return_exceptions=True)

        assert isinstance(bad, Internal | RuntimeError)
        assert good == [7.0]
        assert await ask(batcher, [3]) == [7.0]


# --- how much fits in a batch ---


def heavy(image, target, methods=4):
    return Row(image, ClassTarget(target), tuple(MethodCall("kpcacam", {"kernel": str(k)}) for k in range(methods)))


async def test_first_batch_of_unmeasured_heavy_maps_is_small():
    engine, image = Engine(), np.zeros((1, 1, 3), np.uint8)
    async with Batcher(engine) as batcher:
        await batcher.submit(CAM, [heavy(image, target) for target in range(16)], lambda *_: None)

    assert len(engine.batches[0][1]) * 4 <= capacity_module.UNMEASURED // 4


def test_batch_size_is_bounded_by_the_measured_cost_of_rows():
    capacity = capacity_module.Capacity(8, 60.0)
    kind, rows = capacity_module.kind_of(CAM, row(1)), [row(value) for value in range(9)]

    def fits():
        budget = capacity.budget(CAM, 8)
        return sum(budget.take(one, capacity.seconds_of(kind), 8) for one in rows)

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


# --- a worker that ends ---


class Deadly(Engine):
    """Ends its worker for a row that is poison; like a real one, it takes whatever runs beside it along."""

    def __init__(self, never_began=0):
        super().__init__()
        self.deaths, self.never_began, self.lock = 0, never_began, threading.Lock()
        self.running, self.halves, self.dead = [], [], {}

    def __call__(self, pass_, rows, partition=None):
        mine = [one.target.index for one in rows]
        with self.lock:
            if self.never_began:
                self.never_began -= 1
                raise WorkerLost("lost before")
            self.batches.append((pass_, mine))
            self.running.append(mine)
            self.halves.append((len(mine), partition, len(self.running)))
        time.sleep(0.05)
        with self.lock:
            if any(one.copy for one in rows) and id(mine) not in self.dead:
                self.deaths += 1
                self.dead |= {id(one): (self.deaths, len(self.running) - 1) for one in self.running}
            self.running.remove(mine)
        if id(mine) in self.dead:
            death, others = self.dead[id(mine)]
            raise WorkerLost("the worker crashed: exit -11", process_id=death, others=others)
        return [RowResult(np.zeros(1, np.float32), one.target, float(one.target.index)) for one in rows]


async def lost(engine, count=8, poison=(), partitioned=False):
    """Let requests of one row each wait together; return the answers."""
    async with Batcher(engine, max_batch_rows=8, partitioned=partitioned) as batcher, asyncio.timeout(20):
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [value], poison=poison)) for value in range(count)]
        await settle()
        batcher.resume()
        return await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("position", [0, 5, 7])
async def test_lethal_request_runs_at_most_twice_and_fails_no_other(position, partitioned):
    engine = Deadly()
    answers = await lost(engine, poison={position}, partitioned=partitioned)

    assert engine.deaths == 2
    assert isinstance(answers[position], Internal)
    assert "the worker crashed: exit -11" in str(answers[position])
    assert [one for i, one in enumerate(answers) if i != position] == [[float(i)] for i in range(8) if i != position]


async def test_a_request_that_was_alone_when_its_worker_ended_is_not_run_again():
    engine = Deadly()
    (answer,) = await lost(engine, 1, poison={0})

    assert engine.deaths == len(engine.batches) == 1
    assert isinstance(answer, Internal)


async def test_batch_that_its_worker_never_began_is_simply_run_again():
    engine = Deadly(never_began=3)

    assert await lost(engine, 2) == [[0.0], [1.0]]


async def test_request_that_may_have_ended_a_worker_runs_alone():
    engine = Deadly()
    answers = await lost(engine, 16, poison={3, 12}, partitioned=True)

    assert engine.halves[2:] == [(1, None, 1)] * 16
    assert [i for i, one in enumerate(answers) if isinstance(one, Internal)] == [3, 12]


async def test_request_waiting_for_a_rerun_is_answered_if_no_engine_returns():
    engine, loop = Deadly(), asyncio.get_running_loop()

    def dying(*batch):
        try:
            return engine(*batch)
        finally:
            loop.call_soon_threadsafe(batcher.pause)

    async with Batcher(dying) as batcher, asyncio.timeout(10):
        batcher.pause()
        calls = [asyncio.create_task(ask(batcher, [value], poison={1})) for value in range(3)]
        await settle()
        batcher.resume()
        await wait_in_loop_until(lambda: batcher._executor.reruns)
        batcher.fail_pending("no worker is available")
        answers = await asyncio.gather(*calls, return_exceptions=True)

    assert {type(answer) for answer in answers} == {Unavailable}


def layered(**sizes):
    """A model whose modules give so many numbers."""
    layers = {name: LayerInfo(name, "Conv2d", (1, size, 1, 1), 0, 1, None) for name, size in sizes.items()}
    preprocess = Preprocess((8, 8), 8, "bilinear", (0, 0, 0), (1, 1, 1))
    return ModelInfo("net", "", "none", "", (), 1, 0, preprocess, layers, "layer4", "float32", "cpu")


@pytest.mark.parametrize(
    ("kind", "layers", "inputs"),
    [
        ("score", (), 8),
        ("cam", ("layer16",), 3),  # nothing after it is kept; of its own maps there are eight copies
        ("saliency", (), 3),  # nearly all that 16 layers of 16 KiB give
        ("cam", ("layer1",), 2),
        ("bias", (), 1),
        ("curvature", ("layer1",), 1),
    ],
)
async def test_number_of_inputs_in_a_batch_is_limited_by_memory(kind, layers, inputs):
    engine, pass_ = Engine(), Pass("net", kind, (8, 8), layers)
    async with Batcher(engine, max_batch_rows=8) as batcher:
        batcher.allow(768 * 2**10)
        batcher.learn("net", layered(**{f"layer{place}": 4096 for place in range(1, 17)}))
        await batcher.submit(pass_, [row(value) for value in range(24)], lambda *_: None)

    assert max(len(batch) for _, batch in engine.batches) == inputs


class Beside(Engine):
    """Notes for each batch what else runs when it begins."""

    def __init__(self):
        super().__init__()
        self.running, self.seen, self.lock = [], [], threading.Lock()

    def __call__(self, pass_, rows, partition=None):
        with self.lock:
            self.running.append(pass_.kind)
            self.seen.append((partition, *self.running))
        time.sleep(0.002)  # so that another may begin
        try:
            return super().__call__(pass_, rows)
        finally:
            with self.lock:
                self.running.remove(pass_.kind)


async def test_input_that_takes_more_than_half_of_the_memory_has_the_engine_alone():
    engine = Beside()
    passes = [Pass("net", "bias", (8, 8)), Pass("net", "cam", (8, 8), ("layer16",))]
    async with Batcher(engine, partitioned=True) as batcher:
        batcher.allow(300 * 2**10)
        batcher.learn("net", layered(**{f"layer{place}": 4096 for place in range(1, 17)}))
        batcher.pause()
        asked = [asyncio.create_task(ask(batcher, [i], passes[i % 2])) for i in range(40)]
        await settle()
        batcher.resume()
        answers = await asyncio.gather(*asked)

    assert answers == [[float(i)] for i in range(40)]
    assert {(partition, len(running)) for partition, *running in engine.seen if "bias" in running} == {(None, 1)}
    assert sum(running == ["bias"] for _, *running in engine.seen) == 20


async def test_forgotten_model_does_not_limit_batches_of_others():
    engine = Engine()
    async with Batcher(engine, max_batch_rows=8) as batcher:
        batcher.allow(1)
        batcher.learn("net", layered(layer4=1024))
        await batcher.submit(SALIENCY, [row(value) for value in range(8)], lambda *_: None)
        batcher.forget("net")
        await batcher.submit(SALIENCY, [row(value) for value in range(8)], lambda *_: None)

    assert [len(batch) for _, batch in engine.batches[:8]] == [1] * 8
    assert len(engine.batches) < 16
