"""Measure where a request's time goes: the processor time of every stage, and how long the request waited for each."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from benchmarks import load
from benchmarks.engine import Ours
from benchmarks.load import BATCH
from benchmarks.photos import requests
from benchmarks.results import Part, Table
from benchmarks.scale import Scale
from benchmarks.served import CLOSED
from benchmarks.serving import Process, serving
from benchmarks.timing import repeated, timed
from camserve.v1 import explain_pb2

PROGRAM = ("-m", "benchmarks.stage_server")
MOST = 4.0  # ms of processor time that a request may cost outside of the model
REPEATS = 200

Books: TypeAlias = dict[str, Any]
StageRow: TypeAlias = tuple[str, str, float | None, float | None]
"""A thread, a stage, and its microseconds a request: of processor time, and of time."""


def measure(scale: Scale, *, say: Callable[[str], None] = print) -> Part:
    """Measure the first model in float32, with 32 requests under way, and with one."""
    part = Part("stages")
    model, precision = scale.served[0]
    spec = scale.spec(model, precision)
    ours = Ours.of(spec)
    with serving((spec,), program=PROGRAM) as server:
        for under_way, rows in ((CLOSED[-1], BATCH), (1, 1)):
            per_image = _alone(ours.batch(rows), scale.stretch) / rows
            found = [_stretch(server, under_way, scale.stretch) for _ in range(scale.rounds)]
            name = f"{model} {precision}, {under_way} under way"
            part.tables += [stage_table(name, found, per_image), _wait_table(name, found)]
            outside = _median([books["process"] / books["count"] - per_image for books in found])
            part.at_most(f"{name}: CPU outside of the model, by the difference", MOST, 1e3 * outside, " ms")
            part.at_most(f"{name}: CPU outside of the model, by stage", MOST, 1e3 * _by_stage(found), " ms")
            say(f"stages: {name}: {1e3 * outside:.2f} ms of CPU outside of the model")
    part.tables.append(_proto_table())
    return part


def _alone(engine: Callable[[], object], seconds: float) -> float:
    """Return the processor time of a batch when nothing else is done in its process."""
    engine()
    before = time.process_time()
    count, _ = repeated(engine, seconds)
    return (time.process_time() - before) / count


def asked(server: Process) -> Books:
    """Ask a server that was started as `PROGRAM` for its books."""
    pipes = server.pipes
    if pipes.stdin is None or pipes.stdout is None:
        raise ValueError("the server has no pipes")
    pipes.stdin.write("\n")
    pipes.stdin.flush()
    books: Books = json.loads(pipes.stdout.readline())
    return books


def _stretch(server: Process, under_way: int, seconds: float) -> Books:
    """Return what a stretch of load added to the books, with the number of requests and the replies' own timing."""
    load.closed(server.address, under_way, seconds / 4)
    before = asked(server)
    stretch = load.closed(server.address, under_way, seconds)
    books: Books = less(asked(server), before)
    # What the stretch was answered after it had stopped sending is in its count and in the books.
    return books | {"count": stretch.count, "timings": [one.timing for one in load.replies(stretch.sample)]}


def less(after: Any, before: Any) -> Any:
    """Return what was added to books."""
    if isinstance(after, dict):
        return {key: less(value, before.get(key, 0)) for key, value in after.items()}
    if isinstance(after, list) and not (after and isinstance(after[0], str)):
        return [less(a, b) for a, b in zip(after, before or [0] * len(after), strict=True)]
    return after if isinstance(after, list | str) else after - before


def _per_request(found: Sequence[Books], place: int, label: str) -> float:
    """Return microseconds a request of a stage: of time (place 1), or of processor time (place 2)."""
    return _median([1e6 * books["spent"].get(label, [0, 0, 0])[place] / books["count"] for books in found])


def _thread(found: Sequence[Books], kind: str) -> float:
    return _median([1e6 * books["threads"].get(kind, 0.0) / books["count"] for books in found])


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _by_stage(found: Sequence[Books]) -> float:
    """Return the seconds a request of every thread that is not the model's."""
    return sum(_thread(found, kind) for kind in ("loop", "image", "grpc", "handing")) / 1e6


def stage_table(name: str, found: Sequence[Books], per_image: float) -> Table:
    """Tell what every stage of a request took.

    Args:
        name: of the load.
        found: what stretches of it added to the books, each with the `count` of its requests.
        per_image: seconds of processor time that the engine alone takes for one.
    """
    lines = [*_around(found), *_within(found, per_image)]
    rows = [(thread, stage, _micro(used), _micro(took)) for thread, stage, used, took in lines]
    missing = found[0]["missing"]
    notes = (f"Not found, and so in the rest: {', '.join(missing)}.",) if missing else ()
    return Table(f"{name}: a request's stages", ("thread", "stage", "CPU µs", "time µs"), rows, notes)


