"""Measure a server over gRPC relative to its engine, JPEG in and overlay out, also beyond its capacity."""

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np
import torch

from benchmarks import load
from benchmarks.engine import Ours, made, plain
from benchmarks.load import BATCH, Stretch
from benchmarks.photos import requests
from benchmarks.results import Bar, Part, Table
from benchmarks.scale import MOBILENET, RESNET, Scale
from benchmarks.serving import Process, serving
from benchmarks.timing import repeated, timed

QUEUE = 64  # photos: two seconds of resnet50 on two cores, so that beyond capacity it fills
ROWS_PER_PHOTO = 3  # that the server counts for an input of 224 x 224 pixels
BELOW, BEYOND = (0.5, 0.8), 1.2  # of capacity
CLOSED = (1, 8, 32)
FLOW = "stream"

_NOTE = (
    f"`of engine` is the share of the speed that the engine alone has with batches of {BATCH}, in turn. The CPU is "
    "that of one request. On these cores the client takes its share of what there is. The server sets limits on malloc "
    "itself, as it always does; the engine alone runs with the same by environment."
)

_QUEUED = (
    f"The queue holds {QUEUE} photos here (`--max-queue-rows {ROWS_PER_PHOTO * QUEUE}`). Beyond capacity a burst fills "
    "it first, and each figure is the median of {scale.rounds} rounds of {scale.overload:g} s. While it is full, what "
    "is accepted takes limit / rate on average (Little's law), and the slowest hundredth takes longer. Requests that "
    "come one at a time cost more processor time than those that a closed loop sends together: that is what "
    "explanations lose here, as many of them with a queue that refuses nothing."
)

Say = Callable[[str], None]


@dataclass(slots=True)
class _Rounds:
    """Results of the rounds of one model.

    Attributes:
        engine: images a second of the engine alone, a round.
        engine_cpu: seconds of processor time that it used for one, a round.
        plain: seconds of a plain forward pass of one image, a round.
        stretches: of each kind of load, a round.
    """

    engine: list[float] = field(default_factory=list)
    engine_cpu: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    stretches: dict[int | str, list[Stretch]] = field(default_factory=dict)

    def rates(self, kind: int | str) -> list[float]:
        """Return the answers a second of each round."""
        under_way = CLOSED[-1] if kind == FLOW else int(kind)
        return [one.rate(under_way) for one in self.stretches[kind]]

    def of_engine(self, kind: int | str) -> float:
        """Return the median share of the engine's own rate."""
        return statistics.median(a / b for a, b in zip(self.rates(kind), self.engine, strict=True))

    def latency(self, kind: int | str, share: float) -> float:
        """Return the median over rounds of a percentile, in seconds."""
        return statistics.median(one.latency(share) for one in self.stretches[kind])


def measure(scale: Scale, *, say: Say = print) -> Part:
    """Measure every model that is to be served."""
    part, closed_rows, open_rows = Part("served"), list[tuple[str, ...]](), list[tuple[str, ...]]()
    for model, precision in scale.served:
        spec, name = scale.spec(model, precision), f"{model} {precision}"
        with serving((spec,), "--max-queue-rows", str(ROWS_PER_PHOTO * QUEUE)) as server:
            checked(server.address)
            found = _rounds(scale, model, spec, server, say)
            closed_rows += _closed_rows(name, found)
            _hold(part, model, precision, found)
            open_rows += _below(name, server, scale.stretch, say)
            open_rows.append(_beyond(part, name, server, scale, say))
    part.tables += [_closed_table(closed_rows, scale), _open_table(open_rows, scale)]
    return part


