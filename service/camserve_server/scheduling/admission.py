"""Admission: a limited number of slots, shared fairly among the callers that ask for them.

A slot is one unit of whatever is limited: a row in the queue, a byte of messages, a thread.

A caller that is alone may hold all slots. While other callers are present too, each has a right to an equal share. A
caller that holds more than its share gets no more. A caller that holds less is not refused, but waits for the next
slots that become free. So one caller may fill a server that nobody else uses. It makes way as soon as another one
arrives, and that one notices nothing. A caller is present while it holds or waits for slots, and for some seconds after
its last request.

Memory that is held until somebody else reads or sends has a further rule, which keeps room for callers yet to come: a
caller may hold at most twice what it leaves free (A. K. Choudhury and E. L. Hahne, "Dynamic queue length thresholds for
shared-memory packet switches", IEEE/ACM Transactions on Networking 6(2), 1998, section II). One caller that never lets
go leaves a third of the memory, and another one after it a third of that: see `serving.replies`.
"""

import asyncio
import functools
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from camserve_server.core.errors import ResourceExhausted
from camserve_server.scheduling.policy import TurnOrder
from camserve_server.scheduling.threads import Threads

# Seconds for which a caller counts as present after its last request; longer than any `retry_after`.
PRESENCE_TIMEOUT = 10.0
# Slots that callers without a right to them may wait for together: what waits is in memory already.
MAX_WAITING = 1024
HEADROOM = 2  # multiple of the free slots that a caller may hold where room is kept for others
LOOKAHEAD = 8  # requests of a caller that wait there, and of which the first that fits is next


class FairThreads:
    """Thread pool in which callers take turns, one step each: a new caller waits only for the steps that already run.

    A caller is the name of a token or an address, as in `Admission`.

    Args:
        threads: threads that run the steps.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._steps: dict[str, deque[Callable[[], object]]] = {}
        self._turns = TurnOrder()
        self._lock = threading.Lock()

    def of(self, caller: str) -> "CallerThreads":
        """Return the thread pool for one caller."""
        return CallerThreads(self, caller)

    def submit(self, caller: str, step: Callable[[], object]) -> None:
        """Run a caller's step in a thread when it is the caller's turn."""
        with self._lock:
            self._steps.setdefault(caller, deque()).append(step)
        self._threads.submit(self._run_next)

    def _run_next(self) -> None:
        with self._lock:
            caller = next(iter(self._steps)) if len(self._steps) == 1 else self._turns.next(self._steps)
            self._turns.record_turn(caller)
            steps = self._steps[caller]
            step = steps.popleft()
            if not steps:
                del self._steps[caller]
        step()


@dataclass(frozen=True, slots=True)
class CallerThreads:
    """`FairThreads` for one caller."""

    threads: FairThreads
    caller: str

    def submit(self, step: Callable[[], object], /) -> None:
        """Run a step in a thread when it is the caller's turn."""
        self.threads.submit(self.caller, step)


