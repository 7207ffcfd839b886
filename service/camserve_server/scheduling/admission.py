"""Who is let in: room for so much and no more, shared among those who ask for it.

A caller that is alone may have all the room there is. While others are there too, each has a right to its share, the
room divided by the number of callers: who has more than that gets no more, and who has less is not refused, but waits
for the first room that comes free. So one that asks for ever more fills a server that nobody else uses, and makes way
as soon as somebody comes, who notices nothing. A caller is there while it has or waits for room, and for some seconds
after it last asked.
"""

import asyncio
import functools
import ipaddress
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote

from camserve_server.core.errors import ResourceExhausted

REMEMBERED = 4096  # callers whose last turn is remembered; a caller that was forgotten counts as new
PRESENT = 10.0  # seconds for which a caller counts after it last asked; longer than any pause that it is told to make
LINE = 1024  # places waited for at most by those who have no right to them: what waits is in memory already


class TurnOrder:
    """Turns of callers: the next turn goes to the waiting caller whose last turn was longest ago."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}  # the latest last
        self._count = 0

    def next(self, callers: Iterable[str]) -> str:
        """Return the next caller; among those that never had a turn, the first."""
        return min(callers, key=self.last)

    def last(self, caller: str) -> int:
        """Return the number of a caller's last turn, or 0 if it had none."""
        return self._served.get(caller, 0)

    def took(self, caller: str) -> None:
        """Note that a caller had its turn."""
        self._count += 1
        self._served.pop(caller, None)
        self._served[caller] = self._count
        if len(self._served) > REMEMBERED:
            del self._served[next(iter(self._served))]


class FairThreads:
    """Threads in which callers take turns, one step each. So a new caller waits only for the steps that already run.

    A caller is the name of a token or an address, here as in `Admission`.

    Args:
        threads: run the steps.
    """

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._lines: dict[str, deque[Callable[[], object]]] = {}
        self._turns = TurnOrder()
        self._lock = threading.Lock()

    def of(self, caller: str) -> "CallerThreads":
        """Return the threads as one caller sees them."""
        return CallerThreads(self, caller)

    def submit(self, caller: str, step: Callable[[], object]) -> None:
        """Run a step of a caller in a thread when it is the caller's turn."""
        with self._lock:
            self._lines.setdefault(caller, deque()).append(step)
        self._threads.submit(self._run_next)

    def _run_next(self) -> None:
        with self._lock:
            caller = self._turns.next(self._lines)
            self._turns.took(caller)
            line = self._lines[caller]
            step = line.popleft()
            if not line:
                del self._lines[caller]
        step()


@dataclass(frozen=True, slots=True)
class CallerThreads:
    """The threads as one caller sees them."""

    threads: FairThreads
    caller: str

    def submit(self, step: Callable[[], object], /) -> None:
        """Run a step in a thread when it is the caller's turn."""
        self.threads.submit(self.caller, step)


class MemoryBudget:
    """Room for what it would be good to keep, if there is room.

    Args:
        size: bytes that it takes.
    """

    def __init__(self, size: int) -> None:
        self.free = size

    @contextmanager
    def kept(self, size: int) -> Iterator[bool]:
        """Say inside the block whether there is room for so many bytes, and hold it."""
        fits = size <= self.free
        self.free -= size * fits
        try:
            yield fits
        finally:
            self.free += size * fits


@functools.lru_cache(4096)  # a connection's is asked for with every call
def address_of(peer: str) -> str:
    """Return whose address a gRPC peer has, without its port; of IPv6 the network, in which one caller has them all.

    Example:
        >>> address_of("ipv4:10.1.2.3:4567"), address_of("unix:"), address_of("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:4567")
        ('10.1.2.3', 'unix:', '2001:db8:1:2::/64')
    """
    host = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a socket in the file system, or what gRPC calls otherwise
        return peer if peer.startswith("unix") else host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network(f"{address}/64", strict=False))


