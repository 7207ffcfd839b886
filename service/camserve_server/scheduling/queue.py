"""Queue of the requests that wait for a batch, by caller and pass.

It stores the requests, and forms the next batch from their rows by the rules in `policy`.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from camserve_server.core.errors import DeadlineExceeded
from camserve_server.engine.values import Row, RowResult
from camserve_server.models.values import Pass
from camserve_server.scheduling import policy
from camserve_server.scheduling.capacity import BatchBudget, Capacity, RowKind, kind_of
from camserve_server.telemetry import Origin, RequestTimings, RequestTrace

Collect: TypeAlias = Callable[[int, RowResult], None]
"""Callback that receives the index of a row and its result."""


@dataclass(slots=True)
class Stats:
    """Counters of a batcher since its start.

    Attributes:
        batches: batches formed; parts of a batch that is split do not count.
        rows: rows in these batches.
        refused: requests refused because the queue was full.
        expired: requests whose deadline passed in the queue.
        answered: rows with a result.
        failed: rows that failed, each alone.
    """

    batches: int = 0
    rows: int = 0
    refused: int = 0
    expired: int = 0
    answered: int = 0
    failed: int = 0


@dataclass(slots=True, eq=False)
class PendingRequest:
    """Rows of one request, and how many of them were taken and answered.

    Attributes:
        pass_: the pass that all rows share.
        rows: at least one row.
        collect: callback for results, called in the order of the rows.
        deadline: time on the event loop's clock after which no further row runs.
        arrived: time of arrival.
        done: future that ends the request.
        timings: time that the request spent waiting and computing.
        origin: the caller, and the request's trace.
        taken: number of rows put in batches.
        delivered: number of results passed to `collect`.
        early_results: results of rows whose predecessors are not answered yet.
        lost_processes: ids of worker processes that ended while they ran a row of it.
        stage_began: arrival, or begin or end of the latest batch; the queue stage of a trace is counted from here.
        kind: cost class of its rows.
    """

    pass_: Pass
    rows: Sequence[Row]
    collect: Collect
    deadline: float
    arrived: float
    done: asyncio.Future[None]
    timings: RequestTimings
    origin: Origin
    taken: int = 0
    delivered: int = 0
    early_results: dict[int, RowResult] = field(default_factory=dict)
    lost_processes: set[int] = field(default_factory=set)
    stage_began: float = field(init=False)
    kind: RowKind = field(init=False)

    def __post_init__(self) -> None:
        self.stage_began = self.arrived
        self.kind = kind_of(self.pass_, self.rows[0])

    @property
    def caller(self) -> str:
        """The caller that sent the request."""
        return self.origin.caller

    @property
    def record(self) -> RequestTrace | None:
        """The request's trace; None without telemetry."""
        return self.origin.record

    @property
    def waiting(self) -> int:
        """Number of rows that wait for a batch."""
        return 0 if self.done.done() else len(self.rows) - self.taken

    @property
    def inputs(self) -> int:
        """Number of distinct inputs of the waiting rows."""
        waiting = self.waiting
        return waiting if waiting < 2 else len({row.input for row in self.rows[self.taken : self.taken + waiting]})  # noqa: PLR2004 -- one row is one input

    def take(self, budget: BatchBudget, row_seconds: float, max_inputs: int) -> "list[RowRef]":
        """Take rows for a batch until its budget is spent, or it has `max_inputs` distinct inputs."""
        first, last = self.taken, self.taken + self.waiting
        while self.taken < last and budget.take(self.rows[self.taken], row_seconds, max_inputs):
            self.taken += 1
        return [(self, index) for index in range(first, self.taken)]

    def deliver(self, index: int, result: RowResult) -> None:
        """Pass on a result, and results that waited for it: with several workers, a later batch may end first."""
        self.early_results[index] = result
        while self.delivered in self.early_results and not self.done.done():
            self._collect(self.delivered, self.early_results.pop(self.delivered))

    def _collect(self, index: int, result: RowResult) -> None:
        try:
            self.collect(index, result)
        except Exception as error:  # noqa: BLE001 -- the caller's error, not the batch's
            self.fail(error)
            return
        self.delivered += 1
        if self.delivered == len(self.rows):
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        """End the request with an error, unless it has ended."""
        if not self.done.done():
            self.done.set_exception(error)


