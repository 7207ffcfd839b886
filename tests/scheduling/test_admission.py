"""Admission: all slots for a single caller, equal shares for several, and no waiter is forgotten."""

import asyncio
import random
import threading
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from camserve_server.core.errors import ResourceExhausted
from camserve_server.core.sockets import address_of
from camserve_server.engine.values import Row, RowResult
from camserve_server.models.values import Pass
from camserve_server.scheduling import BYTES_PER_ROW, Batcher, admission
from camserve_server.scheduling.admission import Admission
from camserve_server.telemetry import Origin
from support import StoppedClock, wait_in_loop_until

PASS = Pass("m", "score", (1, 1))


class Visitors:
    """An admission with fake requests, which hold their slots until the test releases them."""

    def __init__(self, slots=8, min_share=1, *, headroom=False):
        self.refused = {}
        self.most = {}
        self.order = []
        self.held = {}
        self.admission = Admission(slots, min_share, ResourceExhausted, headroom=headroom)
        self.releases = {}
        self.tasks = []

    @property
    def taken(self):
        return self.admission.taken

    def holds(self, caller):
        return sum(self.held.get(caller, ()))

    def request(self, caller, slots=1, *, wait=False):
        self.tasks.append(asyncio.ensure_future(self._hold(caller, slots, wait)))
        return self.tasks[-1]

    async def _hold(self, caller, slots, wait):
        try:
            async with self.admission.admit(slots, caller=caller, wait=wait):
                self.order.append(caller)
                self.held.setdefault(caller, []).append(slots)
                self.most[caller] = max(self.most.get(caller, 0), self.holds(caller))
                release = asyncio.Event()
                self.releases.setdefault(caller, []).append(release)
                try:
                    await release.wait()
                finally:
                    self.held[caller].remove(slots)
        except ResourceExhausted as error:
            self.refused.setdefault(caller, []).append(str(error))

    async def release(self, caller, count=1):
        for _ in range(count):
            self.releases[caller].pop(0).set()
            await settle()


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
async def clock():
    """The event loop's clock. It stands still: nobody is absent because the machine is slow."""
    with StoppedClock() as stopped:
        yield stopped


@asynccontextmanager
async def visiting(*slots, **options):
    visitors = Visitors(*slots, **options)
    yield visitors
    for task in visitors.tasks:
        task.cancel()
    await settle()


@pytest.fixture
async def visitors():
    async with visiting() as visitors:
        yield visitors


async def test_single_caller_may_fill_the_queue_and_is_refused_beyond_it(visitors):
    for _ in range(10):
        visitors.request("greedy")
    await settle()

    assert visitors.holds("greedy") == 8
    assert visitors.refused == {"greedy": ["the queue is full: 8 rows are under way, and 8 is the limit"] * 2}


async def test_new_caller_at_a_full_queue_waits_for_the_first_free_slot(visitors):
    for _ in range(8):
        visitors.request("greedy")
    await settle()
    visitors.request("modest")
    await settle()
    visitors.request("greedy")
    await settle()
    await visitors.release("greedy")

    assert "modest" not in visitors.refused
    assert visitors.holds("modest") == 1
    assert visitors.refused["greedy"] == [
        "your share of the queue is full: 4 of its 8 rows, while other callers use it too"
    ]


async def test_no_caller_gets_more_than_its_share_while_others_are_present(visitors):
    visitors.request("modest")
    await settle()
    for _ in range(10):
        visitors.request("greedy")
    await settle()

    assert (visitors.holds("greedy"), len(visitors.refused["greedy"])) == (4, 6)
    visitors.request("third")
    await settle()
    await visitors.release("greedy", 4)
    for _ in range(10):
        visitors.request("greedy")
    await settle()
    assert visitors.holds("greedy") == 8 // 3


async def test_caller_that_is_absent_for_a_while_has_no_share(visitors, clock):
    visitors.request("modest")
    await settle()
    await visitors.release("modest")
    visitors.request("greedy")
    await settle()
    for _ in range(10):
        visitors.request("greedy")
    await settle()
    before = visitors.holds("greedy")
    clock.advance(admission.PRESENCE_TIMEOUT)
    for _ in range(10):
        visitors.request("greedy")
    await settle()

    assert (before, visitors.holds("greedy")) == (4, 8)


async def test_caller_that_holds_slots_keeps_its_share(visitors, clock):
    visitors.request("modest")
    await settle()
    clock.advance(admission.PRESENCE_TIMEOUT)
    for _ in range(10):
        visitors.request("greedy")
    await settle()

    assert visitors.holds("greedy") == 4