def _around(found: Sequence[Books]) -> list[StageRow]:
    """Return what happens around the model."""
    cpu, wall = partial(_per_request, found, 2), partial(_per_request, found, 1)
    seen, drawn = cpu("decode") + cpu("fit") + cpu("receipt"), cpu("intensity") + cpu("draw")
    looped = found[0]["kinds"].get("respond") == "loop"  # or in a thread: wherever the reply is made
    looking = cpu("steps") - cpu("answer") - (0 if looped else cpu("respond"))
    handing = _thread(found, "image") - cpu("steps")
    rest = _thread(found, "loop") - cpu("read") - (cpu("respond") if looped else 0)
    return [
        ("image threads", "decode", cpu("decode"), wall("decode")),
        ("image threads", "fit to the model's input", cpu("fit"), wall("fit")),
        ("image threads", "receipt (SHA-256 of file and input)", cpu("receipt"), wall("receipt")),
        ("image threads", "rest of looking at the photo", looking - seen, None),
        ("image threads", "render: intensities", cpu("intensity"), wall("intensity")),
        ("image threads", "render: colour and blend", cpu("draw") - cpu("encode"), wall("draw") - wall("encode")),
        ("image threads", "encode", cpu("encode"), wall("encode")),
        ("image threads", "rest of drawing", cpu("answer") - drawn, None),
        ("event loop" if looped else "image threads", "make the reply", cpu("respond"), wall("respond")),
        ("image threads", "rest: handing over", handing, None),
        ("event loop", "check the request", cpu("read"), wall("read")),
        ("event loop", "rest: gRPC, protobuf, the batcher", rest, None),
        ("both processes", "to the engine's and back", _thread(found, "handing"), None),
        ("gRPC's own threads", "", _thread(found, "grpc"), None),
        ("garbage collector", "within the above", None, 1e6 * _collected(found)),
        ("outside of the model", "sum", 1e6 * _by_stage(found), None),
    ]


def _within(found: Sequence[Books], per_image: float) -> list[StageRow]:
    """Return what the model takes."""
    cpu, wall = partial(_per_request, found, 2), partial(_per_request, found, 1)
    model = _thread(found, "engine") + _thread(found, "torch")
    return [
        ("engine", "inputs: stack and normalise", cpu("inputs"), wall("inputs")),
        ("engine", "forward: trunk and head", cpu("forward"), wall("forward")),
        ("engine", "maps", cpu("maps"), wall("maps")),
        ("engine", "rest: backward through the head", cpu("engine") - _parts(cpu), wall("engine") - _parts(wall)),
        ("torch's workers", "", _thread(found, "torch"), None),
        ("model", "sum of engine and workers", model, wall("engine")),
        ("model", "the same batches alone", 1e6 * per_image, None),
    ]


def _parts(of: Callable[[str], float]) -> float:
    return of("inputs") + of("forward") + of("maps")


def _micro(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _collected(found: Sequence[Books]) -> float:
    return _median([books["collections"][1] / books["count"] for books in found])


def _wait_table(name: str, found: Sequence[Books]) -> Table:
    timings = [one for books in found for one in books["timings"]]
    if not timings:
        return Table(f"{name}: what requests waited for", (), [])
    names = [field.name for field in explain_pb2.Timing.DESCRIPTOR.fields if field.name.endswith("_ms")]
    rows = [
        (
            one.removesuffix("_ms"),
            *(f"{_share([getattr(timing, one) for timing in timings], share):.1f}" for share in (50, 99)),
        )
        for one in names
    ]
    sizes = [timing.batch_rows for timing in timings]
    batches = ", ".join(f"{size}: {sizes.count(size) / len(sizes):.0%}" for size in sorted(set(sizes)))
    return Table(
        f"{name}: what requests waited for, by their own account",
        ("stage", "p50 ms", "p99 ms"),
        rows,
        (f"Rows in a request's batch: {batches}.",),
    )


def _share(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, round(share / 100 * (len(values) - 1)))]


def _proto_table() -> Table:
    """Time what gRPC does on the event loop with the messages, apart: it is part of the loop's rest."""
    packed = [one.SerializeToString() for one in requests()]
    reply = explain_pb2.ExplainResponse(
        explanations=[explain_pb2.Explanation(overlay=explain_pb2.Picture(data=requests()[0].image))]
    )
    parse = timed(lambda: [explain_pb2.ExplainRequest.FromString(one) for one in packed * REPEATS])
    write = timed(lambda: [reply.SerializeToString() for _ in range(REPEATS)])
    size = sum(map(len, packed)) / len(packed) / 1024
    return Table(
        f"Protobuf, of {size:.0f} KiB",
        ("stage", "time µs"),
        [
            ("parse a request", f"{1e6 * parse / REPEATS / len(packed):.1f}"),
            ("serialise a reply", f"{1e6 * write / REPEATS:.1f}"),
        ],
    )
