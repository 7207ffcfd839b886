"""Time things in turn, so that a noisy machine is noisy for all of them."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class TurnOrder:
    """Durations of each candidate, round by round: seconds, and seconds of processor time of this whole process."""

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]


def in_turn(runs: Mapping[str, Run], rounds: int) -> TurnOrder:
    """Time everything in turn, after a round that warms up."""
    turns = TurnOrder({name: [] for name in runs}, {name: [] for name in runs})
    for number in range(rounds + 1):
        for name, run in runs.items():
            cpu = time.process_time()
            took = timed(run)
            if number:
                turns.wall[name].append(took)
                turns.cpu[name].append(time.process_time() - cpu)
    return turns


def timed(run: Run) -> float:
    """Return how many seconds it takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over rounds of one thing's number over another's."""
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


def repeated(run: Run, seconds: float) -> tuple[int, float]:
    """Run again and again for so long, at least once; return how often, and the seconds that it took."""
    began, count = time.perf_counter(), 0
    while not count or time.perf_counter() - began < seconds:
        run()
        count += 1
    return count, time.perf_counter() - began
