"""Batching policy: the rules that decide which rows run next, as pure functions.

1. Callers take turns. The next batch starts with the caller whose last turn was longest ago, however much others sent.
2. That caller's most urgent pass is served (a `Pass` is what the rows of a batch have in common): the one that has
   waited longest since it was last served, or whose nearest deadline comes first. A pass in which only long requests
   wait goes after passes with short ones, unless it has waited for a second, or a deadline is less than a second away.
3. The batch is filled with rows of the same pass from all callers, one request of each caller in turn. A caller's
   requests with a near deadline go first, then those with the fewest rows left. So of many equal long requests, the
   first to begin is the first to end.
4. A quarter of every batch belongs to the caller's oldest request, so that short requests never starve a long one.
5. While short requests keep arriving, that quarter is all that long requests get. A batch cannot be interrupted, so a
   batch that a short request waits for must itself be short.

The rules for two batches at once on one worker, and for the pause before a retry, are here too. `queue`, `dispatcher`
and `batcher` apply the rules. Times are in seconds, on one clock.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TypeVar

T = TypeVar("T")

PASS_TIMEOUT = 1.0  # seconds: a pass that has waited for this long is due, even if only long requests wait for it
DEADLINE_MARGIN = 1.0  # seconds: a deadline nearer than this is urgent
SHORT_REQUEST_WINDOW = 10.0  # seconds after a short request in which another one is expected
LONG_REQUEST = 32  # rows: a request with more is long, even if a batch has room for all of them
OLDEST_SHARE = 4  # the oldest request owns a quarter (1/4) of the inputs of a batch
MAX_REMEMBERED_CALLERS = 4096  # callers whose last turn is remembered; a forgotten caller counts as new
MIN_RETRY_AFTER = 0.05  # seconds
MAX_RETRY_AFTER = 5.0  # seconds


class TurnOrder:
    """Turns of callers: the next turn goes to the waiting caller whose last turn was longest ago."""

    def __init__(self) -> None:
        self._last_turns: dict[str, int] = {}  # numbers of turns, the latest last
        self._count = 0

    def next(self, callers: Iterable[str]) -> str:
        """Return the next caller; among those that never had a turn, the first."""
        return min(callers, key=self.last)

    def last(self, caller: str) -> int:
        """Return the number of a caller's last turn, or 0 if it had none."""
        return self._last_turns.get(caller, 0)

    def record_turn(self, caller: str) -> None:
        """Record that a caller had its turn."""
        self._count += 1
        self._last_turns.pop(caller, None)
        self._last_turns[caller] = self._count
        if len(self._last_turns) > MAX_REMEMBERED_CALLERS:
            del self._last_turns[next(iter(self._last_turns))]


def is_long(rows: int, max_batch_inputs: int) -> bool:
    """Return True for a request with more rows than a batch has room for, or than `LONG_REQUEST`."""
    return rows > min(max_batch_inputs, LONG_REQUEST)


def expects_short_request(last_short_arrival: float, now: float) -> bool:
    """Return True if a short request arrived so recently that another one may arrive soon."""
    return now - last_short_arrival < SHORT_REQUEST_WINDOW


def pass_urgency(
    now: float, *, oldest_arrival: float, last_turn: float, nearest_deadline: float, only_long: bool
) -> tuple[bool, float]:
    """Return the sort key of one caller's passes: the pass with the smallest key is served.

    A pass is due one second after it was last served or its oldest request arrived, whichever is later. A pass in which
    only long requests wait is sorted after the others until it is due or its nearest deadline is near.

    Args:
        now: current time.
        oldest_arrival: arrival of the pass's oldest request.
        last_turn: time at which the pass was last served; 0 if it was not served yet.
        nearest_deadline: nearest deadline of its requests, or infinity.
        only_long: True if no short request waits for the pass.
    """
    due = max(oldest_arrival, last_turn) + PASS_TIMEOUT
    is_urgent = due <= now or nearest_deadline <= now + DEADLINE_MARGIN
    return only_long and not is_urgent, min(due, nearest_deadline)


def request_urgency(now: float, *, deadline: float, waiting_rows: int) -> tuple[bool, int]:
    """Return the sort key of one caller's requests for a pass: near deadlines first, then the fewest rows left."""
    return deadline > now + DEADLINE_MARGIN, waiting_rows


def take_turns(queues: Iterable[Sequence[T]]) -> list[T]:
    """Return the first item of each queue, then the second of each, and so on."""
    return [item for turn in zip_longest(*queues) for item in turn if item is not None]


def inputs_for_oldest(batch_inputs: int, batches: int) -> int:
    """Return how many inputs of a batch belong to the oldest request.

    A batch too small to be divided belongs to the oldest request as a whole, every fourth time.

    Args:
        batch_inputs: number of inputs that the batch has room for.
        batches: number of batches formed so far.
    """
    return batch_inputs // OLDEST_SHARE or int(batches % OLDEST_SHARE == 1)


def inputs_for_long(batch_inputs: int, *, short_expected: bool) -> int:
    """Return up to how many inputs, counting those of all requests, a long request may fill a batch.

    It is a quarter of the batch while a short request is expected.
    """
    return max(1, batch_inputs // OLDEST_SHARE) if short_expected else batch_inputs


def only_full_batches_share(*, collects: bool, has_long: bool, short_expected: bool) -> bool:
    """Return True if two batches share a worker only when both are full.

    Either rows are held back until a batch is full (`collects`), or short requests arrive while long ones wait. In the
    second case, a long request must not take a partition that a short one would wait for.
    """
    return collects or (has_long and short_expected)


def partition_inputs(waiting: int, other: int, max_batch_inputs: int) -> int:
    """Return the largest number of inputs in a batch for one of a worker's two partitions.

    Both partitions get equal parts, so that they end together.

    Args:
        waiting: inputs that wait.
        other: inputs in the batch that runs on the other partition.
        max_batch_inputs: largest number of inputs in any batch.
    """
    return min(max_batch_inputs, -(-(waiting + other) // 2))


def gets_whole_worker(waiting: int, max_batch_inputs: int, *, only_full: bool) -> bool:
    """Return True if the rest of the queue is too small for a second batch beside the one just formed.

    Args:
        waiting: inputs that still wait.
        max_batch_inputs: largest number of inputs in any batch.
        only_full: see `only_full_batches_share`.
    """
    return waiting < (max_batch_inputs if only_full else 1)


def retry_after(rows: int, row_seconds: float, workers: int) -> float:
    """Return after how many seconds a refused caller should retry: half the time that the accepted rows take."""
    seconds = rows * row_seconds / workers
    return min(max(seconds / 2, MIN_RETRY_AFTER), MAX_RETRY_AFTER)