async def test_caller_that_only_waits_keeps_its_share(visitors, clock):
    for _ in range(8):
        visitors.request("greedy")
    await settle()
    visitors.request("modest")
    await settle()
    clock.advance(admission.PRESENCE_TIMEOUT)
    visitors.request("greedy")
    await settle()

    assert visitors.refused["greedy"] == [
        "your share of the queue is full: 4 of its 8 rows, while other callers use it too"
    ]


async def test_share_is_never_below_the_minimum(visitors):
    visitors.admission._min_share = 3
    for number in range(8):
        visitors.request(f"other {number}")
    await settle()
    await asyncio.gather(*(visitors.release(f"other {number}") for number in range(8)))
    for _ in range(10):
        visitors.request("last")
    await settle()

    assert visitors.holds("last") == 3


async def test_waiting_streams_get_shares_and_take_turns(visitors):
    for _ in range(20):
        visitors.request("greedy", wait=True)
    await settle()
    for _ in range(3):
        visitors.request("modest", wait=True)
    await settle()
    visitors.order.clear()
    await visitors.release("greedy", 8)
    while visitors.order.count("greedy") < 10:
        await visitors.release("greedy" if visitors.holds("greedy") else "modest")

    assert visitors.order[:3] == ["modest"] * 3
    assert visitors.refused == {}


async def test_waiting_large_request_is_not_starved_by_others(visitors):
    for _ in range(8):
        visitors.request("small")
    await settle()
    visitors.request("large", 6, wait=True)
    for _ in range(5):
        await visitors.release("small")
        visitors.request("small")
        await settle()
    await visitors.release("small")

    assert visitors.holds("large") == 6
    assert visitors.taken <= 8


async def test_request_larger_than_its_share_is_admitted_if_it_is_the_only_one(visitors):
    for number in range(4):
        visitors.request(f"other {number}")
    await settle()
    visitors.request("large", 4)
    await settle()

    assert visitors.holds("large") == 4


async def test_number_of_waiting_slots_is_limited(visitors):
    for _ in range(8 + admission.MAX_WAITING + 5):
        visitors.request("greedy", wait=True)
    await settle()

    assert len(visitors.refused["greedy"]) == 5
    visitors.request("modest", wait=True)
    visitors.request("modest")
    await settle()
    assert "modest" not in visitors.refused


async def test_cancelled_waiter_makes_way(visitors):
    """A large waiter for which slots are reserved; then a waiter in the same loop turn as its admission."""
    for _ in range(8):
        visitors.request("greedy")
    await settle()
    large, small = visitors.request("large", 8, wait=True), visitors.request("small", wait=True)
    await settle()
    await visitors.release("greedy", 2)
    held = visitors.holds("small")
    large.cancel()
    await settle()
    assert (held, visitors.holds("small")) == (0, 1)

    small.cancel()
    other = [visitors.request("other", 7, wait=True), visitors.request("late", wait=True)]
    await settle()
    visitors.releases["greedy"][0].set()
    await asyncio.sleep(0)
    other[0].cancel()
    await settle()
    await visitors.release("greedy", 6)
    assert visitors.holds("late") == 1
    await visitors.release("late")
    assert visitors.taken == 0
    assert not visitors.admission._waiting
    assert not visitors.admission._waiters


@pytest.mark.parametrize("first", ["decided", "cancelled"])
@pytest.mark.parametrize("decision", ["admitted", "refused"])
async def test_waiter_decided_and_cancelled_in_the_same_turn_holds_nothing(visitors, decision, first):
    for _ in range(8):
        visitors.request("greedy")
    await settle()
    waiter = visitors.request("modest", 2, wait=True)
    await settle()

    def decide():
        if decision == "refused":
            visitors.admission.turn_away(ResourceExhausted("closed"))
        else:
            for release in visitors.releases["greedy"][:2]:
                release.set()

    steps = [decide, waiter.cancel]
    for step in steps if first == "decided" else reversed(steps):
        step()
        if decision == "admitted" and step is decide:
            await asyncio.sleep(0)  # the slots are released now: the waiter is admitted, and its task has not run since
    await settle()

    assert waiter.cancelled()
    assert visitors.taken == sum(map(visitors.holds, visitors.held))
    assert not visitors.admission._waiters
    assert not visitors.admission._waiting


