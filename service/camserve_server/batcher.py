"""Waits for company: gathers rows of many requests into batches; an engine that is free pulls one.

Rows that have their `Pass` in common share a batch, whatever their methods and targets. No timer holds a batch back
unless one is asked for: while the engine works on one batch, the next one gathers.

An engine may run two batches at once, each with half of its cores, and does so as soon as two requests wait: they are
done as soon as they would be one after the other on all cores, a core that other work of the server has interrupted is
waited for by one batch of two, and what comes later finds a half that is free sooner. One that waits alone has all
cores.

Passes take turns: what is due first is the pass that was served longest ago, or a deadline that is near. A pass in
which only long requests wait (of more rows than a batch) goes behind those with short ones, unless it has waited for a
second. Within a pass the request with the fewest rows left goes first, and of many equal long ones the first to begin
is the first to end. Callers take turns at that, so that nobody waits behind all that another has sent. A part of every
batch belongs to the request that has been there longest, so that short ones never starve a long one. While short ones
keep coming, that part is all that long ones get: a batch cannot be interrupted, so what a short one waits for must
itself be short.
"""

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self, TypeAlias

from camserve_server.admission import CALLER, Admission
from camserve_server.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    OutOfMemory,
    ResourceExhausted,
    Unavailable,
    WorkerLost,
)
from camserve_server.telemetry import CURRENT, Ran, Record, Spent, Told
from camserve_server.threads import in_thread
from camserve_server.types import Half, Kind, Pass, Row, RowResult

log = logging.getLogger(__name__)

Run: TypeAlias = Callable[..., list[RowResult]]
"""An engine, as the batcher knows it: a `Pass` and rows in, plain values out, in a thread of its own.

One that can run two batches at once is also told which half of it one may take, 0 or 1.
"""

Collect: TypeAlias = Callable[[int, RowResult], None]

PATIENCE = 1.0  # seconds: a deadline nearer than this is urgent
RETRY_LARGER = 64  # a batch cut for want of memory may be one row larger again after so many
BRISK = 10.0  # seconds: while a short request came so lately, another may come
LONG = 32  # rows: a request of more is a long one, even if a batch has room for all of them
PLACE = 256 * 2**10  # bytes of its message that a row has room for: a request of more takes the places of several rows
OLDEST_SHARE = 4  # one row in so many of a batch is the oldest request's
SHORTEST_RETRY = 0.05
LONGEST_RETRY = 5.0


@dataclass(slots=True)
class Stats:
    """What a batcher has done since it began."""

    batches: int = 0
    rows: int = 0
    refused: int = 0
    expired: int = 0
    answered: int = 0
    failed: int = 0


@dataclass(slots=True, eq=False)
class _Ticket:
    """Rows of one request that wait, and how far they have come."""

    pass_: Pass
    rows: Sequence[Row]
    collect: Collect
    deadline: float
    arrived: float
    done: asyncio.Future[None]
    spent: Spent
    caller: str = field(default_factory=CALLER.get)
    record: Record | None = field(default_factory=CURRENT.get)
    taken: int = 0
    delivered: int = 0
    early: dict[int, RowResult] = field(default_factory=dict)
    since: float = field(init=False)

    def __post_init__(self) -> None:
        self.since = self.arrived

    @property
    def waiting(self) -> int:
        return 0 if self.done.done() else len(self.rows) - self.taken

    @property
    def inputs(self) -> int:
        """How many inputs its rows that wait have between them."""
        return len({row.input for row in self.rows[self.taken : self.taken + self.waiting]})

    def take(self, room: int) -> "list[_Place]":
        """Give rows into a batch that has room for so many inputs; rows that share one cost no more than it does."""
        first, last, seen = self.taken, self.taken + self.waiting, set[Hashable]()
        while self.taken < last and len(seen | {self.rows[self.taken].input}) <= room:
            seen.add(self.rows[self.taken].input)
            self.taken += 1
        return [(self, index) for index in range(first, self.taken)]

    def deliver(self, index: int, result: RowResult) -> None:
        """Hand over a result, and what waited for it: of several engines, a later one may be done before."""
        self.early[index] = result
        while self.delivered in self.early and not self.done.done():
            self._hand_over(self.delivered, self.early.pop(self.delivered))

    def _hand_over(self, index: int, result: RowResult) -> None:
        try:
            self.collect(index, result)
        except Exception as error:  # noqa: BLE001 -- theirs, not the batch's
            self.fail(error)
            return
        self.delivered += 1
        if self.delivered == len(self.rows):
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


