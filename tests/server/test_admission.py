"""Who is let in: all the room for one that is alone, its share for each of several, and nobody is forgotten."""

import asyncio
import random

import pytest

from camserve_server.core.errors import ResourceExhausted
from camserve_server.engine.values import Row, RowResult
from camserve_server.models.values import Pass
from camserve_server.scheduling import BYTES_PER_SLOT, Batcher, admission
from camserve_server.scheduling.admission import Admission, address_of
from camserve_server.telemetry import Origin

PASS = Pass("m", "score", (1, 1))


class Ingress:
    """An admission, and those who are in."""

    def __init__(self, places=8, least=1):
        self.refused = {}
        self.most = {}
        self.order = []
        self.inside = {}
        self._door = Admission(places, least, ResourceExhausted)
        self._leave = {}
        self.visits = []

    @property
    def taken(self):
        return self._door.taken

    def holds(self, caller):
        return sum(self.inside.get(caller, ()))

    def come(self, caller, places=1, *, wait=False):
        self.visits.append(asyncio.ensure_future(self._visit(caller, places, wait)))
        return self.visits[-1]

    async def _visit(self, caller, places, wait):
        try:
            async with self._door.admit(places, caller=caller, wait=wait):
                self.order.append(caller)
                self.inside.setdefault(caller, []).append(places)
                self.most[caller] = max(self.most.get(caller, 0), self.holds(caller))
                leave = asyncio.Event()
                self._leave.setdefault(caller, []).append(leave)
                try:
                    await leave.wait()
                finally:
                    self.inside[caller].remove(places)
        except ResourceExhausted as error:
            self.refused.setdefault(caller, []).append(str(error))

    async def leave(self, caller, count=1):
        for _ in range(count):
            self._leave[caller].pop(0).set()
            await settle()


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def door():
    one = Ingress()
    yield one
    for task in one.visits:
        task.cancel()
    await settle()


async def test_one_that_is_alone_fills_all_there_is_and_is_refused_beyond_it(door):
    for _ in range(10):
        door.come("greedy")
    await settle()

    assert door.holds("greedy") == 8
    assert door.refused == {"greedy": ["the queue is full: 8 rows are under way, and 8 is the limit"] * 2}


async def test_who_comes_to_a_full_house_is_not_refused_but_gets_the_first_room_that_comes_free(door):
    for _ in range(8):
        door.come("greedy")
    await settle()
    door.come("modest")
    await settle()
    door.come("greedy")
    await settle()
    await door.leave("greedy")

    assert "modest" not in door.refused
    assert door.holds("modest") == 1
    assert door.refused["greedy"] == [
        "your share of the queue is full: 4 of its 8 rows, while other callers use it too"
    ]


async def test_with_others_there_nobody_gets_more_than_a_share(door):
    door.come("modest")
    await settle()
    for _ in range(10):
        door.come("greedy")
    await settle()

    assert (door.holds("greedy"), len(door.refused["greedy"])) == (4, 6)
    door.come("third")
    await settle()
    await door.leave("greedy", 4)
    for _ in range(10):
        door.come("greedy")
    await settle()
    assert door.holds("greedy") == 8 // 3


async def test_who_has_not_come_for_a_while_has_no_share(door, monkeypatch):
    door.come("modest")
    await settle()
    await door.leave("modest")
    door.come("greedy")
    await settle()
    monkeypatch.setattr(admission, "PRESENCE_TIMEOUT", 0.0)
    await asyncio.sleep(0.01)
    for _ in range(10):
        door.come("greedy")
    await settle()

    assert door.holds("greedy") == 8


async def test_who_is_inside_has_a_share_however_long_it_stays(door, monkeypatch):
    monkeypatch.setattr(admission, "PRESENCE_TIMEOUT", 0.0)
    door.come("modest")
    await settle()
    await asyncio.sleep(0.01)
    for _ in range(10):
        door.come("greedy")
    await settle()

    assert door.holds("greedy") == 4


async def test_a_share_fills_a_batch_however_many_come(door):
    door._door._min_share = 3
    for number in range(8):
        door.come(f"other {number}")
    await settle()
    await asyncio.gather(*(door.leave(f"other {number}") for number in range(8)))
    for _ in range(10):
        door.come("one")
    await settle()

    assert door.holds("one") == 3


