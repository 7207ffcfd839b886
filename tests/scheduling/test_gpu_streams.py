"""Two batches at once on a GPU, each in a stream of its own, shown with an engine that holds each batch."""

import asyncio
import random
import threading
from asyncio import Task
from dataclasses import dataclass, field

import numpy as np
import pytest

from camserve_server.core.errors import NotFound, OutOfMemory, Unavailable, WorkerLost
from camserve_server.engine.values import RowResult
from camserve_server.models.values import Pass
from camserve_server.scheduling import Batcher
from camserve_server.scheduling import capacity as capacity_module
from camserve_server.scheduling.capacity import Capacity
from scheduling.test_batcher import CAM, SALIENCY, Deadly, ask, asked_by, layered, passes, settle
from support import wait_in_loop_until


@dataclass(eq=False)
class Held:
    """A batch that runs until it is released, and then ends with its rows' own values, or an error."""

    pass_: Pass
    values: list
    stream: int | None
    beside: int
    free: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def end(self, error=None):
        self.error = error
        self.free.set()


class Gpu:
    """An engine that holds each batch it is sent, unless it is open, and counts those that run."""

    def __init__(self, *, is_open=False):
        self.sent, self.running, self.lock, self.is_open = [], [], threading.Lock(), is_open

    def __call__(self, pass_, rows, stream=None):
        with self.lock:
            batch = Held(pass_, [row.target.index for row in rows], stream, len(self.running))
            self.sent.append(batch)
            self.running.append(batch)
        try:
            assert self.is_open or batch.free.wait(60)
        finally:
            with self.lock:
                self.running.remove(batch)
        if batch.error:
            raise batch.error
        return [RowResult(np.zeros(1, np.float32), row.target, float(row.target.index)) for row in rows]

    async def until_sent(self, count):
        await wait_in_loop_until(lambda: len(self.sent) >= count)
        await settle()
        assert len(self.sent) == count

    def open(self):
        with self.lock:
            self.is_open = True
            for batch in self.sent:
                batch.free.set()


class Full(Gpu):
    """Runs out of memory if the inputs of a batch do not fit beside those of the other batch."""

    def __init__(self, room, weigh=len):
        super().__init__(is_open=True)
        self.room, self.used, self.weigh, self.failed = room, 0, weigh, []

    def __call__(self, pass_, rows, stream=None):
        size = self.weigh(rows)
        with self.lock:
            fits = self.used + size <= self.room
            self.used += size
        try:
            if not fits:
                self.failed.append((len(rows), stream))
                raise OutOfMemory("no memory")
            return super().__call__(pass_, rows, stream)
        finally:
            with self.lock:
                self.used -= size


def waiting(batcher, count, pass_=CAM):
    """Put a number of requests, of one row each, into the queue."""
    return [asyncio.create_task(ask(batcher, [value], pass_)) for value in range(count)]


async def test_second_batch_is_sent_while_the_first_runs_and_never_a_third():
    gpu = Gpu()
    async with Batcher(gpu, max_batch_rows=2, streams=True) as batcher:
        asked = waiting(batcher, 9)
        await gpu.until_sent(2)
        for ended in range(3):
            gpu.sent[ended].end()
            await gpu.until_sent(ended + 3)
        assert len(gpu.running) == 2
        gpu.open()
        answers = await asyncio.gather(*asked)

    assert answers == [[float(value)] for value in range(9)]
    assert {batch.stream for batch in gpu.sent} == {0, 1}
    assert max(batch.beside for batch in gpu.sent) == 1


@pytest.mark.parametrize(("rows", "sizes"), [(16, [8, 8]), (10, [8, 2]), (7, [7]), (1, [1])])
async def test_each_batch_is_as_large_as_it_may_be_and_is_never_shared_evenly(rows, sizes):
    gpu = Gpu()
    async with Batcher(gpu, max_batch_rows=8, streams=True) as batcher:
        batcher.pause()
        asked = waiting(batcher, rows)
        await settle()
        batcher.resume()
        await gpu.until_sent(len(sizes))
        gpu.open()
        await asyncio.gather(*asked)

    assert sorted((len(batch.values) for batch in gpu.sent), reverse=True) == sizes


