"""Explanations a second end to end: servers on one device, several clients, JPEG photos in and overlays out."""

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks import stages
from benchmarks.gpu.client import Answers
from benchmarks.gpu.model import kernels, ours
from benchmarks.gpu.scale import Cells, Clock, Deployment, Scale
from benchmarks.results import Part, Table
from benchmarks.scale import RESNET
from benchmarks.serving import HERE, Process, serving
from camserve_server import models

RATE = 3000.0
WAITS = "engine's time"
NEEDS = 30.0  # seconds that a server and its stretches take
COLUMNS = (
    *("servers x engines", "under way", "explanations/s", "p50 ms", "p99 ms", "server cores", "client cores"),
    *("event loop", "engine's CPU", "engine's time", "image threads", "GPU", "cores", "bottleneck"),
)
_NOTE = (
    "Shares of the time: of one event loop; of an engine's thread, by processor time (it launches kernels and makes "
    "results) and by the clock (it also waits for the GPU, and for the interpreter's lock); of all cores, for the "
    "threads that decode and draw; of the GPU, by the time that its kernels take; and of all cores, for servers and "
    "clients together. The bottleneck is the busiest of them. Where none is, but the engine's clock: it waits for "
    "what it asked of the GPU, or for the interpreter; and where that is not either: the clients."
)
BUSY = 0.75

Books = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """Result of one stretch of load.

    Attributes:
        answers: of each client.
        books: what it added to those of each server.
        seconds: that it took.
    """

    answers: list[Answers]
    books: list[Books]
    seconds: float

    @property
    def rate(self) -> float:
        """Explanations a second."""
        return sum(one.rate for one in self.answers)

    @property
    def count(self) -> int:
        """Explanations."""
        return sum(one.count for one in self.answers)

    def cores(self) -> tuple[float, float]:
        """Return how many cores the servers used, and the clients."""
        servers = sum(one["process"] for one in self.books)
        return servers / self.seconds, sum(one.cpu for one in self.answers) / self.seconds

    def shares(self, deployment: Deployment, kernel: float) -> dict[str, float]:
        """Return the share of the time that each part of the way is busy.

        Args:
            deployment: the servers.
            kernel: seconds that the GPU takes for one explanation.
        """
        threads = [one["threads"] for one in self.books]
        engines, cores = deployment.servers * deployment.engines, os.cpu_count() or 1
        return {
            "event loop": max(one.get("loop", 0.0) for one in threads) / self.seconds,
            "engine's CPU": sum(one.get("engine", 0.0) for one in threads) / self.seconds / engines,
            WAITS: sum(one["spent"]["engine"][1] for one in self.books) / self.seconds / engines,
            "image threads": sum(one.get("image", 0.0) for one in threads) / self.seconds / cores,
            "GPU": kernel * self.count / self.seconds,
            "cores": sum(self.cores()) / cores,
        }


def measure(scale: Scale, clock: Clock) -> Part:
    """Load one deployment of servers after another."""
    part, rows, notes, name = Part("served"), list[Cells](), [_NOTE], scale.models[0]
    for deployment in scale.deployments:
        if not clock.allows(NEEDS if scale.gpu else 1):
            notes.append(f"Left out for want of time: {deployment.name}.")
            continue
        try:
            kernel, found = _kernel(deployment, scale), _loaded(deployment, scale)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the others are measured
            notes.append(f"{deployment.name}: {type(error).__name__}: {str(error)[:150]}")
            continue
        rows += [_row(deployment, under_way, one, kernel) for under_way, one in found.items()]
        if not part.tables:
            most = max(found)
            title = f"{name}, {deployment.name}, {most} under way"
            part.tables.append(stages.stage_table(title, [_together(found[most])], kernel))
    best = max((float(row[2].replace(",", "")) for row in rows), default=0.0)
    if scale.gpu and name == RESNET:
        part.at_least(f"{RESNET}: explanations a second, end to end", RATE, best)
    part.tables.insert(0, Table(f"{name} end to end, {scale.clients} clients", COLUMNS, rows, tuple(notes)))
    return part


