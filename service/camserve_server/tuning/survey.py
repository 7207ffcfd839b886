"""Measure batches of growing size, in turn, as long as it pays and time is left."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from camserve_server.core.errors import OutOfMemory

BATCHES = (1, 2, 4, 8, 16, 32)
ROUNDS = 3  # timed rounds, after one that warms up
MIN_GAIN = 1.05  # factor in images per second that a larger batch must reach to be worth it


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run a model, measured in growing batches.

    Attributes:
        model: name of the model.
        precision: its precision.
        threads: number of threads.
    """

    model: str
    precision: str
    threads: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """The time of one batch size.

    Attributes:
        variant: the measured variant.
        batch: number of images in the batch.
        seconds: median time of the batch; infinite if the device has no memory for it.
    """

    variant: Variant
    batch: int
    seconds: float

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.batch / self.seconds


@dataclass(frozen=True, slots=True)
class Survey:
    """Results of a series of measurements.

    Attributes:
        measurements: the measurements, small batches first.
        left_out: variants and batch sizes that there was no time for.
    """

    measurements: tuple[Measurement, ...]
    left_out: tuple[tuple[Variant, int], ...]


Run = Callable[[Variant, int], object]
"""Runs a batch with a number of images."""


def measure(
    variants: Sequence[Variant],
    run: Run,
    seconds: float,
    max_batch_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Survey:
    """Measure all variants, in turn at each batch size, so that noise on the machine affects all of them.

    The batches of a variant stop growing when the last one took too long or gained too little.

    Args:
        variants: the variants, the most important ones first.
        run: function to time.
        seconds: time limit. Batches that would exceed it are left out; the first batch of a variant is always started.
        max_batch_seconds: time limit of a batch.
        clock: clock in seconds.
    """
    deadline, growing = clock() + seconds, list(variants)
    previous: dict[Variant, Measurement] = {}
    measurements: list[Measurement] = []
    left_out: list[tuple[Variant, int]] = []
    for batch in BATCHES:
        affordable = list(_affordable(growing, previous, deadline - clock()))
        times = _time_batches(affordable, batch, run, deadline, clock)
        current = {
            variant: Measurement(variant, batch, statistics.median(durations))
            for variant, durations in times.items()
            if durations
        }
        left_out += [(variant, batch) for variant in growing if variant not in current]
        measurements += current.values()
        growing = [
            variant
            for variant, measurement in current.items()
            if _should_grow(measurement, previous.get(variant), max_batch_seconds)
        ]
        previous |= current
    return Survey(tuple(measurements), tuple(left_out))


def _affordable(
    variants: Iterable[Variant], previous: Mapping[Variant, Measurement], seconds_left: float
) -> Iterator[Variant]:
    """Yield the variants whose next batch fits into the time left: it takes at most twice as long as the last one."""
    for variant in variants:
        cost = 2 * previous[variant].seconds * (ROUNDS + 1) if variant in previous else 0
        if cost <= seconds_left:
            seconds_left -= cost
            yield variant


def _time_batches(
    variants: Sequence[Variant], batch: int, run: Run, deadline: float, clock: Callable[[], float]
) -> dict[Variant, list[float]]:
    """Return the durations of a batch of each variant."""
    times: dict[Variant, list[float]] = {variant: [] for variant in variants}
    for turn in range(ROUNDS + 1):
        for variant, durations in times.items():
            if clock() >= deadline or math.inf in durations:
                continue
            began = clock()
            try:
                run(variant, batch)
            except OutOfMemory:
                durations[:] = [math.inf]
                continue
            if turn:
                durations.append(clock() - began)
    return times


def _should_grow(measurement: Measurement, previous: Measurement | None, max_batch_seconds: float) -> bool:
    if measurement.seconds > max_batch_seconds:
        return False
    return previous is None or measurement.rate > MIN_GAIN * previous.rate