@pytest.mark.parametrize("busy", [0, 1])
async def test_either_stream_goes_on_while_the_other_runs_one_long_batch(busy):
    gpu = Gpu()
    async with Batcher(gpu, max_batch_rows=1, streams=True) as batcher:
        first = waiting(batcher, 2)
        await gpu.until_sent(2)
        held, other = sorted(gpu.sent, key=lambda batch: batch.stream != busy)
        other.end()
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        for _ in range(5):
            more = asyncio.create_task(ask(batcher, [9]))
            await wait_in_loop_until(lambda: gpu.running == [held, gpu.sent[-1]])
            gpu.sent[-1].end()
            assert await more == [9.0]
        held.end()
        await asyncio.gather(*first)

    assert [batch.stream for batch in gpu.sent[2:]] == [1 - busy] * 5


async def test_batch_that_fails_is_split_in_its_stream_and_the_other_is_answered():
    gpu = Gpu(is_open=True)

    def faulty(pass_, rows, stream=None):
        if any(row.copy for row in rows):
            raise NotFound("no such thing")
        return gpu(pass_, rows, stream)

    async with Batcher(faulty, max_batch_rows=8, streams=True) as batcher:
        asked = [asyncio.create_task(ask(batcher, [value], poison={3, 12})) for value in range(32)]
        answers = await asyncio.gather(*asked, return_exceptions=True)

    assert [value for value, each in enumerate(answers) if isinstance(each, NotFound)] == [3, 12]
    assert all(answers[value] == [float(value)] for value in set(range(32)) - {3, 12})


@pytest.mark.parametrize("requests", [1, 2])
async def test_loss_of_a_worker_with_two_batches_loses_no_request(requests):
    """Even a request that was alone in its batch is run again: the other batch may be the cause."""
    gpu, lost = Gpu(), WorkerLost("the worker ended", process_id=1, others=1)
    async with Batcher(gpu, max_batch_rows=requests, streams=True) as batcher:
        asked = waiting(batcher, 8)
        await gpu.until_sent(2)
        batcher.pause()
        for batch in gpu.sent:
            batch.end(lost)
        await wait_in_loop_until(lambda: len(batcher._executor.reruns) == 2 * requests or any(map(Task.done, asked)))
        gpu.is_open = True
        batcher.resume()
        answers = await asyncio.gather(*asked)

    again = gpu.sent[2 : 2 + 2 * requests]
    assert answers == [[float(value)] for value in range(8)]
    assert sorted(batch.values[0] for batch in again) == list(range(2 * requests))  # before the rows that had not run
    assert [(len(batch.values), batch.stream, batch.beside) for batch in again] == [(1, None, 0)] * 2 * requests


async def test_nothing_is_sent_between_the_loss_of_a_batch_and_its_second_run():
    gpu = Gpu()
    async with Batcher(gpu, max_batch_rows=1, streams=True) as batcher:
        asked = waiting(batcher, 6)
        await gpu.until_sent(2)
        first, second = gpu.sent
        second.end(WorkerLost("the worker ended before it ran this"))
        await wait_in_loop_until(lambda: batcher._executor.reruns)
        await settle()
        assert gpu.running == [first]
        first.end()
        await gpu.until_sent(3)
        gpu.open()
        await asyncio.gather(*asked)

    assert (gpu.sent[2].values, gpu.sent[2].stream) == (second.values, None)


async def test_lost_rows_are_not_forgotten_while_a_stream_of_another_engine_is_idle():
    """The event that wakes an engine for these rows also wakes that stream, which must not run them."""
    gpus = Gpu(), Gpu()
    async with Batcher(*gpus, max_batch_rows=1, streams=True) as batcher:
        batcher.pause(1)
        lost = asyncio.create_task(ask(batcher, [1]))
        await gpus[0].until_sent(1)
        batcher.resume(1)
        batcher.pause(0)
        held = asyncio.create_task(ask(batcher, [2]))
        await gpus[1].until_sent(1)
        gpus[0].sent[0].end(WorkerLost("the worker ended before it ran this"))
        await wait_in_loop_until(lambda: batcher._executor.reruns)
        await settle()
        batcher.resume(0)
        await gpus[0].until_sent(2)
        gpus[0].sent[1].end()
        assert await lost == [1.0]
        gpus[1].open()
        assert await held == [2.0]


async def test_lethal_request_in_one_of_two_batches_fails_no_other():
    worker = Deadly()
    async with Batcher(worker, max_batch_rows=8, streams=True) as batcher:
        asked = [asyncio.create_task(ask(batcher, [value], poison={3, 12})) for value in range(16)]
        answers = await asyncio.gather(*asked, return_exceptions=True)

    assert [value for value, each in enumerate(answers) if not isinstance(each, list)] == [3, 12]
    assert worker.deaths <= 4