@dataclass(slots=True, eq=False)
class _Turn:
    """Somebody who waits."""

    places: int
    come: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Admission:
    """Lets in as much as there is room for.

    Args:
        places: that there are.
        least: places of a caller's share at least.
        refusal: makes the error for who finds no room, of words that say which limit it has met.
        line: places waited for at most by those who have no right to them.
        most: places of a caller that is alone; all of them unless something else is said.
    """

    def __init__(
        self,
        places: int,
        least: int,
        refusal: Callable[[str], Exception] = ResourceExhausted,
        line: float = LINE,
        most: int | None = None,
    ) -> None:
        self.taken = 0
        self._line = line
        self._most = places if most is None else most
        self._places, self._least, self._refusal = places, least, refusal
        self._held: Counter[str] = Counter()
        self._lines: dict[str, deque[_Turn]] = {}
        self._waiting: Counter[str] = Counter()
        self._asked: dict[str, float] = {}  # the latest last

    def admit(self, places: int, *, caller: str, wait: bool) -> "Stay":
        """Hold room inside the block.

        Args:
            places: how much; never more than there is.
            caller: that asks for it.
            wait: for it, even without a right to it.

        Raises:
            Exception: the refusal.
        """
        return Stay(self, places, caller=caller, wait=wait)

    async def hold(self, places: int, *, caller: str, wait: bool) -> Callable[[], None]:
        """Take room; return the function that releases it, which must be called exactly once.

        Args:
            places: how much; never more than there is.
            caller: that asks for it.
            wait: for it, even without a right to it.

        Raises:
            Exception: the refusal.
        """
        share = self._present(caller)
        if self._may_pass(caller, places, share, wait=wait):
            self._take(caller, places)
        elif self._may_wait(caller, places, share, wait=wait):
            await self._turn(caller, places)
        else:
            raise self._refusal(self._words(share))
        return functools.partial(self._leave, caller, places)

    def turn_away(self, error: Exception) -> None:
        """Let nobody wait any longer: all who do are told why."""
        for caller, line in list(self._lines.items()):
            for turn in list(line):
                self._out_of_line(caller, turn)
                if not turn.come.done():
                    turn.come.set_exception(error)

    def _words(self, share: int) -> str:
        if share == self._most:
            return f"the queue is full: {self.taken:,} rows are under way, and {self._places:,} is the limit"
        return (
            f"the queue is full for you: it has {self._places:,} rows, others are here too, and the share of each is "
            f"{share:,}"
        )

    def _present(self, caller: str) -> int:
        """Return the share of each, after noting that this one is there."""
        now = asyncio.get_running_loop().time()
        self._asked.pop(caller, None)
        self._asked[caller] = now
        while self._asked[oldest := next(iter(self._asked))] < now - PRESENT:
            del self._asked[oldest]
            if self._held[oldest] or oldest in self._lines:
                self._asked[oldest] = now
        return self._each()

    def _each(self) -> int:
        return min(self._most, max(self._places // max(1, len(self._asked)), self._least))

    def _may_pass(self, caller: str, places: int, share: int, *, wait: bool) -> bool:
        """Say whether there is room at once, and nobody's turn before."""
        if self.taken + places > self._places or not self._within(caller, places, share):
            return False
        if wait and caller in self._lines:
            return False
        return self._next(share) in (None, caller)

    def _may_wait(self, caller: str, places: int, share: int, *, wait: bool) -> bool:
        """Say whether it is by right or by patience, and the line is not too long for either."""
        mine, line = self._held[caller] + self._waiting[caller], self._waiting.total() + places
        by_right = not mine or mine + places <= share
        return (by_right and line <= self._line + self._places) or (wait and line <= max(self._line, places))

    def _within(self, caller: str, places: int, share: int) -> bool:
        held = self._held[caller]
        return not held or held + places <= share

    async def _turn(self, caller: str, places: int) -> None:
        turn = _Turn(places)
        self._lines.setdefault(caller, deque()).append(turn)
        self._waiting[caller] += places
        try:
            await turn.come
        except asyncio.CancelledError:
            # The decision and the cancellation came in the same turn of the event loop. A waiter that was admitted
            # releases its room; one that was refused has an exception and never took any.
            if turn.come.done() and not turn.come.cancelled() and turn.come.exception() is None:
                self._leave(caller, places)
            elif turn in self._lines.get(caller, ()):
                self._out_of_line(caller, turn)
                self._let_in()
            raise

    def _out_of_line(self, caller: str, turn: _Turn) -> None:
        line = self._lines[caller]
        line.remove(turn)
        self._waiting[caller] -= turn.places
        if not line:
            del self._lines[caller], self._waiting[caller]

    def _take(self, caller: str, places: int) -> None:
        self.taken += places
        self._held[caller] += places

    def _leave(self, caller: str, places: int) -> None:
        self.taken -= places
        self._held[caller] -= places
        if not self._held[caller]:
            del self._held[caller]
        self._let_in()

    def _let_in(self) -> None:
        """Give the room that is free to who waits for it."""
        share = self._each()
        while (caller := self._next(share)) is not None:
            turn = self._lines[caller][0]
            if turn.come.done():  # it has given up, and was not yet told
                self._out_of_line(caller, turn)
                continue
            if self.taken + turn.places > self._places:
                return  # the room is kept for it, so that small ones cannot keep a large one out
            self._out_of_line(caller, turn)
            self._take(caller, turn.places)
            turn.come.set_result(None)

    def _next(self, share: int) -> str | None:
        """Return whose turn it is: of those who wait and may have more, the one that has least."""
        may = [one for one, line in self._lines.items() if self._within(one, line[0].places, share)]
        return min(may, key=lambda one: self._held[one], default=None)


class Stay:
    """Room that is held inside a block; see `Admission.admit`.

    Args:
        admission: to the room.
        places: how much.
        caller: that asks for it.
        wait: for it, even without a right to it.
    """

    def __init__(self, admission: Admission, places: int, *, caller: str, wait: bool) -> None:
        self._admission, self._places, self._caller, self._wait = admission, places, caller, wait

    async def __aenter__(self) -> None:
        self._release = await self._admission.hold(self._places, caller=self._caller, wait=self._wait)

    async def __aexit__(self, *_: object) -> None:
        self._release()