async def test_streams_that_wait_share_too_and_take_turns(door):
    for _ in range(20):
        door.come("greedy", wait=True)
    await settle()
    for _ in range(3):
        door.come("modest", wait=True)
    await settle()
    door.order.clear()
    await door.leave("greedy", 8)
    while door.order.count("greedy") < 10:
        await door.leave("greedy" if door.holds("greedy") else "modest")

    assert door.order[:3] == ["modest"] * 3
    assert door.refused == {}


async def test_a_large_one_that_waits_is_not_kept_out_by_small_ones_of_others(door):
    for _ in range(8):
        door.come("small")
    await settle()
    door.come("large", 6, wait=True)
    for _ in range(5):
        await door.leave("small")
        door.come("small")
        await settle()
    await door.leave("small")

    assert door.holds("large") == 6
    assert door.taken <= 8


async def test_one_whose_request_is_more_than_its_share_is_let_in_all_the_same(door):
    for number in range(4):
        door.come(f"other {number}")
    await settle()
    door.come("large", 4)
    await settle()

    assert door.holds("large") == 4


async def test_the_line_is_not_endless(door):
    for _ in range(8 + admission.MAX_WAITING + 5):
        door.come("greedy", wait=True)
    await settle()

    assert len(door.refused["greedy"]) == 5
    door.come("modest", wait=True)
    door.come("modest")
    await settle()
    assert "modest" not in door.refused


async def test_who_gives_up_in_the_line_makes_way(door):
    """A large one for which room is kept, at the head of the line; and one at the very moment when it has its turn."""
    for _ in range(8):
        door.come("greedy")
    await settle()
    large, small = door.come("large", 8, wait=True), door.come("small", wait=True)
    await settle()
    await door.leave("greedy", 2)
    held = door.holds("small")
    large.cancel()
    await settle()
    assert (held, door.holds("small")) == (0, 1)

    small.cancel()
    other = [door.come("other", 7, wait=True), door.come("late", wait=True)]
    await settle()
    door._leave["greedy"][0].set()
    await asyncio.sleep(0)
    other[0].cancel()
    await settle()
    await door.leave("greedy", 6)
    assert door.holds("late") == 1
    await door.leave("late")
    assert door.taken == 0
    assert not door._door._waiting
    assert not door._door._waiters


@pytest.mark.parametrize("first", ["decided", "cancelled"])
@pytest.mark.parametrize("decision", ["let in", "turned away"])
async def test_waiter_decided_and_cancelled_in_the_same_turn_holds_nothing(door, decision, first):
    for _ in range(8):
        door.come("greedy")
    await settle()
    waiter = door.come("modest", 2, wait=True)
    await settle()

    def decide():
        if decision == "turned away":
            door._door.turn_away(ResourceExhausted("closed"))
        else:
            for leave in door._leave["greedy"][:2]:
                leave.set()

    steps = [decide, waiter.cancel]
    for step in steps if first == "decided" else reversed(steps):
        step()
        if decision == "let in" and step is decide:
            await asyncio.sleep(0)  # those who leave do so now: the waiter has its room, and was not yet resumed
    await settle()

    assert waiter.cancelled()
    assert door.taken == sum(map(door.holds, door.inside))
    assert not door._door._waiters
    assert not door._door._waiting


async def by_chance(door, steps=3000):
    """Let callers come, give up and leave; return the most that were inside, and what is left when all have gone."""
    chance, highest, tasks = random.Random(5), 0, []
    for _ in range(steps):
        what = chance.random()
        if what < 0.6:
            tasks.append(door.come(chance.choice("abc"), chance.randint(1, 5), wait=chance.random() < 0.5))
        elif tasks and what < 0.7:
            tasks.pop(chance.randrange(len(tasks))).cancel()
        elif inside := [caller for caller in "abc" if door._leave.get(caller)]:
            door._leave[chance.choice(inside)].pop(0).set()
        await asyncio.sleep(0)
        highest = max(highest, sum(map(door.holds, "abc")))
    for _ in range(steps):
        for events in door._leave.values():
            events[0].set() if events else None
            del events[:1]
        await asyncio.sleep(0)
    return (
        highest,
        sum(map(door.holds, "abc")),
        door.taken,
        len(door._door._waiters),
        sum(not one.done() for one in tasks),
    )


