"""Latency of one caller beside a greedy caller and beside floods, and the time that a refusal takes.

Quiet and busy stretches alternate, so that a noisy machine affects both equally. No result has a limit.

    python -m benchmarks.neighbours HOST:PORT TOKEN

runs the greedy caller: 200 requests under way, until its standard input ends.
"""

import asyncio
import contextlib
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
from PIL import Image

from benchmarks.results import Part, Table
from benchmarks.scale import Scale
from benchmarks.serving import serving
from camserve.v1 import explain_pb2, explain_pb2_grpc
from camserve_server.api import tokens

HERE = Path(__file__).parents[1]
MODEL = "small=torchvision:mobilenet_v3_small?weights=none&size=64"
STRETCHES = 3
OUTSTANDING, CHANNELS = 200, 4
PAUSE = 0.02  # seconds after which a greedy caller retries a refused request
FLOODS = {"stuck": ("200",), "silent": ("400",), "reset": ("5000", "3600")}
FLOOD = (sys.executable, str(HERE / "tests" / "robustness" / "http2_flood.py"))

Call = Callable[[explain_pb2.ExplainRequest], float]


def photo() -> bytes:
    """Return a small picture of noise."""
    packed = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(packed, "PNG")
    return packed.getvalue()


def bomb() -> bytes:
    """Return a small PNG file of 400 megapixels."""
    packed = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(packed, "PNG")
    return packed.getvalue()


@contextlib.contextmanager
def caller(address: str, token: str = "") -> Iterator[Call]:
    """Connect inside the block; yield a call that returns how many milliseconds its answer or refusal took."""
    with grpc.insecure_channel(address) as channel:
        explain = explain_pb2_grpc.ExplainServiceStub(channel).Explain
        metadata = (("authorization", f"Bearer {token}"),) if token else ()

        def call(request: explain_pb2.ExplainRequest) -> float:
            began = time.perf_counter()
            with contextlib.suppress(grpc.RpcError):
                explain(request, metadata=metadata, timeout=60)
            return 1e3 * (time.perf_counter() - began)

        yield call


@contextlib.contextmanager
def run_in_background(*commands: tuple[str, ...]) -> Iterator[None]:
    """Run other processes inside the block, once each has printed its first line."""
    with contextlib.ExitStack() as stack:
        for command in commands:
            pipe = subprocess.PIPE
            process = stack.enter_context(subprocess.Popen(command, cwd=HERE, stdin=pipe, stdout=pipe))  # noqa: S603
            stack.callback(process.kill)
            if process.stdout is None or not process.stdout.readline():
                raise ChildProcessError(f"it did not begin: {command}")
        yield


async def greedy(address: str, token: str) -> None:
    """Send requests without end, many at a time."""
    metadata, request = (("authorization", f"Bearer {token}"),), explain_pb2.ExplainRequest(image=photo())

    async def ask(stub: "explain_pb2_grpc.ExplainServiceAsyncStub") -> None:
        while True:
            try:
                await stub.Explain(request, metadata=metadata)
            except grpc.RpcError:
                await asyncio.sleep(PAUSE)

    async with contextlib.AsyncExitStack() as stack:
        options = (("grpc.use_local_subchannel_pool", 1),)
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options)) for _ in range(CHANNELS)
        ]
        stubs = [explain_pb2_grpc.ExplainServiceStub(channel) for channel in channels]
        asking = [asyncio.create_task(ask(stubs[number % CHANNELS])) for number in range(OUTSTANDING)]
        print("begun", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in asking:
            task.cancel()


def compared(name: str, call: Call, scale: Scale, *commands: tuple[str, ...]) -> tuple[str, ...]:
    """Time requests with and without the other processes, in turn."""
    request = explain_pb2.ExplainRequest(image=photo())
    quiet: list[float] = []
    busy: list[float] = []
    for _ in range(STRETCHES):
        quiet += [call(request) for _ in range(scale.calls)]
        with run_in_background(*commands):
            busy += [call(request) for _ in range(scale.calls)]
    shares = [(float(np.percentile(quiet, share)), float(np.percentile(busy, share))) for share in (50, 99)]
    return name, *(text for one, other in shares for text in (f"{one:.1f}", f"{other:.1f}", f"{other / one:.2f}"))


def refusals(call: Call, scale: Scale) -> Iterator[tuple[str, ...]]:
    """Time refused requests."""
    for name, request in {
        "a number out of range": explain_pb2.ExplainRequest(image=photo(), top_k=10_000),
        "a list of 10,000 layers": explain_pb2.ExplainRequest(image=photo(), layers=["x"] * 10_000),
        "a PNG file of 400 megapixels": explain_pb2.ExplainRequest(image=bomb()),
    }.items():
        took = [call(request) for _ in range(scale.calls)]
        yield name, f"{np.median(took):.1f}", f"{np.percentile(took, 99):.1f}"


def measure(scale: Scale, *, say: Callable[[str], None] = print) -> Part:
    """Measure how other callers slow down one caller, and how long refusals take."""
    title = f"{MODEL}: Grad-CAM of one photo, {STRETCHES * scale.calls} requests each, beside"
    columns = ("", "p50 alone ms", "beside ms", "ratio", "p99 alone ms", "beside ms", "ratio")
    rows = [_beside_a_greedy_one(scale)]
    say(f"neighbours: {', '.join(rows[-1])}")
    with serving((MODEL,), "--threads", "1") as server, caller(server.address) as call:
        call(explain_pb2.ExplainRequest(image=photo()))
        floods = [(*FLOOD, server.address, kind, *how) for kind, how in FLOODS.items()]
        rows.append(compared("stuck calls, silent connections and resets", call, scale, *floods))
        say(f"neighbours: {', '.join(rows[-1])}")
        refused = list(refusals(call, scale))
    tables = [Table(title, columns, rows), Table("Refusals", ("", "p50 ms", "p99 ms"), refused)]
    return Part("neighbours", tables)


def _beside_a_greedy_one(scale: Scale) -> tuple[str, ...]:
    secrets = {name: tokens.new(name, ("explain",)) for name in ("modest", "greedy")}
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "tokens"
        listed.write_text("".join(f"{known.line()}\n" for _, known in secrets.values()))
        with (
            serving((MODEL,), "--threads", "1", "--tokens-file", str(listed)) as server,
            caller(server.address, secrets["modest"][0]) as call,
        ):
            call(explain_pb2.ExplainRequest(image=photo()))
            asks = (sys.executable, "-m", "benchmarks.neighbours", server.address, secrets["greedy"][0])
            return compared(f"a caller with {OUTSTANDING} requests under way", call, scale, asks)


if __name__ == "__main__":
    asyncio.run(greedy(*sys.argv[1:]))