_Place: TypeAlias = tuple[_Ticket, int]


@dataclass(slots=True, eq=False)
class _Engine:
    """What runs batches, one after another or two at once, unless it is paused.

    Attributes:
        run: it.
        threads: that wait for it, or compute; one for each batch that may run at once.
        resumed: cleared while it is paused.
        halved: set while its first half runs a batch, and the second may run another.
        inputs: that each half works on; those of a batch that has all of it are its first half's.
    """

    run: Run
    threads: ThreadPoolExecutor
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    halved: asyncio.Event = field(default_factory=asyncio.Event)
    inputs: list[int] = field(default_factory=lambda: [0, 0])

    async def ask(self, pass_: Pass, rows: Sequence[Row], half: Half | None) -> list[RowResult]:
        """Run a batch on all of it, or on a half."""
        more = () if half is None else (half,)
        return await in_thread(self.threads, _contained, self.run, pass_, rows, *more)


class Batcher:
    """Runs rows in batches, within a limit on how many it has accepted.

    Args:
        runs: the engines; each pulls a batch whenever it is free, and any of them may run any row.
        max_batch_rows: inputs in a batch at most: rows of one input with several targets share it.
        max_queue_rows: rows accepted and not yet answered at most.
        max_delay: seconds that the oldest row may be held back for company; 0 for none.
        halves: whether each engine can run two batches at once, each on a half of it.

    Attributes:
        told: who hears of every batch, if somebody does.
        limit: rows accepted and not yet answered at most.
    """

    told: Told | None = None

    def __init__(
        self,
        *runs: Run,
        max_batch_rows: int = 8,
        max_queue_rows: int = 1024,
        max_delay: float = 0.0,
        halves: bool = False,
    ) -> None:
        self.stats = Stats()
        at_once = 2 if halves else 1
        self._engines = [_Engine(run, ThreadPoolExecutor(at_once, thread_name_prefix="engine")) for run in runs]
        self._max_batch = max_batch_rows
        self.limit = max_queue_rows
        # Two batches, one that runs and one that gathers, are what keeps an engine busy.
        self._door = Admission(max_queue_rows, 2 * max_batch_rows, self._refused)
        self._max_delay = max_delay
        self._halves = halves
        self._caps: dict[tuple[str, Kind], int] = {}
        self._queues: dict[Pass, list[_Ticket]] = {}
        self._served: dict[Pass, float] = {}
        self._row_seconds = 0.01
        self._short_came = -math.inf
        self._arrived = asyncio.Event()
        self._gone = ""
        self._loops: list[asyncio.Task[None]] = []
        self.resume()

    async def __aenter__(self) -> Self:
        """Begin to pull batches."""
        serving = (self._serve, self._serve_second) if self._halves else (self._serve,)
        self._loops = [asyncio.create_task(serve(engine)) for engine in self._engines for serve in serving]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop; whatever waits, or runs, is answered with Unavailable."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self._fail_waiting(Unavailable("the server is shutting down", shed="draining"))
        for engine in self._engines:
            await asyncio.to_thread(engine.threads.shutdown)  # not on the loop: the batch that runs may hang

    def pause(self, place: int | None = None) -> None:
        """Form no further batch until `resume`, for one engine or for all; what arrives waits."""
        for engine in self._engines if place is None else self._engines[place : place + 1]:
            engine.resumed.clear()

    def resume(self, place: int | None = None) -> None:
        """Form batches again."""
        self._gone = ""
        for engine in self._engines if place is None else self._engines[place : place + 1]:
            engine.resumed.set()

    def give_up(self, why: str) -> None:
        """Answer all that waits, and whatever comes, with Unavailable until `resume`: no engine will be there soon."""
        self._gone = why
        self._fail_waiting(self._no_engine())

    def _check_there(self) -> None:
        if self._gone:
            raise self._no_engine()

    def _no_engine(self) -> Unavailable:
        return Unavailable(self._gone, retry_after=LONGEST_RETRY, shed="no_engine")

    def _fail_waiting(self, error: Unavailable) -> None:
        for ticket in self._all_waiting():
            ticket.fail(error)
        self._door.turn_away(error)

    def forget(self, model: str) -> None:
        """Forget what was found out about a model that is gone."""
        for known in [one for one in self._caps if one[0] == model]:
            del self._caps[known]

    @property
    def admitted(self) -> int:
        """Rows accepted and not yet answered, or places that as large messages take."""
        return self._door.taken

    @asynccontextmanager
    async def admit(self, rows: int, *, size: int = 0, wait: bool = False) -> AsyncIterator[None]:
        """Hold room for so many rows inside the block.

        Args:
            rows: that the request will run.
            size: of its message, in bytes.
            wait: for room, rather than refuse.

        Raises:
            ResourceExhausted: there is no room; `retry_after` is a guess at when there will be.
            Unavailable: there is no engine.
            InvalidArgument: there never will be.
        """
        self._check_there()
        if rows > self.limit:
            raise InvalidArgument(f"the request costs {rows} rows, and {self.limit} is the limit")
        places = min(max(rows, -(-size // PLACE)), self.limit)
        async with self._door.admit(places, wait=wait):
            yield

    def _refused(self, words: str) -> ResourceExhausted:
        self.stats.refused += 1
        return ResourceExhausted(words, retry_after=self._retry_after(), shed="queue_full")

    async def submit(
        self,
        pass_: Pass,
        rows: Sequence[Row],
        collect: Collect,
        deadline: float = math.inf,
        spent: Spent | None = None,
    ) -> Spent:
        """Run rows.

        Args:
            pass_: what they have in common.
            rows: at least one.
            collect: takes the index of a row and its result; called as they come, in the rows' order.
            deadline: on the event loop's clock; rows that have not run by then never will.
            spent: where the request's time went so far; it is added to.

        Returns:
            Where the time went.

        Raises:
            DeadlineExceeded: the deadline passed before the last row was put in a batch.
            Unavailable: there is no engine, or it was lost while it ran them.
            Exception: whatever the engine raised for a row that it could not compute.
        """
        self._check_there()
        loop, spent = asyncio.get_running_loop(), spent or Spent()
        ticket = _Ticket(pass_, rows, collect, deadline, loop.time(), loop.create_future(), spent)
        spent.change(ticket.arrived, submitted=1)
        self._queues.setdefault(pass_, []).append(ticket)
        if not self._is_long(ticket):
            self._short_came = ticket.arrived
        self._arrived.set()
        try:
            await ticket.done  # a cancelled caller cancels the future, and with it the rows not yet run
        finally:
            spent.change(loop.time(), submitted=-1)
        return spent

    async def _serve(self, engine: _Engine) -> None:
        """Pull batches for an engine, and share it with a second batch unless one is alone."""
        while True:
            batch = await self._pulled(engine, 0)
            if self._halves and (engine.inputs[1] or not self._is_alone(batch)):
                engine.halved.set()
                await self._execute(engine, batch, 0)
                engine.halved.clear()
            else:
                await self._execute(engine, batch, None)
            engine.inputs[0] = 0

    async def _serve_second(self, engine: _Engine) -> None:
        """Pull batches for the second half of an engine, whenever the first half runs one."""
        while True:
            batch = await self._pulled(engine, 1, engine.halved)
            await self._execute(engine, batch, 1)
            engine.inputs[1] = 0

    async def _pulled(self, engine: _Engine, half: Half, *may: asyncio.Event) -> list[_Place]:
        """Wait until an engine, or half of it, may run a batch, and there is one."""
        needed = (*may, engine.resumed)
        while True:
            for event in (*needed, self._arrived):
                await event.wait()
            await self._company()
            if not all(event.is_set() for event in needed):
                self._arrived.set()  # which waiting for company has cleared, and another engine waits for
                continue
            if batch := self._form(self._share(engine.inputs[1 - half]) if self._halves else self._max_batch):
                engine.inputs[half] = _inputs(batch)
                self._arrived.set()  # there may be more, for whichever engine is free next
                return batch
            self._arrived.clear()

    def _is_alone(self, batch: list[_Place]) -> bool:
        """Tell whether a batch may have all of an engine, as nothing else waits that may have a half."""
        return self._inputs_waiting() < (self._max_batch if self._halves_are_full(dict(batch)) else 1)

    def _share(self, other: int) -> int:
        """Return how many inputs half of an engine takes: as many as the other has, which works on so many, or will."""
        share = self._max_batch if self._halves_are_full() else -(-(self._inputs_waiting() + other) // 2)
        return min(self._max_batch, share)

    def _halves_are_full(self, more: Iterable[_Ticket] = ()) -> bool:
        """Tell whether only full batches share an engine.

        Rows are held back until a batch is full; or short requests come while long ones wait, and these shall not take
        a half that a short one would wait for.
        """
        mixed = self._is_brisk() and any(map(self._is_long, itertools.chain(self._all_waiting(), more)))
        return self._max_delay > 0 or mixed

    def _inputs_waiting(self) -> int:
        """Count the inputs that wait, as far as two batches; of long requests where no short one would wait longer."""
        brisk, found = self._is_brisk(), 0
        for one in self._all_waiting():
            found += 0 if brisk and self._is_long(one) else one.inputs
            if found >= 2 * self._max_batch:  # a queue may be long, and this is asked for every batch
                break
        return found

    def _all_waiting(self) -> Iterator[_Ticket]:
        return itertools.chain.from_iterable(self._queues.values())

    def _is_brisk(self) -> bool:
        return asyncio.get_running_loop().time() - self._short_came < BRISK

    async def _company(self) -> None:
        """Wait for more rows, no longer than the oldest may be held back, and not for a full batch."""
        while self._max_delay and (pass_ := self._next_pass()):
            queue = self._queues[pass_]
            left = queue[0].since + self._max_delay - asyncio.get_running_loop().time()
            if left <= 0 or sum(ticket.waiting for ticket in queue) >= self._max_batch:
                return
            self._arrived.clear()
            try:
                async with asyncio.timeout(left):
                    await self._arrived.wait()
            except TimeoutError:
                return

    def _next_pass(self) -> Pass | None:
        self._forget()
        return min(self._queues, key=self._due, default=None)

    def _due(self, pass_: Pass) -> tuple[bool, float]:
        """Return whether a pass can be put off, and when it should be served.

        It should a second after its last turn, or after its oldest row came, or by its nearest deadline; if that is not
        yet so and only long requests wait, it can be put off.
        """
        queue, now = self._queues[pass_], asyncio.get_running_loop().time()
        turn = max(queue[0].arrived, self._served.get(pass_, 0.0)) + PATIENCE
        nearest = min(ticket.deadline for ticket in queue)
        long = all(self._is_long(ticket) for ticket in queue)
        return long and turn > now and nearest > now + PATIENCE, min(turn, nearest)

    def _is_long(self, ticket: _Ticket) -> bool:
        return len(ticket.rows) > min(self._max_batch, LONG)

    def _forget(self) -> None:
        """Drop what is cancelled, expired or wholly taken."""
        now = asyncio.get_running_loop().time()
        for pass_, queue in list(self._queues.items()):
            for ticket in queue:
                if ticket.waiting and ticket.deadline <= now:
                    self.stats.expired += 1
                    ticket.fail(DeadlineExceeded("the deadline passed while the request was waiting"))
            self._queues[pass_] = [ticket for ticket in queue if ticket.waiting]
            if not self._queues[pass_]:
                del self._queues[pass_]
                self._served.pop(pass_, None)  # callers choose the layers, so there is no end of passes

    def _form(self, most: int) -> list[_Place]:
        """Take a batch of at most so many inputs from those that wait."""
        pass_ = self._next_pass()
        if pass_ is None:
            return []
        now = asyncio.get_running_loop().time()
        queue = self._queues[pass_]
        room = min(most, self._caps.get((pass_.model, pass_.kind), self._max_batch))
        # A batch too small to be shared goes to the oldest whole, every fourth time.
        reserved = room // OLDEST_SHARE or int(self.stats.batches % OLDEST_SHARE == 1)
        batch = queue[0].take(reserved)
        brisk, share = self._is_brisk(), max(1, room // OLDEST_SHARE)
        for ticket in _by_turns(sorted(queue, key=lambda one: (one.deadline > now + PATIENCE, one.waiting))):
            most = share if brisk and self._is_long(ticket) else room
            batch += ticket.take(most - _inputs(batch))
        self._served[pass_] = now
        self._account(batch)
        return batch

    def _account(self, batch: list[_Place]) -> None:
        now = asyncio.get_running_loop().time()
        self.stats.batches += 1
        self.stats.rows += len(batch)
        for ticket in dict(batch):
            if ticket.record:
                ticket.record.stage("queue", ticket.since, now)
            ticket.spent.batch_rows = max(ticket.spent.batch_rows, len(batch))
            ticket.since = now

    async def _execute(self, engine: _Engine, batch: list[_Place], half: Half | None) -> None:
        """Run a batch; one that fails is split until the row at fault is alone."""
        batch = [(ticket, index) for ticket, index in batch if not ticket.done.done()]
        if not batch:
            return
        pass_ = batch[0][0].pass_
        try:
            results = await self._timed(engine, batch, half)
        except WorkerLost as error:  # whose fault it was cannot be known: running them again could take the next one
            self.stats.failed += len(batch)
            for ticket, _ in batch:
                ticket.fail(error)
            return
        except Exception as error:  # noqa: BLE001 -- whatever a row raises, its neighbours are answered
            await self._isolate(engine, batch, half, error)
            return
        self.stats.answered += len(batch)
        if _inputs(batch) == self._caps.get((pass_.model, pass_.kind)) and self.stats.batches % RETRY_LARGER == 0:
            self._caps[pass_.model, pass_.kind] += 1
        for (ticket, index), result in zip(batch, results, strict=True):
            ticket.deliver(index, result)

    async def _timed(self, engine: _Engine, batch: list[_Place], half: Half | None) -> list[RowResult]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        rows, tickets = [ticket.rows[index] for ticket, index in batch], dict(batch)
        for ticket in tickets:
            ticket.spent.change(began, running=1)
        try:
            results = await engine.ask(batch[0][0].pass_, rows, half)
        except asyncio.CancelledError:
            for ticket, _ in batch:
                ticket.fail(Unavailable("the server is shutting down"))
            raise
        finally:
            for ticket in tickets:
                ticket.spent.change(loop.time(), running=-1)
            self._tell(batch, began, half)
        if len(results) != len(rows):
            raise Internal(f"the engine answered {len(rows)} rows with {len(results)}")
        took = loop.time() - began
        rate = (1 if half is None else 2) * len(rows) / took
        self._row_seconds += 0.2 * (1 / rate - self._row_seconds)
        for ticket in tickets:
            ticket.since = loop.time()
        return results

    def _tell(self, batch: list[_Place], began: float, half: Half | None) -> None:
        if self.told:
            pass_, ended = batch[0][0].pass_, asyncio.get_running_loop().time()
            records = [ticket.record for ticket in dict(batch) if ticket.record]
            share = 1.0 if half is None else 0.5
            try:
                self.told.ran(Ran(pass_.model, pass_.kind, len(batch), began, ended, records, share))
            except Exception:  # whoever listens, the rows are computed
                log.exception("nobody could be told of a batch")

    async def _isolate(self, engine: _Engine, batch: list[_Place], half: Half | None, error: Exception) -> None:
        if len(batch) == 1:
            self.stats.failed += 1
            batch[0][0].fail(error)
            return
        middle = len(batch) // 2
        before = self.stats.failed
        await self._execute(engine, batch[:middle], half)
        await self._execute(engine, batch[middle:], half)
        if isinstance(error, OutOfMemory) and self.stats.failed == before:
            # Both halves went well: it was the size, and not one row that takes all there is.
            pass_, most = batch[0][0].pass_, max(1, _inputs(batch) // 2)
            cap = self._caps[pass_.model, pass_.kind] = min(most, self._caps.get((pass_.model, pass_.kind), most))
            log.warning("out of memory with %d inputs: batches have at most %d now", _inputs(batch), cap)

    def _retry_after(self) -> float:
        seconds = self.admitted * self._row_seconds / len(self._engines)
        return min(max(seconds / 2, SHORTEST_RETRY), LONGEST_RETRY)


def _by_turns(tickets: Sequence[_Ticket]) -> list[_Ticket]:
    """Put the first of each caller first, then the second of each, and so on; one caller's stay in their order."""
    turns = Counter[str]()

    def turn(ticket: _Ticket) -> int:
        turns[ticket.caller] += 1
        return turns[ticket.caller]

    return sorted(tickets, key=turn)


def _inputs(batch: Sequence[_Place]) -> int:
    """Count the distinct inputs of a batch."""
    return len({ticket.rows[index].input for ticket, index in batch})


def _contained(run: Run, *arguments: object) -> list[RowResult]:
    """Run a batch; a model that calls `sys.exit` fails its rows, and not the server."""
    try:
        return run(*arguments)
    except Exception:
        raise
    except BaseException as error:
        raise Internal("the model tried to end the server") from error
