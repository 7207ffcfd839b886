"""Who is next: the rows that wait, and the batch that is made of them.

Callers take turns: the next batch begins with the caller who had a turn longest ago, and whoever has not had one lately
is next, whatever others have sent. It is made of that caller's most urgent `Pass`, and filled with everybody's rows of
the same pass, one request of each caller after the other.

Of one caller's passes, the most urgent is the one that was served longest ago, or has a deadline that is near. A pass
in which only long requests wait (of more rows than a batch) goes behind those with short ones, unless it has waited for
a second. Within a pass the request with the fewest rows left goes first, and of many equal long ones the first to begin
is the first to end. A part of every batch belongs to the caller's request that has been there longest, so that short
ones never starve a long one. While short ones keep coming, that part is all that long ones get: a batch cannot be
interrupted, so what a short one waits for must itself be short.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from camserve_server.core.errors import DeadlineExceeded
from camserve_server.engine.values import Row, RowResult
from camserve_server.models.values import Pass
from camserve_server.scheduling.admission import TurnOrder
from camserve_server.scheduling.capacity import BatchBudget, Capacity, RowKind, kind_of
from camserve_server.telemetry import Origin, RequestTrace, Spent

Collect: TypeAlias = Callable[[int, RowResult], None]

PATIENCE = 1.0  # seconds: a deadline nearer than this is urgent
RECENT_SECONDS = 10.0  # seconds: while a short request came so lately, another may come
LONG = 32  # rows: a request of more is a long one, even if a batch has room for all of them
OLDEST_SHARE = 4  # one row in so many of a batch is the oldest request's


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
class PendingRequest:
    """Rows of one request that wait, and how far they have come."""

    pass_: Pass
    rows: Sequence[Row]
    collect: Collect
    deadline: float
    arrived: float
    done: asyncio.Future[None]
    spent: Spent
    origin: Origin
    taken: int = 0
    delivered: int = 0
    early: dict[int, RowResult] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)  # processes that ended while they ran some of it
    since: float = field(init=False)
    kind: RowKind = field(init=False)

    def __post_init__(self) -> None:
        self.since = self.arrived
        self.kind = kind_of(self.pass_, self.rows[0])

    @property
    def caller(self) -> str:
        """The caller that sent it."""
        return self.origin.caller

    @property
    def record(self) -> RequestTrace | None:
        """Its record; None where there is no telemetry."""
        return self.origin.record

    @property
    def waiting(self) -> int:
        """How many of its rows wait for a batch."""
        return 0 if self.done.done() else len(self.rows) - self.taken

    @property
    def inputs(self) -> int:
        """How many inputs its rows that wait have between them."""
        return len({row.input for row in self.rows[self.taken : self.taken + self.waiting]})

    def take(self, room: BatchBudget, seconds: float, most: int) -> "list[RowRef]":
        """Give rows into a batch, until it is full or has so many inputs; rows that share one take one place."""
        first, last = self.taken, self.taken + self.waiting
        while self.taken < last and room.takes(self.rows[self.taken], seconds, most):
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
        """Answer the request with an error, unless it is answered."""
        if not self.done.done():
            self.done.set_exception(error)


RowRef: TypeAlias = tuple[PendingRequest, int]
"""A row: its request, and its index there."""


@dataclass(slots=True, eq=False)
class PassQueue:
    """Requests of one caller that wait for one pass, the oldest first, and when it last had a turn."""

    requests: dict[PendingRequest, None] = field(default_factory=dict)
    served: float = 0.0


class Queue:
    """The requests that wait for a batch.

    Args:
        capacity: says what fits in a batch.
        stats: where batches and requests that came too late are counted.
    """

    def __init__(self, capacity: Capacity, stats: Stats) -> None:
        self._capacity, self._stats = capacity, stats
        self._turns = TurnOrder()
        self._lines: dict[str, dict[Pass, PassQueue]] = {}
        self._long = 0
        self._short_came = -math.inf

    def __iter__(self) -> Iterator[PendingRequest]:
        for line in self._all_lines():
            yield from line.requests

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, request: PendingRequest) -> None:
        """Let a request wait."""
        self._lines.setdefault(request.caller, {}).setdefault(request.pass_, PassQueue()).requests[request] = None
        if self.is_long(request):
            self._long += 1
        else:
            self._short_came = request.arrived

    def drop(self, request: PendingRequest) -> None:
        """Let a request go, with the images of its rows: it is answered or cancelled, or all its rows were taken."""
        lines = self._lines.get(request.caller, {})
        line = lines.get(request.pass_)
        if line is None or request not in line.requests:
            return
        del line.requests[request]
        self._long -= self.is_long(request)
        if not line.requests:
            del lines[request.pass_]
        if not lines:
            del self._lines[request.caller]

    def is_long(self, request: PendingRequest) -> bool:
        """Tell whether a request is a long one."""
        return len(request.rows) > min(self._capacity.inputs, LONG)

    @property
    def has_long(self) -> bool:
        """Whether a long request waits."""
        return self._long > 0

    @property
    def short_requests_recent(self) -> bool:
        """Whether another short request may come soon."""
        return _now() - self._short_came < RECENT_SECONDS

    @property
    def inputs(self) -> int:
        """How many inputs wait, as far as two batches; of long requests where no short one would wait longer."""
        brisk, found = self.short_requests_recent, 0
        for one in self:
            found += 0 if brisk and self.is_long(one) else one.inputs
            if found >= 2 * self._capacity.inputs:  # a queue may be long, and this is asked for every batch
                break
        return found

    def held_back(self) -> tuple[float, int] | None:
        """Return since when the oldest request of the next batch waits, and how many rows it could have."""
        if (chosen := self._next()) is None:
            return None
        caller, pass_ = chosen
        same = [line for lines in self._lines.values() if (line := lines.get(pass_))]
        oldest = next(iter(self._lines[caller][pass_].requests))
        return oldest.since, sum(request.waiting for line in same for request in line.requests)

    def form(self, most: int, *, in_parallel: bool = False) -> list[RowRef]:
        """Take the next batch from the rows that wait.

        Args:
            most: the largest number of inputs in it.
            in_parallel: whether it will run beside another batch. If the next batch may not, none is taken.
        """
        if (chosen := self._next()) is None:
            return []
        caller, pass_ = chosen
        if in_parallel and not self._capacity.may_share(pass_):
            return []
        room = self._capacity.room(pass_, most)
        line = self._lines[caller][pass_]
        # A batch too small to be shared goes to the oldest whole, every fourth time.
        reserved = room.inputs // OLDEST_SHARE or int(self._stats.batches % OLDEST_SHARE == 1)
        batch = self._taken(next(iter(line.requests)), room, reserved)
        brisk, share = self.short_requests_recent, max(1, room.inputs // OLDEST_SHARE)
        for request in self._in_turn(caller, pass_):
            if room.full:
                break
            batch += self._taken(request, room, share if brisk and self.is_long(request) else room.inputs)
        line.served = _now()
        self._turns.took(caller)
        return batch

    def _taken(self, request: PendingRequest, room: BatchBudget, most: int) -> list[RowRef]:
        places = request.take(room, self._capacity.seconds_of(request.kind), most)
        if not request.waiting:
            self.drop(request)
        return places

    def _next(self) -> tuple[str, Pass] | None:
        """Return whose turn it is, and which of the caller's passes is the most urgent."""
        while self._lines:
            caller = self._turns.next(self._lines)
            self._expire(caller)
            if lines := self._lines.get(caller):
                now = _now()
                return caller, min(lines, key=lambda pass_: self._due(lines[pass_], now))
        return None

    def _expire(self, caller: str) -> None:
        """Answer a caller's requests whose deadline has passed."""
        now = _now()
        late = [one for line in self._lines[caller].values() for one in line.requests if one.deadline <= now]
        for request in late:
            self._stats.expired += not request.done.done()
            request.fail(DeadlineExceeded("the deadline passed while the request was waiting"))
        gone = [one for line in self._lines[caller].values() for one in line.requests if one.done.done()]
        for request in gone:
            self.drop(request)

    def _due(self, line: PassQueue, now: float) -> tuple[bool, float]:
        """Return whether a pass can be put off, and when it should be served.

        It should a second after its last turn, or after its oldest request came, or by its nearest deadline; if that is
        not yet so and only long requests wait, it can be put off.
        """
        turn = max(next(iter(line.requests)).arrived, line.served) + PATIENCE
        nearest = min(request.deadline for request in line.requests)
        if turn <= now or nearest <= now + PATIENCE:
            return False, min(turn, nearest)
        return all(map(self.is_long, line.requests)), min(turn, nearest)

    def _in_turn(self, caller: str, pass_: Pass) -> Iterator[PendingRequest]:
        """Yield the requests for a pass: the first of each caller, then the second of each; this caller's before."""
        now = _now()
        others = sorted((one for one in self._lines if one != caller), key=self._turns.last)
        lines = [line for one in (caller, *others) if (line := self._lines.get(one, {}).get(pass_))]
        orders = [sorted(line.requests, key=lambda one: (one.deadline > now + PATIENCE, one.waiting)) for line in lines]
        yield from (one for turn in itertools.zip_longest(*orders) for one in turn if one)

    def _all_lines(self) -> list[PassQueue]:
        return [line for lines in self._lines.values() for line in lines.values()]


def _now() -> float:
    return asyncio.get_running_loop().time()