class MemoryBudget:
    """Memory for data that is kept only if the budget has room for it. Room is kept for other callers.

    Args:
        size: bytes of the budget.

    Attributes:
        free: bytes that are left.
    """

    def __init__(self, size: int) -> None:
        self.free = size
        self._held: Counter[str] = Counter()

    @contextmanager
    def reserve(self, size: int, caller: str) -> Iterator[bool]:
        """Hold memory for a caller inside the block; yield False, and hold nothing, if it may not have as much."""
        size = size if self._held[caller] + size <= HEADROOM * (self.free - size) else 0
        self.free -= size
        self._held[caller] += size
        try:
            yield size > 0
        finally:
            self.free += size
            self._held[caller] -= size
            if not self._held[caller]:
                del self._held[caller]


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits for slots.

    Attributes:
        slots: number of slots that it needs.
        decided: future that ends when it is admitted, or fails when it is refused.
    """

    slots: int
    decided: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Admission:
    """Limit on slots in use, shared by callers.

    Args:
        slots: total number of slots.
        min_share: smallest share of a caller, in slots.
        refusal: function that makes the error for a refused caller, from a message that names the limit it met.
        line: slots that callers without a right to them may wait for together.
        headroom: True to keep room for other callers: a caller may hold at most `HEADROOM` times what it leaves free.
            Requests need at most half of the slots each, or they would wait until nobody else holds any.
        unit: what a slot is, in the message of a refusal.

    Attributes:
        taken: number of slots in use.
    """

    def __init__(
        self,
        slots: int,
        min_share: int,
        refusal: Callable[[str], Exception] = ResourceExhausted,
        line: float = MAX_WAITING,
        *,
        headroom: bool = False,
        unit: str = "rows",
    ) -> None:
        self.taken = 0
        self._slots, self._min_share, self._refusal = slots, min_share, refusal
        self._max_waiting, self._headroom, self._unit = line, headroom, unit
        self._held: Counter[str] = Counter()
        self._waiters: dict[str, deque[_Waiter]] = {}
        self._waiting: Counter[str] = Counter()  # slots that each caller waits for
        self._last_seen: dict[str, float] = {}  # the latest last

    def admit(self, slots: int, *, caller: str, wait: bool) -> "Reservation":
        """Hold slots inside the block.

        Args:
            slots: number of slots, at most the total.
            caller: caller that asks for them.
            wait: True to wait for slots beyond the caller's share rather than be refused.

        Raises:
            Exception: the refusal.
        """
        return Reservation(self, slots, caller=caller, wait=wait)

    async def hold(self, slots: int, *, caller: str, wait: bool) -> Callable[[], None]:
        """Take slots; return the function that releases them, which must be called exactly once.

        Args:
            slots: number of slots, at most the total.
            caller: caller that asks for them.
            wait: True to wait for slots beyond the caller's share rather than be refused.

        Raises:
            Exception: the refusal.
        """
        share = self._register(caller)
        if self._may_take(caller, slots, share, wait=wait):
            self._take(caller, slots)
        elif self._may_wait(caller, slots, share, wait=wait):
            await self._wait(caller, slots)
        else:
            raise self._refusal(self._explain_refusal(caller, share))
        return functools.partial(self._release, caller, slots)

    def forget(self, caller: str) -> None:
        """Count a caller that holds and waits for nothing as gone, at once."""
        self._last_seen.pop(caller, None)

    def turn_away(self, error: Exception) -> None:
        """Refuse all that wait, with this error."""
        for caller, waiters in list(self._waiters.items()):
            for waiter in list(waiters):
                self._remove_waiter(caller, waiter)
                if not waiter.decided.done():
                    waiter.decided.set_exception(error)

    def _explain_refusal(self, caller: str, share: int) -> str:
        slots = f"{self._slots:,} {self._unit}"
        if self._headroom:
            return f"{slots} are the limit: your requests hold {self._held[caller]:,}, and others need what is left"
        if share == self._slots:
            return f"the queue is full: {self.taken:,} {self._unit} are under way, and {self._slots:,} is the limit"
        return f"your share of the queue is full: {share:,} of its {slots}, while other callers use it too"

    def _register(self, caller: str) -> int:
        """Record that a caller is present; return the share of each caller."""
        now = asyncio.get_running_loop().time()
        if caller not in self._last_seen or len(self._last_seen) > 1:
            self._last_seen.pop(caller, None)
        self._last_seen[caller] = now
        if len(self._last_seen) == 1:
            return self._share()
        while self._last_seen[oldest := next(iter(self._last_seen))] < now - PRESENCE_TIMEOUT:
            del self._last_seen[oldest]
            if self._held[oldest] or oldest in self._waiters:
                self._last_seen[oldest] = now
        return self._share()

    def _share(self) -> int:
        return min(self._slots, max(self._slots // max(1, len(self._last_seen)), self._min_share))

    def _may_take(self, caller: str, slots: int, share: int, *, wait: bool) -> bool:
        """Return True if slots are free, and no other caller is before this one."""
        if self.taken + slots > self._slots or not self._is_within_share(caller, slots, share):
            return False
        if not self._waiters or self._headroom:  # with headroom, those that wait do not fit
            return True
        if wait and caller in self._waiters:
            return False
        return self._next_caller(share) in (None, caller)

    def _may_wait(self, caller: str, slots: int, share: int, *, wait: bool) -> bool:
        """Return True if the caller has a right to the slots or is willing to wait, and few enough wait already."""
        total, waiting = self._held[caller] + self._waiting[caller], self._waiting.total() + slots
        has_right = not total or (total + slots <= share and not self._headroom)
        return (has_right and waiting <= self._max_waiting + self._slots) or (
            wait and waiting <= max(self._max_waiting, slots)
        )

    def _is_within_share(self, caller: str, slots: int, share: int) -> bool:
        held = self._held[caller]
        if self._headroom:
            return held + slots <= HEADROOM * (self._slots - self.taken - slots)
        return not held or held + slots <= share

    async def _wait(self, caller: str, slots: int) -> None:
        waiter = _Waiter(slots)
        self._waiters.setdefault(caller, deque()).append(waiter)
        self._waiting[caller] += slots
        try:
            await waiter.decided
        except asyncio.CancelledError:
            # The decision and the cancellation came in the same turn of the event loop. A waiter that was admitted
            # releases its slots; one that was refused has an exception and never took any.
            decided = waiter.decided
            if decided.done() and not decided.cancelled() and decided.exception() is None:
                self._release(caller, slots)
            elif waiter in self._waiters.get(caller, ()):
                self._remove_waiter(caller, waiter)
                self._admit_waiters()
            raise

    def _remove_waiter(self, caller: str, waiter: _Waiter) -> None:
        waiters = self._waiters[caller]
        waiters.remove(waiter)
        self._waiting[caller] -= waiter.slots
        if not waiters:
            del self._waiters[caller], self._waiting[caller]

    def _take(self, caller: str, slots: int) -> None:
        self.taken += slots
        self._held[caller] += slots

    def _release(self, caller: str, slots: int) -> None:
        self.taken -= slots
        self._held[caller] -= slots
        if not self._held[caller]:
            del self._held[caller]
        self._admit_waiters()

    def _admit_waiters(self) -> None:
        """Give free slots to those that wait for them."""
        if not self._waiters:
            return
        share = self._share()
        while (caller := self._next_caller(share)) is not None:
            waiter = self._first(caller, share)
            if waiter is None:
                return
            if waiter.decided.done():  # it was cancelled, and its task has not run since
                self._remove_waiter(caller, waiter)
                continue
            if self.taken + waiter.slots > self._slots:
                return  # the slots are kept for it, so that small requests cannot keep a large one out
            self._remove_waiter(caller, waiter)
            self._take(caller, waiter.slots)
            if caller in self._waiters:  # it has had its turn: of callers that hold as much, the others are before it
                self._waiters[caller] = self._waiters.pop(caller)
            waiter.decided.set_result(None)

    def _next_caller(self, share: int) -> str | None:
        """Return the caller that holds least, of those that wait and may have more."""
        callers = [name for name in self._waiters if self._first(name, share)]
        return min(callers, key=lambda name: self._held[name], default=None)

    def _first(self, caller: str, share: int) -> _Waiter | None:
        """Return the request of a caller that is next, or None if the caller may not have as many slots.

        With headroom, one that is large lets some after it pass: it may wait until nobody else holds anything.
        """
        waiters = itertools.islice(self._waiters[caller], LOOKAHEAD if self._headroom else 1)
        return next((each for each in waiters if self._is_within_share(caller, each.slots, share)), None)


class Reservation:
    """Context manager that holds slots; see `Admission.admit`.

    Args:
        admission: limit on the slots.
        slots: number of slots.
        caller: caller that asks for them.
        wait: True to wait for slots beyond the caller's share rather than be refused.
    """

    def __init__(self, admission: Admission, slots: int, *, caller: str, wait: bool) -> None:
        self._admission, self._slots, self._caller, self._wait = admission, slots, caller, wait

    async def __aenter__(self) -> None:
        self._release = await self._admission.hold(self._slots, caller=self._caller, wait=self._wait)

    async def __aexit__(self, *_: object) -> None:
        self._release()