@pytest.mark.parametrize("came_before", [False, True])
async def test_new_caller_waits_only_for_the_batches_that_already_run(came_before):
    """A caller that had a turn lately waits for one more at most."""
    gpu = Gpu()
    async with Batcher(gpu, max_batch_rows=8, streams=True) as batcher:
        if came_before:
            early = asked_by("modest", batcher, [7])
            await gpu.until_sent(1)
            gpu.sent[0].end()
            await early
        greedy = [asked_by("greedy", batcher, [1], pass_) for pass_ in passes(50)]
        await gpu.until_sent(2 + came_before)
        modest = asked_by("modest", batcher, [1000], SALIENCY)
        await settle()
        for batch in gpu.sent:
            batch.end()
        await wait_in_loop_until(lambda: len(gpu.sent) >= 4 + came_before)
        begun = [batch.values for batch in gpu.sent[2 + came_before :]]
        gpu.open()
        await asyncio.gather(*greedy, modest)

    assert [1000] in begun[: 1 + came_before]


async def test_batches_on_a_gpu_also_wait_for_more_rows():
    gpu, settings = Gpu(is_open=True), {"max_batch_rows": 4, "streams": True}
    settings["max_delay"] = 0.02  # real timeout: it only has to pass
    async with Batcher(gpu, **settings) as batcher:
        answers = await asyncio.gather(ask(batcher, [1], CAM), ask(batcher, [2], SALIENCY))

    assert answers == [[1.0], [2.0]]


async def test_batches_of_a_gpu_that_stops_are_answered():
    gpu = Gpu()
    async with Batcher(gpu, max_batch_rows=1, streams=True) as batcher:
        asked = waiting(batcher, 3)
        await gpu.until_sent(2)
        asked[0].add_done_callback(lambda _: gpu.open())
    answers = await asyncio.gather(*asked, return_exceptions=True)

    assert all(isinstance(each, Unavailable) for each in answers)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
async def test_every_request_is_answered_once_and_exclusive_batches_run_alone(seed):
    draw = random.Random(seed)
    gpu = Full(room=6, weigh=lambda rows: len(rows) * (1 if rows[0].target.index < 500 else 4))
    kinds = [*passes(3), Pass("net", "bias", (8, 8))]
    async with Batcher(gpu, max_batch_rows=8, streams=True) as batcher:
        batcher.allow(300 * 2**10)
        batcher.learn("net", layered(**{f"layer{place}": 4096 for place in range(1, 17)}))
        values = [[draw.randrange(1000) for _ in range(draw.randint(1, 12))] for _ in range(80)]
        asked = [asyncio.create_task(ask(batcher, value, draw.choice(kinds))) for value in values]
        for late in draw.sample(range(80), 10):
            await asyncio.sleep(0)
            asked[late].cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)

    answered = [(each, answer) for each, answer in zip(values, answers, strict=True) if isinstance(answer, list)]
    assert len(answered) >= 70
    assert all(answer == [float(value) for value in each] for each, answer in answered)
    assert all(batch.beside == 0 for batch in gpu.sent if batch.stream is None)
    assert max(batch.beside for batch in gpu.sent) <= 1


# --- time ---


class Heard:
    """Notes the batches that a batcher tells of."""

    def __init__(self):
        self.batches = []

    def batch_finished(self, batch):
        self.batches.append(batch)


