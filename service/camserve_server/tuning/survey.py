"""Measure in growing batches, in turn, for as long as it pays and time is left."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from camserve_server.core.errors import OutOfMemory

BATCHES = (1, 2, 4, 8, 16, 32)
ROUNDS = 3  # that count, after one that warms up
GAIN = 1.05  # times as many images a second: what a larger batch must bring


@dataclass(frozen=True, slots=True)
class Line:
    """What is measured in growing batches.

    Attributes:
        model: its name.
        precision: that it runs in.
        threads: that it is computed by.
    """

    model: str
    precision: str
    threads: int


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured of one batch.

    Attributes:
        line: of which.
        batch: images in it.
        seconds: that it takes, the median; infinite where the device has no memory for it.
    """

    line: Line
    batch: int
    seconds: float

    @property
    def rate(self) -> float:
        """Images a second."""
        return self.batch / self.seconds


@dataclass(frozen=True, slots=True)
class Survey:
    """What was measured, smaller batches first, and what there was no time for."""

    cells: tuple[Cell, ...]
    left_out: tuple[tuple[Line, int], ...]


Run = Callable[[Line, int], object]
"""Runs a batch of so many images."""


def surveyed(
    lines: Sequence[Line], run: Run, seconds: float, latency: float, clock: Callable[[], float] = time.perf_counter
) -> Survey:
    """Measure every line, all in turn at each size of batch, so that a noisy machine is noisy for all of them.

    A line's batches stop growing when the last one took too long or brought too little.

    Args:
        lines: those that matter most first.
        run: what is timed.
        seconds: that it may take; what would not end by then is left out. The first batch of a line is always begun.
        latency: seconds that a batch may take.
        clock: tells the time.
    """
    late, growing = clock() + seconds, list(lines)
    last: dict[Line, Cell] = {}
    cells: list[Cell] = []
    left_out: list[tuple[Line, int]] = []
    for batch in BATCHES:
        affordable = list(_affordable(growing, last, late - clock()))
        times = _timed(affordable, batch, run, late, clock)
        now = {line: Cell(line, batch, statistics.median(took)) for line, took in times.items() if took}
        left_out += [(line, batch) for line in growing if line not in now]
        cells += now.values()
        growing = [line for line, cell in now.items() if _grows(cell, last.get(line), latency)]
        last |= now
    return Survey(tuple(cells), tuple(left_out))


def _affordable(lines: Iterable[Line], last: Mapping[Line, Cell], left: float) -> Iterator[Line]:
    """Yield the lines whose next batch there is time for: it takes twice as long as the last one, at most."""
    for line in lines:
        cost = 2 * last[line].seconds * (ROUNDS + 1) if line in last else 0
        if cost <= left:
            left -= cost
            yield line


def _timed(
    lines: Sequence[Line], batch: int, run: Run, late: float, clock: Callable[[], float]
) -> dict[Line, list[float]]:
    times: dict[Line, list[float]] = {line: [] for line in lines}
    for turn in range(ROUNDS + 1):
        for line, took in times.items():
            if clock() >= late or math.inf in took:
                continue
            began = clock()
            try:
                run(line, batch)
            except OutOfMemory:
                took[:] = [math.inf]
                continue
            if turn:
                took.append(clock() - began)
    return times


def _grows(cell: Cell, before: Cell | None, latency: float) -> bool:
    return cell.seconds <= latency and (before is None or cell.rate > GAIN * before.rate)