def _loaded(deployment: Deployment, scale: Scale) -> dict[int, Found]:
    """Load a fleet; return what each number of requests under way found."""
    with _started(deployment, scale) as servers, _crew(servers, scale) as clients:
        _stretch(servers, clients, scale.under_way[0], scale.stretch / 4)
        return {under_way: _stretch(servers, clients, under_way, scale.stretch) for under_way in scale.under_way}


def _kernel(deployment: Deployment, scale: Scale) -> float:
    """Return the seconds of a GPU's time for one image of a full batch."""
    model = models.load(models.parse(scale.spec(scale.models[0], deployment.precision)), scale.device)
    return kernels(ours(model, deployment.rows), scale) / deployment.rows


@contextlib.contextmanager
def _started(deployment: Deployment, scale: Scale) -> Iterator[list[Process]]:
    spec = scale.spec(scale.models[0], deployment.precision)
    flags = ("--device", ",".join([scale.device] * deployment.engines), "--max-batch-rows", str(deployment.rows))
    threads = scale.threads or max(1, (os.cpu_count() or 1) // deployment.servers)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(deployment.servers) as pool:
        starting = [
            serving((spec,), *flags, "--threads", str(threads), program=stages.PROGRAM)
            for _ in range(deployment.servers)
        ]
        yield list(pool.map(stack.enter_context, starting))  # all at once


@contextlib.contextmanager
def _crew(servers: Sequence[Process], scale: Scale) -> Iterator[list["subprocess.Popen[str]"]]:
    """Start the clients, each of one of the servers."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(_client(servers[place % len(servers)]))
            for place in range(max(scale.clients, len(servers)))
        ]


@contextlib.contextmanager
def _client(server: Process) -> Iterator["subprocess.Popen[str]"]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "benchmarks.gpu.client", server.address]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=HERE.parent, text=True) as client:  # noqa: S603 -- our own program
        try:
            yield client
        finally:
            if client.stdin:
                client.stdin.close()
            client.wait(60)


def _stretch(
    servers: Sequence[Process], clients: Sequence["subprocess.Popen[str]"], under_way: int, seconds: float
) -> Found:
    before = [stages.asked(one) for one in servers]
    began = time.perf_counter()
    for client in clients:
        _line(client, f"{max(1, under_way // len(clients))} {seconds}")
    answers = [Answers(**json.loads(_answer(client))) for client in clients]
    took = time.perf_counter() - began
    books = [stages.less(stages.asked(one), was) for one, was in zip(servers, before, strict=True)]
    return Found(answers, books, took)


def _line(client: "subprocess.Popen[str]", words: str) -> None:
    if client.stdin is None:
        raise ValueError("the client has no input")
    client.stdin.write(words + "\n")
    client.stdin.flush()


def _answer(client: "subprocess.Popen[str]") -> str:
    line = client.stdout.readline() if client.stdout else ""
    if not line:
        raise ChildProcessError(f"a client ended: exit code {client.poll()}")
    return line


def _row(deployment: Deployment, under_way: int, found: Found, kernel: float) -> Cells:
    shares = found.shares(deployment, kernel)
    servers, clients = found.cores()
    return (
        deployment.name,
        str(under_way),
        f"{found.rate:,.0f}",
        f"{1e3 * statistics.median(one.p50 for one in found.answers):.1f}",
        f"{1e3 * max(one.p99 for one in found.answers):.1f}",
        f"{servers:.1f}",
        f"{clients:.1f}",
        *(f"{share:.0%}" for share in shares.values()),
        bottleneck(shares),
    )


def bottleneck(shares: Mapping[str, float]) -> str:
    """Name what keeps the rate from being higher, of the parts by the shares of the time that they are busy."""
    known = {name: share for name, share in shares.items() if name != WAITS and not math.isnan(share)}
    busiest = max(known, key=lambda name: known[name])
    if known[busiest] >= BUSY:
        return busiest
    return WAITS if shares[WAITS] >= BUSY else "clients"


def _together(found: Found) -> Books:
    """Return the books of the first server, with the number of its requests."""
    return found.books[0] | {"count": max(1, found.count // len(found.books)), "timings": []}