async def test_time_that_two_batches_share_counts_half_for_each(monkeypatch):
    gpu, now = Gpu(), [100.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    async with Batcher(gpu, max_batch_rows=1, streams=True) as batcher:
        batcher.telemetry = heard = Heard()
        asked = waiting(batcher, 1)
        await gpu.until_sent(1)
        now[0] += 1  # the first alone
        asked += waiting(batcher, 1)
        await gpu.until_sent(2)
        now[0] += 4  # both
        gpu.sent[0].end()
        await asked[0]
        now[0] += 3  # the second alone
        gpu.sent[1].end()
        await asked[1]

    assert [batch.ended - batch.began for batch in heard.batches] == [5, 7]
    assert [batch.work for batch in heard.batches] == [1 + 4 / 2, 4 / 2 + 3]


# --- memory ---


async def test_input_that_takes_more_memory_than_a_batch_may_has_the_gpu_alone():
    gpu = Gpu(is_open=True)
    kinds = [Pass("net", "bias", (8, 8)), Pass("net", "cam", (8, 8), ("layer16",))]
    async with Batcher(gpu, streams=True) as batcher:
        batcher.allow(300 * 2**10)
        batcher.learn("net", layered(**{f"layer{place}": 4096 for place in range(1, 17)}))
        answers = await asyncio.gather(*(ask(batcher, [value], kinds[value % 2]) for value in range(40)))

    large = [batch for batch in gpu.sent if batch.pass_.kind == "bias"]
    assert answers == [[float(value)] for value in range(40)]
    assert {(batch.stream, batch.beside) for batch in large} == {(None, 0)}
    assert {batch.stream for batch in gpu.sent if batch.pass_.kind == "cam"} <= {0, 1}


async def test_batch_that_must_be_alone_waits_for_the_other_and_nothing_begins_before_it():
    gpu = Gpu()
    async with Batcher(gpu, max_batch_rows=1, streams=True) as batcher:
        batcher.allow(300 * 2**10)
        batcher.learn("net", layered(**{f"layer{place}": 4096 for place in range(1, 17)}))
        deep = Pass("net", "cam", (8, 8), ("layer16",))
        asked = waiting(batcher, 2, deep)
        await gpu.until_sent(2)
        first, second = sorted(gpu.sent, key=lambda batch: batch.stream)
        asked += waiting(batcher, 1, Pass("net", "bias", (8, 8)))
        await settle()
        first.end()
        await wait_in_loop_until(lambda: batcher.stats.batches == 3)
        asked += waiting(batcher, 4, deep)
        await settle()
        assert gpu.running == [second]
        second.end()
        await gpu.until_sent(3)
        assert (gpu.sent[2].pass_.kind, gpu.sent[2].stream, gpu.running) == ("bias", None, [gpu.sent[2]])
        gpu.sent[2].end()
        await gpu.until_sent(5)
        gpu.open()
        await asyncio.gather(*asked)


async def test_batch_without_memory_beside_another_runs_again_alone():
    gpu = Gpu()
    async with Batcher(gpu, max_batch_rows=8, streams=True) as batcher:
        batcher.pause()
        asked = waiting(batcher, 40)
        await settle()
        batcher.resume()
        await gpu.until_sent(2)
        first, second = gpu.sent
        second.end(OutOfMemory("no memory"))
        await wait_in_loop_until(lambda: batcher._executor.reruns)
        await settle()
        assert gpu.running == [first]  # nothing is sent that would fill the memory again
        first.end()
        await gpu.until_sent(3)
        again = gpu.sent[2]
        again.end()
        await gpu.until_sent(5)  # two at once as before
        gpu.open()
        answers = await asyncio.gather(*asked)

    assert answers == [[float(value)] for value in range(40)]
    assert (again.values, again.stream, again.beside) == (second.values, None, 0)
    assert all(len(batch.values) <= 4 for batch in gpu.sent[3:])  # so that two of them may find memory


async def test_batch_without_memory_when_alone_is_split():
    gpu = Full(2)
    async with Batcher(gpu, max_batch_rows=8, streams=True) as batcher:
        answers = await ask(batcher, range(32))
        tries = len(gpu.failed)
        await ask(batcher, range(32))

    assert answers == [float(value) for value in range(32)]
    assert (8, None) in gpu.failed
    assert all(size <= 2 for size, _ in gpu.failed[tries:])


async def test_row_that_finds_memory_only_alone_runs_alone_from_then_on():
    gpu = Gpu()
    async with Batcher(gpu, max_batch_rows=1, streams=True) as batcher:
        asked = waiting(batcher, 5)
        await gpu.until_sent(2)
        gpu.sent[1].end(OutOfMemory("no memory"))
        await wait_in_loop_until(lambda: batcher._executor.reruns)
        for ended in (0, 2, 3, 4, 5):
            gpu.sent[ended].end()
            await gpu.until_sent(min(max(3, ended + 2), 6))
        answers = await asyncio.gather(*asked)

    assert answers == [[float(value)] for value in range(5)]
    assert [(batch.stream, batch.beside) for batch in gpu.sent[2:]] == [(None, 0)] * 4


def test_row_that_runs_alone_shares_the_gpu_again_after_many_that_record_success():
    capacity = Capacity(64, 60.0)
    capacity.record_out_of_memory(CAM, 1)
    for _ in range(capacity_module.RETRY_LARGER):
        assert not capacity.may_share(CAM)
        assert inputs(capacity, CAM) == 1
        capacity.record_success(CAM, 1)

    assert capacity.may_share(CAM)


async def test_row_that_takes_all_memory_fails_alone_and_shrinks_no_batch():
    gpu = Full(room=20, weigh=lambda rows: sum(100 if row.copy else 1 for row in rows))
    async with Batcher(gpu, max_batch_rows=8, streams=True) as batcher:
        asked = [asyncio.create_task(ask(batcher, [value], poison={3})) for value in range(8)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        batcher.pause()
        more = waiting(batcher, 8)
        await settle()
        batcher.resume()
        await asyncio.gather(*more)

    assert isinstance(answers[3], OutOfMemory)
    assert [each for value, each in enumerate(answers) if value != 3] == [[float(v)] for v in range(8) if v != 3]
    assert len(gpu.sent[-1].values) == 8


def inputs(capacity, pass_):
    return capacity.budget(pass_, 64).inputs


def capacity_of(**sizes):
    capacity = Capacity(64, 60.0)
    capacity.learn("net", layered(**sizes))
    return capacity


def test_memory_that_an_early_layer_did_not_find_shrinks_no_batch_at_a_deep_one():
    capacity = capacity_of(early=2**20, deep=2**10)
    early, deep = (Pass("net", "cam", (8, 8), (name,)) for name in ("early", "deep"))
    capacity.record_out_of_memory(early, 64)

    assert inputs(capacity, early) == 32
    assert inputs(capacity, deep) == 64


def test_memory_that_a_layer_did_not_find_limits_batches_at_larger_layers_too():
    capacity = capacity_of(larger=2**21, early=2**20)
    larger, early = (Pass("net", "cam", (8, 8), (name,)) for name in ("larger", "early"))
    capacity.record_out_of_memory(early, 64)

    assert 1 <= inputs(capacity, larger) < inputs(capacity, early) == 32


def test_batches_cut_for_want_of_memory_grow_whatever_runs_between_them():
    capacity = Capacity(64, 60.0)
    capacity.record_out_of_memory(CAM, 8)
    for _ in range(capacity_module.RETRY_LARGER):
        assert inputs(capacity, CAM) == 4
        capacity.record_success(CAM, 1)  # one that was not full shows nothing
        capacity.record_success(SALIENCY, 8)
        capacity.record_success(CAM, 4)

    assert inputs(capacity, CAM) == 5
    assert inputs(capacity, SALIENCY) == 64


def test_measured_kind_scales_the_estimate_of_its_other_layers():
    """Measured at the default layer; twice the estimate there is twice the estimate elsewhere."""
    model = layered(layer1=2**20, layer4=2**10)
    plain, scaled = Capacity(64, 60.0), Capacity(64, 60.0)
    plain.learn("net", model)
    guess = plain._input_bytes(CAM)
    scaled.learn("net", model, {"cam": 2 * guess, "saliency": 3 * plain._input_bytes(SALIENCY)})
    early, bias = Pass("net", "cam", (8, 8), ("layer1",)), Pass("net", "bias", (8, 8))

    assert scaled._input_bytes(CAM) == 2 * guess
    assert scaled._input_bytes(early) == 2 * plain._input_bytes(early)
    assert scaled._input_bytes(bias) == 3 * plain._input_bytes(bias)  # like the worst that was measured


def test_number_of_inputs_follows_from_measured_rows_and_the_memory_that_is_allowed():
    capacity = Capacity(64, 60.0)
    capacity.learn("net", layered(layer4=2**10), {"cam": 10 * 2**20, "saliency": 100 * 2**20})
    results = []
    for mib in (0, 5, 100, 999, 10_000):
        capacity.allow(mib * 2**20)
        results.append((inputs(capacity, CAM), inputs(capacity, SALIENCY), capacity.may_share(SALIENCY)))

    assert results == [(64, 64, True), (1, 1, False), (10, 1, True), (64, 9, True), (64, 64, True)]


def test_batch_has_more_edits_of_a_small_layer_than_images():
    capacity = capacity_of(early=2**20, deep=2**18)
    early, deep = (Pass("net", "score", (8, 8), (name,)) for name in ("early", "deep"))
    whole = Pass("net", "score", (8, 8))

    assert [inputs(capacity, each) for each in (whole, early, deep)] == [64, 64, 256]
    capacity.allow(8 * capacity._input_bytes(whole))
    assert [inputs(capacity, each) for each in (whole, early, deep)] == [8, 8, 32]
    capacity.allow(capacity._input_bytes(whole) - 1)
    assert not any(map(capacity.may_share, (whole, early, deep)))