async def run_at_random(visitors, steps=3000):
    """Let callers request, cancel and release at random; return the most slots held, and what is left at the end."""
    random_, highest, tasks = random.Random(5), 0, []
    for _ in range(steps):
        action = random_.random()
        if action < 0.6:
            tasks.append(visitors.request(random_.choice("abc"), random_.randint(1, 5), wait=random_.random() < 0.5))
        elif tasks and action < 0.7:
            tasks.pop(random_.randrange(len(tasks))).cancel()
        elif holders := [caller for caller in "abc" if visitors.releases.get(caller)]:
            visitors.releases[random_.choice(holders)].pop(0).set()
        await asyncio.sleep(0)
        highest = max(highest, sum(map(visitors.holds, "abc")))
    for _ in range(steps):
        for events in visitors.releases.values():
            events[0].set() if events else None
            del events[:1]
        await asyncio.sleep(0)
    return (
        highest,
        sum(map(visitors.holds, "abc")),
        visitors.taken,
        len(visitors.admission._waiters),
        sum(not task.done() for task in tasks),
    )


async def test_random_requests_never_exceed_the_limit_and_leave_nothing_behind(visitors):
    assert await run_at_random(visitors) == (8, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("_release", lambda self, *_: self._admit_waiters()),
        ("_admit_waiters", lambda _self: None),
        ("_may_take", lambda *_, **_how: True),
    ],
)
async def test_planted_fault_is_detected(visitors, method, fault, monkeypatch):
    monkeypatch.setattr(Admission, method, fault)

    assert await run_at_random(visitors, steps=500) != (8, 0, 0, 0, 0)


class FakeWorker:
    """Worker that returns every row's result, and records the callers of each batch."""

    def __init__(self):
        self.batches = []

    def __call__(self, _pass, rows):
        self.batches.append([row.target for row in rows])
        return [RowResult(logits=None, target=None, score=0.0) for _ in rows]


async def send(batcher, caller, rows=1, size=0):
    async with batcher.reserve(size, caller=caller), batcher.admit(rows, caller=caller):
        batch = [Row(object(), caller) for _ in range(rows)]
        await batcher.submit(PASS, batch, lambda *_: None, origin=Origin(caller))


async def test_callers_share_batches():
    worker = FakeWorker()
    async with Batcher(worker, max_batch_rows=8) as batcher:
        batcher.pause()
        calls = [asyncio.ensure_future(send(batcher, "greedy")) for _ in range(64)]
        await settle()
        calls += [asyncio.ensure_future(send(batcher, "modest")) for _ in range(4)]
        await settle()
        batcher.resume()
        await asyncio.gather(*calls)

    assert worker.batches[0].count("modest") >= 3
    assert sum(batch.count("modest") for batch in worker.batches[:2]) == 4


class SteppedWorker(FakeWorker):
    """Worker that runs each batch when the test lets it."""

    def __init__(self):
        super().__init__()
        self.go = threading.Semaphore(0)

    def __call__(self, pass_, rows):
        results = super().__call__(pass_, rows)
        assert self.go.acquire(timeout=60)
        return results


async def run_callers(callers, rounds=100):
    """Let callers send as soon as they are answered, and after a refusal when the next batch runs.

    Returns:
        the batches, and the answers and refusals of each caller.
    """
    worker, done, refused, began = SteppedWorker(), Counter(), Counter(), asyncio.Condition()

    async def keep_sending(caller):
        while True:
            try:
                await send(batcher, caller)
                done[caller] += 1
            except ResourceExhausted:
                refused[caller] += 1
                async with began:
                    await began.wait()

    async with Batcher(worker, max_batch_rows=8, max_queue_rows=64) as batcher:
        batcher.pause()
        tasks = [asyncio.create_task(keep_sending(caller)) for caller in callers]
        await settle()
        batcher.resume()
        for number in range(1, rounds + 1):
            await wait_in_loop_until(lambda least=number: len(worker.batches) == least)
            async with began:
                began.notify_all()
            await settle()
            worker.go.release()
        for task in tasks:
            task.cancel()
        worker.go.release(rounds)
    return worker.batches[:rounds], done, refused


async def test_single_caller_fills_every_batch():
    batches, done, refused = await run_callers(["greedy"] * 200)

    assert {len(batch) for batch in batches} == {8}
    assert done["greedy"] >= 98 * 8
    assert refused["greedy"] > 0


async def test_greedy_caller_causes_no_refusal_of_a_modest_one():
    batches, done, refused = await run_callers(["greedy"] * 200 + ["modest"] * 2)

    assert refused.keys() == {"greedy"}
    assert {len(batch) for batch in batches} == {8}
    assert done["modest"] >= 95  # two callers, each answered by every second batch, as without the other one
    assert done["greedy"] >= 98 * 8 - done["modest"]


