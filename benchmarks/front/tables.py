"""Tables of the front: requests, floors, several processes, and what they would be on more cores."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.front import lock
from benchmarks.front.bursts import Load, Sample, median, spread
from benchmarks.results import Table

CORES = 16  # of the machine that is extrapolated to

_LOCK = (
    f"{lock.RATE} samples a second by py-spy, with the standard error of one round. It includes the time that a thread "
    "with the lock waits for a core."
)
_NOTE = (
    "Processor time is that of one request: of the process that listens (front), and of those that it started "
    "(workers). Lock is the wall-clock time under the front's interpreter lock: {lock} The model sleeps 20 ms a batch "
    "and 1 ms an image (sleeping), or answers at once (instant)."
)
_FLOOR = (
    "The floor is the picture work of the request in one thread without a server (cv2 decodes, the server's own resize "
    "and crop, SHA-256 of file and input; for overlays cv2 colours, blends and encodes) and a bare grpc.aio server "
    "with the same bytes in and out under the same number of requests. All of them took turns with the bursts. The "
    "spread is the range of the multiple over {rounds} rounds, as a share of its median."
)
_CORES = (
    f"Extrapolated to {CORES} cores, not measured: the requests a second of N processes if nothing but the "
    "interpreters' locks (N / lock) or the cores (cores / processor time of front and workers) limits them. The model "
    "and the clients need cores, or a GPU and machines, of their own."
)


@dataclass(slots=True)
class Rounds:
    """Figures of all rounds.

    Attributes:
        server: samples of each load.
        bare: seconds of processor time that the bare server takes for a request of each load.
        pictures: seconds of processor time of the picture work, by kind of request.
    """

    server: dict[Load, list[Sample]] = field(default_factory=dict)
    bare: dict[Load, list[float]] = field(default_factory=dict)
    pictures: dict[str, list[float]] = field(default_factory=dict)

    def floors(self, load: Load) -> list[float]:
        """Return the floor of a load in each round, in seconds."""
        return [a + b for a, b in zip(self.bare[load], self.pictures[load.kind], strict=True)]

    def multiples(self, load: Load) -> list[float]:
        """Return the front's processor time over the floor, of each round."""
        return [one.front / floor for one, floor in zip(self.server[load], self.floors(load), strict=True)]


def load_table(found: Mapping[Load, Sequence[Sample]]) -> Table:
    """Return the table of requests a second, processor time and latency."""
    missing = lock.program() is None
    columns = ("request", "model", "under way", "requests/s", "front ms", "workers ms", "client ms", "lock ms")
    return Table(
        "Requests, and the time that each process takes for one",
        (*columns, "p50 ms", "p99 ms"),
        list(_load_rows(found, missing=missing)),
        (_NOTE.format(lock=f"{lock.MISSING}." if missing else _LOCK),),
    )


def _load_rows(found: Mapping[Load, Sequence[Sample]], *, missing: bool) -> Iterator[tuple[str, ...]]:
    for load, samples in found.items():
        yield (
            load.kind,
            load.model,
            str(load.under_way),
            _number(median(samples, lambda one: one.rate)),
            *(_ms(median(samples, value)) for value in (_front, _workers, lambda one: one.client)),
            "no py-spy" if missing else lock_cell(samples),
            *(_ms(median(samples, value), digits=1) for value in (lambda one: one.p50, lambda one: one.p99)),
        )


def lock_cell(samples: Sequence[Sample]) -> str:
    """Return the lock time with its standard error, in milliseconds."""
    found, error = median(samples, _lock), median(samples, lambda one: one.lock_error)
    return "–" if found is None or error is None else f"{1e3 * found:.2f} ± {1e3 * error:.2f}"


def floor_table(found: Rounds) -> Table:
    """Return the table of processor time and lock time as multiples of the floor."""
    columns = ("request", "pictures ms", "bare gRPC ms", "floor ms", "front / floor", "spread", "lock / floor")
    rows = [_floor_row(found, load) for load in found.server]
    rounds = max(len(samples) for samples in found.server.values())
    return Table("Processor time over its floor", columns, rows, (_FLOOR.format(rounds=rounds),))


def _floor_row(found: Rounds, load: Load) -> tuple[str, ...]:
    floor, multiples = statistics.median(found.floors(load)), found.multiples(load)
    locked = median(found.server[load], _lock)
    return (
        load.name,
        _ms(statistics.median(found.pictures[load.kind])),
        _ms(statistics.median(found.bare[load])),
        _ms(floor),
        f"{statistics.median(multiples):.2f}",
        f"{spread(multiples):.0%}",
        "–" if locked is None else f"{locked / floor:.2f}",
    )


def processes_table(name: str, found: Mapping[int, Sequence[Sample]]) -> Table:
    """Return the table of servers of several processes beside a server of one.

    Args:
        name: of the load.
        found: samples by the number of processes; those of one process are among them.
    """
    columns = ("processes", "requests/s", "front ms", "workers ms", "requests/s of one", "processor time of one")
    rows = [
        (
            str(count),
            _number(median(samples, lambda one: one.rate)),
            _ms(median(samples, _front)),
            _ms(median(samples, _workers)),
            f"{_ratio(samples, found[1], lambda one: one.rate):.2f}",
            f"{_ratio(samples, found[1], _used):.2f}",
        )
        for count, samples in found.items()
    ]
    return Table(f"Processes that listen on one port: {name}", columns, rows)


def cores_table(samples: Sequence[Sample]) -> Table:
    """Return the table that extrapolates from a server of one process to several on a larger machine."""
    lock_time, used = median(samples, _lock), statistics.median(map(_used, samples))
    columns = ("processes", "locks: requests/s", "cores: requests/s", "at most", "limited by")
    rows = [capped(count, lock_time, used) for count in (1, 2, 4, 8, CORES)]
    return Table(f"Overlays of a server with {CORES} cores: extrapolated", columns, rows, (_CORES,))


def capped(processes: int, lock_time: float | None, used: float) -> tuple[str, ...]:
    """Return the limits of a number of processes as a row.

    Args:
        processes: number of processes.
        lock_time: seconds of one request under the interpreter's lock; None if it was not sampled.
        used: seconds of processor time of one request.
    """
    cores = CORES / used
    if lock_time is None:
        return str(processes), "no py-spy", _number(cores), _number(cores), "unknown"
    locks = processes / lock_time
    return (
        str(processes),
        _number(locks),
        _number(cores),
        _number(min(locks, cores)),
        "locks" if locks < cores else "cores",
    )


def _ratio(some: Sequence[Sample], others: Sequence[Sample], value: Callable[[Sample], float]) -> float:
    return statistics.median(value(a) / value(b) for a, b in zip(some, others, strict=True))


def _front(one: Sample) -> float:
    return one.front


def _workers(one: Sample) -> float:
    return one.workers


def _lock(one: Sample) -> float | None:
    return one.lock


def _used(one: Sample) -> float:
    return one.front + one.workers


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _ms(seconds: float | None, digits: int = 2) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.{digits}f}"