RowRef: TypeAlias = tuple[PendingRequest, int]
"""A row: its request, and its index in the request."""


def requests_of(batch: Sequence[RowRef]) -> list[PendingRequest]:
    """Return the distinct requests of a batch, in order."""
    return list(dict(batch))


def count_kinds(batch: Sequence[RowRef]) -> Counter[RowKind]:
    """Count the rows of each kind in a batch."""
    kinds = Counter[RowKind]()
    for request, rows in Counter(request for request, _ in batch).items():
        kinds[request.kind] += rows
    return kinds


def count_inputs(batch: Sequence[RowRef]) -> int:
    """Count the distinct inputs of a batch."""
    return len({request.rows[index].input for request, index in batch})


@dataclass(slots=True, eq=False)
class PassQueue:
    """Requests of one caller that wait for one pass, the oldest first.

    Attributes:
        requests: the requests, as an ordered set.
        last_turn: time at which the pass was last served.
    """

    requests: dict[PendingRequest, None] = field(default_factory=dict)
    last_turn: float = 0.0


class Queue:
    """The requests that wait for a batch.

    Args:
        capacity: limits of a batch.
        stats: counters, updated with every batch and expired request.

    Attributes:
        work_available: event, set while there may be rows to run.
    """

    def __init__(self, capacity: Capacity, stats: Stats) -> None:
        self._capacity, self._stats = capacity, stats
        self.work_available = asyncio.Event()
        self._turns = policy.TurnOrder()
        self._callers: dict[str, dict[Pass, PassQueue]] = {}
        self._long_requests = 0
        self._last_short_arrival = -math.inf

    def __iter__(self) -> Iterator[PendingRequest]:
        for passes in list(self._callers.values()):
            for pass_queue in list(passes.values()):
                yield from pass_queue.requests

    def __bool__(self) -> bool:
        return bool(self._callers)

    def add(self, request: PendingRequest) -> None:
        """Append a request."""
        passes = self._callers.setdefault(request.caller, {})
        passes.setdefault(request.pass_, PassQueue()).requests[request] = None
        if self.is_long(request):
            self._long_requests += 1
        else:
            self._last_short_arrival = request.arrived
        self.work_available.set()

    def drop(self, request: PendingRequest) -> None:
        """Remove a request that has ended, or whose rows are all taken. The images of its rows are released."""
        passes = self._callers.get(request.caller, {})
        pass_queue = passes.get(request.pass_)
        if pass_queue is None or request not in pass_queue.requests:
            return
        del pass_queue.requests[request]
        self._long_requests -= self.is_long(request)
        if not pass_queue.requests:
            del passes[request.pass_]
        if not passes:
            del self._callers[request.caller]

    def is_long(self, request: PendingRequest) -> bool:
        """Return True for a long request; see `policy.is_long`."""
        return policy.is_long(len(request.rows), self._capacity.inputs)

    @property
    def has_long(self) -> bool:
        """True if a long request waits."""
        return self._long_requests > 0

    def expects_short_request(self, now: float) -> bool:
        """Return True if another short request may arrive soon."""
        return policy.expects_short_request(self._last_short_arrival, now)

    def count_inputs(self, now: float) -> int:
        """Count the inputs that wait, up to two full batches.

        Those of long requests count only while no short request is expected.
        """
        short_only, inputs = self.expects_short_request(now), 0
        for request in self:
            inputs += 0 if short_only and self.is_long(request) else request.inputs
            if inputs >= 2 * self._capacity.inputs:  # the queue may be long, and this runs for each batch
                break
        return inputs

    def peek(self, now: float) -> tuple[float, int] | None:
        """Return since when the oldest request of the next batch waits, and how many inputs wait for its pass."""
        if (chosen := self._choose(now)) is None:
            return None
        caller, pass_ = chosen
        same_pass = [pass_queue for passes in self._callers.values() if (pass_queue := passes.get(pass_))]
        oldest = next(iter(self._callers[caller][pass_].requests))
        return oldest.stage_began, sum(request.inputs for queue in same_pass for request in queue.requests)

    def form(self, max_inputs: int, now: float, *, in_parallel: bool = False) -> list[RowRef]:
        """Take the next batch; an empty one if no row may run now.

        Args:
            max_inputs: largest number of distinct inputs in it.
            now: current time on the event loop's clock.
            in_parallel: True if the batch will run beside another batch of the same worker.
        """
        if (chosen := self._choose(now)) is None:
            return []
        caller, pass_ = chosen
        if in_parallel and not self._capacity.may_share(pass_):
            return []
        budget = self._capacity.budget(pass_, max_inputs)
        pass_queue = self._callers[caller][pass_]
        oldest = next(iter(pass_queue.requests))
        batch = self._take(oldest, budget, policy.inputs_for_oldest(budget.inputs, self._stats.batches))
        for_long = policy.inputs_for_long(budget.inputs, short_expected=self.expects_short_request(now))
        for request in self._in_turn(caller, pass_, now):
            if budget.full:
                break
            batch += self._take(request, budget, for_long if self.is_long(request) else budget.inputs)
        pass_queue.last_turn = now
        self._turns.record_turn(caller)
        self.record_start(batch, now)
        return batch

    def record_start(self, batch: list[RowRef], now: float) -> None:
        """Count a batch, and end the queue stage of its requests."""
        self._stats.batches += 1
        self._stats.rows += len(batch)
        for request in requests_of(batch):
            if request.record:
                request.record.stage("queue", request.stage_began, now)
            request.timings.batch_rows = max(request.timings.batch_rows, len(batch))
            request.stage_began = now

    def _take(self, request: PendingRequest, budget: BatchBudget, max_inputs: int) -> list[RowRef]:
        rows = request.take(budget, self._capacity.seconds_of(request.kind), max_inputs)
        if not request.waiting:
            self.drop(request)
        return rows

    def _choose(self, now: float) -> tuple[str, Pass] | None:
        """Return the next caller and its most urgent pass, after dropping its expired requests."""
        while self._callers:
            caller = self._turns.next(self._callers)
            self._expire(caller, now)
            if passes := self._callers.get(caller):
                if len(passes) == 1:
                    return caller, next(iter(passes))
                return caller, min(passes, key=lambda pass_: self._urgency(passes[pass_], now))
        return None

    def _expire(self, caller: str, now: float) -> None:
        """Fail a caller's requests whose deadline has passed, and drop all that have ended."""
        requests = [
            request
            for queue in self._callers[caller].values()
            for request in queue.requests
            if request.deadline <= now or request.done.done()
        ]
        for request in requests:
            if not request.done.done():
                self._stats.expired += 1
                request.fail(DeadlineExceeded("the deadline passed while the request was waiting"))
            self.drop(request)

    def _urgency(self, pass_queue: PassQueue, now: float) -> tuple[bool, float]:
        requests = pass_queue.requests
        return policy.pass_urgency(
            now,
            oldest_arrival=next(iter(requests)).arrived,
            last_turn=pass_queue.last_turn,
            nearest_deadline=min(request.deadline for request in requests),
            only_long=all(map(self.is_long, requests)),
        )

    def _in_turn(self, caller: str, pass_: Pass, now: float) -> list[PendingRequest]:
        """Return the requests for a pass: the first of each caller, then the second of each; this caller's first."""
        others = sorted((name for name in self._callers if name != caller), key=self._turns.last)
        queues = [queue for name in (caller, *others) if (queue := self._callers.get(name, {}).get(pass_))]

        def urgency(request: PendingRequest) -> tuple[bool, int]:
            return policy.request_urgency(now, deadline=request.deadline, waiting_rows=request.waiting)

        def in_order(requests: dict[PendingRequest, None]) -> list[PendingRequest]:
            if self.has_long or any(request.deadline < math.inf or len(request.rows) > 1 for request in requests):
                return sorted(requests, key=urgency)
            return list(requests)  # all are equally urgent

        if len(queues) == 1:
            return in_order(queues[0].requests)
        return policy.take_turns([in_order(queue.requests) for queue in queues])