def _rounds(scale: Scale, model: str, spec: str, server: Process, say: Say) -> _Rounds:
    """Let the engine alone, a plain forward pass and every kind of load take turns."""
    found, engine = _Rounds(), Ours.of(spec).batch(BATCH)
    forward = plain(made(model, scale.size), torch.randn(1, 3, scale.size, scale.size))
    engine()
    load.closed(server.address, BATCH, scale.stretch / 2)
    for number in range(scale.rounds):
        cpu = time.process_time()
        batches, seconds = repeated(engine, scale.stretch / 2)
        found.engine.append(batches * BATCH / seconds)
        found.engine_cpu.append((time.process_time() - cpu) / batches / BATCH)
        found.plain.append(_median_of(forward, scale.stretch / 4))
        for kind in (*CLOSED, FLOW):
            found.stretches.setdefault(kind, []).append(_stretch(server, kind, scale.stretch))
        rates = ", ".join(f"{kind}: {found.rates(kind)[-1]:.1f}" for kind in found.stretches)
        say(f"served: {spec}, round {number + 1}: engine {found.engine[-1]:.1f}/s, under way {rates}")
    return found


def _median_of(run: Callable[[], object], seconds: float) -> float:
    run()
    took: list[float] = []
    until = time.perf_counter() + seconds
    while not took or time.perf_counter() < until:
        took.append(timed(run))
    return statistics.median(took)


def _stretch(server: Process, kind: int | str, seconds: float) -> Stretch:
    before = server.cpu()
    if kind == FLOW:
        stretch = load.streamed(server.address, CLOSED[-1], seconds)
    else:
        stretch = load.closed(server.address, int(kind), seconds)
    stretch.server = server.cpu() - before
    return stretch


def _closed_rows(name: str, found: _Rounds) -> Iterator[tuple[str, ...]]:
    for kind, stretches in found.stretches.items():
        count = sum(one.count for one in stretches)
        yield (
            name,
            f"{CLOSED[-1]}, one stream" if kind == FLOW else str(kind),
            f"{statistics.median(found.rates(kind)):.1f}",
            f"{found.of_engine(kind):.2f}",
            f"{1e3 * found.latency(kind, 50):.1f}",
            f"{1e3 * found.latency(kind, 99):.1f}",
            f"{1e3 * statistics.median(found.engine_cpu):.1f}",
            f"{1e3 * sum(one.server for one in stretches) / count:.1f}",
            f"{1e3 * sum(one.client for one in stretches) / count:.2f}",
        )


def _closed_table(rows: list[tuple[str, ...]], scale: Scale) -> Table:
    return Table(
        f"Closed loop: a fixed number of requests in flight, median of {scale.rounds} rounds of {scale.stretch:g} s",
        (
            "model",
            "under way",
            "answers/s",
            "of engine",
            "p50 ms",
            "p99 ms",
            "engine CPU ms",
            "server CPU ms",
            "client CPU ms",
        ),
        rows,
        (_NOTE,),
    )


def _hold(part: Part, model: str, precision: str, found: _Rounds) -> None:
    least = {(RESNET, "float32"): 0.9, (RESNET, "bfloat16"): 0.8, (MOBILENET, "float32"): 0.7}.get((model, precision))
    name = f"{model} {precision}"
    if least is None:
        return
    part.at_least(f"{name}: 32 under way / the engine's own rate", least, found.of_engine(32))
    if precision == "float32":
        late = statistics.median(
            1e3 * (one.latency(50) - forward) for one, forward in zip(found.stretches[1], found.plain, strict=True)
        )
        part.at_most(f"{name}: p50 with 1 under way - plain forward of one image", 6.0, late, " ms")
    if model == RESNET:
        pays = statistics.median(a / b for a, b in zip(found.rates(32), found.rates(1), strict=True))
        part.at_least(f"{name}: throughput of 32 under way / of 1", 1.3 if precision == "float32" else 1.8, pays)


