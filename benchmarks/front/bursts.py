"""Bursts of requests on a server, and what each process spends on a request meanwhile."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.front import lock
from benchmarks.front.load import CHANNELS, Answers, Burst, Generator, Window
from benchmarks.front.lock import LockShare
from benchmarks.serving import Process, children_of, cpu_of, serving

SETTLE = 0.4  # seconds until a closed loop of requests is steady
LISTENING = "0A"  # state of a socket in /proc/net/tcp
SLEEPING, INSTANT = "sleeping", "instant"
MODELS = tuple(f"{name}=benchmarks.front.models:{name}" for name in (SLEEPING, INSTANT))


@dataclass(frozen=True, slots=True)
class Load:
    """Kind of request, the model's name, and the number of requests under way."""

    kind: str
    model: str
    under_way: int

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"{self.kind}, {self.model}, {self.under_way} under way"


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of one burst. Those in seconds are per request.

    Attributes:
        rate: requests a second.
        front: processor time of the processes that listen, in seconds.
        workers: processor time of the processes that they started, in seconds.
        client: processor time of the load generator, in seconds.
        p50: median latency in seconds.
        p99: 99th percentile of the latency in seconds.
        lock: time under the front's interpreter lock, in seconds; None if it was not sampled.
        lock_error: standard error of `lock`, in seconds.
        size: mean length of a reply in bytes.
    """

    rate: float
    front: float
    workers: float
    client: float
    p50: float
    p99: float
    lock: float | None
    lock_error: float | None
    size: float


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, by its kinds of processes.

    Attributes:
        address: address that it listens on.
        fronts: ids of the processes that listen.
        others: ids of all its other processes.
    """

    address: str
    fronts: tuple[int, ...]
    others: tuple[int, ...]

    @classmethod
    def of(cls, process: Process) -> "Server":
        """Find the processes of a server that was started."""
        family = (process.pid, *children_of(process.pid))
        fronts = listening(family, int(process.address.rpartition(":")[2]))
        return cls(process.address, fronts, tuple(pid for pid in family if pid not in fronts))

    def cpu(self) -> tuple[float, float]:
        """Return the seconds of processor time of its fronts, and of its other processes."""
        return sum(map(cpu_of, self.fronts)), sum(map(cpu_of, self.others))


def listening(pids: Iterable[int], port: int) -> tuple[int, ...]:
    """Return those of some processes that listen on a port."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    sockets = {found for table in tables if table.exists() for found in listening_sockets(table.read_text(), port)}
    return tuple(pid for pid in pids if sockets & _links(pid))


def listening_sockets(table: str, port: int) -> set[str]:
    """Return the sockets that listen on a port as /proc names them, from the text of /proc/net/tcp."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return {f"socket:[{row[9]}]" for row in rows if row[3] == LISTENING and row[1].endswith(f":{port:04X}")}


def _links(pid: int) -> set[str]:
    found = set[str]()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            found.add(str(file.readlink()))
    return found


@contextlib.contextmanager
def started(*flags: str, tree: Path | None = None) -> Iterator[Server]:
    """Serve both models inside the block, from this checkout or another one."""
    with serving(MODELS, *flags, tree=tree) as process:
        yield Server.of(process)


def sample(
    generator: Generator,
    server: Server,
    load: Load,
    seconds: float,
    *,
    locked: bool = False,
    channels: int = CHANNELS,
) -> Sample:
    """Send a burst of requests, and measure it once it is steady.

    Args:
        generator: the load generator.
        server: the server to load.
        load: the requests.
        seconds: length of the measurement.
        locked: True to sample the lock too, if py-spy is there. The server must have a single front.
        channels: number of connections.
    """
    burst = Burst(server.address, load.kind, load.under_way, load.model, channels)
    with generator.burst(burst) as found:
        time.sleep(SETTLE)
        before, began = server.cpu(), time.perf_counter()
        held = lock.held_share(server.fronts[0], max(1, round(seconds))) if locked else None
        if held is None:
            time.sleep(seconds)
        after, window = server.cpu(), Window(began, time.perf_counter())
    (answers,) = found
    if not answers.within(window):  # shorter than a request: measure the whole burst
        after, window = server.cpu(), Window(began, answers.ended[-1])
    spent = tuple(end - start for end, start in zip(after, before, strict=True))
    return _of(answers, window, spent, held)


def _of(answers: Answers, window: Window, spent: Sequence[float], held: LockShare | None) -> Sample:
    """Return the figures of a burst per request.

    Args:
        answers: the answers to the burst.
        window: the interval of the measurement, which has answers.
        spent: seconds of processor time of fronts and workers in it.
        held: share of the time under the lock; None if it was not sampled.
    """
    count = answers.within(window)
    each = held and held.window.seconds / max(1, answers.within(held.window))  # seconds from one answer to the next
    return Sample(
        rate=count / window.seconds,
        front=spent[0] / count,
        workers=spent[1] / count,
        client=answers.cpu / len(answers.ended),
        p50=answers.latency(50, window),
        p99=answers.latency(99, window),
        lock=held.share * each if held and each else None,
        lock_error=held.error * each if held and each else None,
        size=answers.size,
    )


def median(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float | None:
    """Return the median of a figure; None if it was not measured."""
    found = [one for one in map(value, samples) if one is not None]
    return statistics.median(found) if found else None


def spread(values: Sequence[float]) -> float:
    """Return the distance of the smallest value from the largest, as a share of the median."""
    return (max(values) - min(values)) / statistics.median(values)


def knows(flag: str, help_text: str) -> bool:
    """Return True if the help of `camserve-server serve` has a flag."""
    return any(word.rstrip(",") == flag for word in help_text.split())