async def test_whoever_comes_and_goes_there_is_never_more_inside_than_there_is_room_and_in_the_end_nobody(door):
    assert await by_chance(door) == (8, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("_release", lambda self, *_: self._admit_waiters()),
        ("_admit_waiters", lambda _self: None),
        ("_may_take", lambda *_, **_how: True),
    ],
)
async def test_a_planted_fault_is_seen(door, method, fault, monkeypatch):
    monkeypatch.setattr(Admission, method, fault)

    assert await by_chance(door, steps=500) != (8, 0, 0, 0, 0)


class Engine:
    """Answers every row, and keeps whose they were."""

    def __init__(self):
        self.batches = []

    def __call__(self, _pass, rows):
        self.batches.append([row.target for row in rows])
        return [RowResult(logits=None, target=None, score=0.0) for _ in rows]


async def sent(batcher, caller, rows=1, size=0):
    async with batcher.admit(rows, size=size, caller=caller):
        rows_ = [Row(object(), caller) for _ in range(rows)]
        await batcher.submit(PASS, rows_, lambda *_: None, origin=Origin(caller))


async def test_callers_take_turns_in_batches():
    engine = Engine()
    async with Batcher(engine, max_batch_rows=8) as batcher:
        batcher.pause()
        calls = [asyncio.ensure_future(sent(batcher, "greedy")) for _ in range(64)]
        await settle()
        calls += [asyncio.ensure_future(sent(batcher, "modest")) for _ in range(4)]
        await settle()
        batcher.resume()
        await asyncio.gather(*calls)

    assert engine.batches[0].count("modest") >= 3
    assert sum(batch.count("modest") for batch in engine.batches[:2]) == 4


async def test_a_greedy_caller_with_200_outstanding_costs_a_modest_one_no_refusal_and_itself_nothing_when_alone():
    """The modest one asks again as soon as it is answered, and the greedy one soon after a refusal.

    At once would keep the interpreter from the engine's thread, for a quarter of a second at a time on some machines.
    """

    async def answered(modest):
        engine, done, refused = Engine(), {"greedy": 0, "modest": 0}, {"greedy": 0, "modest": 0}
        async with Batcher(engine, max_batch_rows=8, max_queue_rows=64) as batcher:

            async def loop(caller):
                while len(engine.batches) < 300:
                    try:
                        await sent(batcher, caller)
                        done[caller] += 1
                    except ResourceExhausted:
                        refused[caller] += 1
                        await asyncio.sleep(0.02)

            callers = ["greedy"] * 200 + ["modest"] * modest
            await asyncio.gather(*map(loop, callers))
        return done, refused, sum(map(len, engine.batches)) / len(engine.batches)

    alone, _, full = await answered(0)
    done, refused, fill = await answered(2)

    assert refused["modest"] == 0
    assert refused["greedy"] > 0
    assert done["modest"] >= 290  # each is answered by every second batch, as it would be without the other
    assert full == pytest.approx(8, abs=0.2)
    assert fill == pytest.approx(8, abs=0.2)
    assert alone["greedy"] >= 0.95 * 8 * 300


async def test_a_large_message_takes_the_places_of_several_rows_and_never_more_than_there_are():
    async with Batcher(Engine(), max_queue_rows=8) as batcher:
        batcher.pause()
        large = asyncio.ensure_future(sent(batcher, "a", size=5 * BYTES_PER_SLOT + 1))
        await settle()
        taken = batcher.admitted
        with pytest.raises(ResourceExhausted):
            await sent(batcher, "a", size=2 * BYTES_PER_SLOT + 1)
        batcher.resume()
        await large
        await sent(batcher, "a", size=100 * BYTES_PER_SLOT)

    assert taken == 6
    assert batcher.admitted == 0


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
def test_whose_address_a_peer_has(peer, address):
    assert address_of(peer) == address