@contextmanager
def watched(server: Process, every: float = 0.2) -> Iterator[list[float]]:
    """Note the server's memory in MiB every so often inside the block."""
    seen, done = [server.memory()], threading.Event()

    def watch() -> None:
        while not done.wait(every):
            seen.append(server.memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()


def _below(name: str, server: Process, seconds: float, say: Say) -> Iterator[tuple[str, ...]]:
    """Load the server below its capacity, which is measured before each."""
    for place, share in enumerate(BELOW):
        rate = share * _capacity(server, seconds)
        stretch = load.opened(server.address, rate, seconds, seed=place)
        row = _open_row(name, share, [rate], [stretch], [stretch.good(0.0)])
        say(f"served: {', '.join(row)}")
        yield row


def _beyond(part: Part, name: str, server: Process, scale: Scale, say: Say) -> tuple[str, ...]:
    """Load the server beyond its capacity, which is measured before, in turn."""
    capacities, stretches, good = list[float](), list[Stretch](), list[float]()
    with watched(server) as memory:
        for seed in range(scale.rounds):
            capacities.append(_capacity(server, scale.overload))
            # The queue is filled at once, so that all of the stretch shows what becomes of it.
            stretch = load.opened(server.address, BEYOND * capacities[-1], scale.overload, burst=QUEUE, seed=seed)
            stretches.append(stretch)
            good.append(stretch.good(min(scale.overload / 4, QUEUE / capacities[-1])))
            say(f"served: {name}, {BEYOND:.0%} of {capacities[-1]:.1f}/s: {good[-1]:.1f}/s")
    _hold_overload(part, f"{name}, {BEYOND:.0%}", stretches, capacities, good)
    third = max(1, len(memory) // 3)
    grown = statistics.median(memory[-third:]) / statistics.median(memory[:third])
    part.at_most(f"{name}, {BEYOND:.0%}: memory in the last third / in the first", 1.05, grown)
    return _open_row(name, BEYOND, [BEYOND * one for one in capacities], stretches, good)


def _capacity(server: Process, seconds: float) -> float:
    return load.closed(server.address, CLOSED[-1], max(seconds, 0.2)).rate(CLOSED[-1])


def _open_row(
    name: str, share: float, rates: list[float], stretches: list[Stretch], good: list[float]
) -> tuple[str, ...]:
    refused = _median_latency(stretches, 99, ok=False)
    return (
        name,
        f"{share:.0%}",
        f"{statistics.median(rates):.1f}",
        f"{statistics.median(good):.1f}",
        f"{1e3 * _median_latency(stretches, 50):.0f}",
        f"{1e3 * _median_latency(stretches, 99):.0f}",
        f"{statistics.median(one.shed for one in stretches):.1%}",
        "–" if np.isnan(refused) else f"{1e3 * refused:.0f}",
    )


def _median_latency(stretches: list[Stretch], share: float, *, ok: bool = True) -> float:
    return statistics.median(one.latency(share, ok=ok) for one in stretches)


def _open_table(rows: list[tuple[str, ...]], scale: Scale) -> Table:
    return Table(
        "Open loop: requests come at random (Poisson), at a share of what a closed loop of 32 showed before",
        ("model", "load", "sent/s", "explained/s", "p50 ms", "p99 ms", "refused", "refusals' p99 ms"),
        rows,
        (_QUEUED.format(scale=scale),),
    )


def _hold_overload(part: Part, name: str, stretches: list[Stretch], capacities: list[float], good: list[float]) -> None:
    codes = {one.code for stretch in stretches for one in stretch.answers if not one.ok}
    kept = statistics.median(a / b for a, b in zip(good, capacities, strict=True))
    late = statistics.median(
        one.latency(99) / (QUEUE / max(rate, 1e-9)) for one, rate in zip(stretches, good, strict=True)
    )
    part.at_least(f"{name}: explained / capacity", 0.95, kept)
    part.at_most(f"{name}: p99 of accepted / (queue limit / rate)", 1.0, late)
    if codes:
        part.at_most(f"{name}: p99 of a refusal", 0.1, _median_latency(stretches, 99, ok=False), " s")
    right = codes <= {grpc.StatusCode.RESOURCE_EXHAUSTED}
    words = ", ".join(sorted(code.name for code in codes)) or "none was refused"
    part.bars.append(Bar(f"{name}: the status of what is refused", "RESOURCE_EXHAUSTED", words, met=right))


def checked(address: str) -> None:
    """See that what is counted are overlays.

    Raises:
        RuntimeError: they are not.
    """
    sample = load.replies(asyncio.run(_one_each(address)))
    if not all(one.explanations[0].overlay.data.startswith(b"\xff\xd8") for one in sample):
        raise RuntimeError("the server's replies have no JPEG overlays")


async def _one_each(address: str) -> list[bytes]:
    async with load.caller(address) as ask:
        return [await ask() for _ in requests()]