async def test_memory_of_requests_is_limited_apart_from_rows():
    async with Batcher(FakeWorker(), max_queue_rows=12) as batcher:
        batcher.pause()
        calls = [asyncio.ensure_future(send(batcher, "a", size=2 * BYTES_PER_ROW)) for _ in range(4)]
        await settle()
        with pytest.raises(ResourceExhausted, match="your requests hold 524,288"):
            await send(batcher, "a", size=BYTES_PER_ROW)
        calls.append(asyncio.ensure_future(send(batcher, "b", size=2 * BYTES_PER_ROW)))
        await settle()
        rows, memory = batcher.admitted, batcher._memory.taken
        batcher.resume()
        await asyncio.gather(*calls)
        await send(batcher, "a", size=100 * BYTES_PER_ROW)  # counts as a fifth of all memory

    assert (rows, memory) == (5, 10 * BYTES_PER_ROW)
    assert batcher.admitted == batcher._memory.taken == 0


async def test_rows_are_free_while_memory_is_held():
    async with Batcher(FakeWorker(), max_queue_rows=2) as batcher, batcher.reserve(10, caller="a"):
        await send(batcher, "a", rows=2)
        await send(batcher, "b", rows=2)

        assert batcher.admitted == 0


@pytest.mark.parametrize("hostile", [1, 2, 4, 16])
async def test_callers_that_never_let_go_leave_room_for_one_more(hostile):
    slots, greedy = 1000, [f"greedy {number}" for number in range(hostile)]
    async with visiting(slots, headroom=True) as visitors:
        for _ in range(2 * slots // hostile):
            for caller in greedy:
                visitors.request(caller)
            await settle()
        free = slots - visitors.taken
        visitors.request("modest", free // 2)
        await settle()

        assert free >= slots // (2 * hostile + 1)
        assert visitors.holds("modest") == free // 2


async def test_caller_holds_at_most_twice_what_it_leaves_free():
    async with visiting(9, headroom=True) as visitors:
        for _ in range(9):
            visitors.request("a", wait=True)
        await settle()
        assert visitors.holds("a") == 6
        await visitors.release("a")

        assert visitors.holds("a") == 6  # one of those that waited took its place


@pytest.mark.parametrize("headroom", [False, True])
async def test_caller_with_a_long_line_lets_others_have_their_turn(headroom):
    """Each request takes all that a caller may hold, so nobody holds anything when the next caller is chosen."""
    async with visiting(8, headroom=headroom) as visitors:
        slots = 4 if headroom else 8
        for _ in range(3):
            visitors.request("hostile", slots, wait=True)
        await settle()
        visitors.request("modest", slots, wait=True)
        await settle()
        for _ in range(2):
            visitors.request("hostile", slots, wait=True)
            await visitors.release(visitors.order[-1])

        assert visitors.order[:3] == ["hostile", "hostile", "modest"]


async def test_large_request_that_waits_lets_small_ones_of_its_caller_pass():
    async with visiting(9, headroom=True) as visitors:
        visitors.request("hostile", 4)
        await settle()
        for slots in (4, 1, 1):
            visitors.request("proxy", slots, wait=True)
            await settle()
        assert visitors.held == {"hostile": [4], "proxy": [1, 1]}
        await visitors.release("proxy")
        visitors.request("proxy", 1, wait=True)
        await visitors.release("hostile")

        assert visitors.held["proxy"] == [1, 1, 4]


async def test_large_request_that_waits_does_not_keep_small_ones_of_others_out():
    async with visiting(9, headroom=True) as visitors:
        visitors.request("hostile", 4)
        visitors.request("large", 4, wait=True)
        await settle()
        visitors.request("small")
        await settle()
        assert visitors.order == ["hostile", "small"]
        await visitors.release("hostile")

        assert visitors.order == ["hostile", "small", "large"]


async def test_stranger_is_admitted_and_forgotten():
    async with Batcher(FakeWorker(), max_queue_rows=8) as batcher:
        async with batcher.admit_stranger(10):
            assert (batcher.admitted, batcher._memory.taken) == (1, 10)
        async with batcher.admit(8, caller="a"):  # alone again: the share of a lone caller is the whole queue
            assert batcher.admitted == 8


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:1", "127.0.0.1"),
        ("ipv6:%5B::1%5D:50051", "::/64"),
        ("ipv6:[fe80::1%25eth0]:7", "fe80::/64"),
        ("unix:", "unix:"),
        ("unix:/run/camserve.sock", "unix:/run/camserve.sock"),
        ("ipv6:[::ffff:10.0.0.7]:9", "10.0.0.7"),
        ("vsock:3:4", "3"),
        ("", ""),
    ],
)
def test_address_of_a_peer(peer, address):
    assert address_of(peer) == address
