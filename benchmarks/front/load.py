"""Load generator in a process of its own, so that its interpreter does not slow down what it measures.

A line of JSON on its standard input (see `Burst`) starts a burst, an empty line ends it. It then prints a line with the
times of all answers. `Generator` is the other side of these pipes.
"""

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import grpc
import numpy as np

KINDS = ("overlay", "raw map", "224 pixels", "stream")
CHANNELS = 4  # each has a connection of its own
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
EXPLAIN, STREAM = "/camserve.v1.ExplainService/Explain", "/camserve.v1.ExplainService/ExplainStream"


@dataclass(frozen=True, slots=True)
class Burst:
    """A closed loop of requests.

    Attributes:
        address: address of the server.
        kind: one of KINDS.
        under_way: number of requests in flight.
        model: name of the model.
        channels: number of connections that share them.
    """

    address: str
    kind: str
    under_way: int
    model: str
    channels: int = CHANNELS


@dataclass(frozen=True, slots=True)
class Window:
    """Interval on the clock of `time.perf_counter`, which all processes of a machine share."""

    began: float
    until: float

    @property
    def seconds(self) -> float:
        """Length of the interval."""
        return self.until - self.began


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to a burst.

    Attributes:
        ended: time of each answer on the clock of `time.perf_counter`.
        took: seconds from request to answer.
        cpu: seconds of processor time that the load generator used.
        size: mean length of a reply in bytes.
    """

    ended: Sequence[float]
    took: Sequence[float]
    cpu: float
    size: float

    def within(self, window: Window) -> int:
        """Return the number of answers in an interval."""
        return sum(window.began < end <= window.until for end in self.ended)

    def latency(self, share: float, window: Window) -> float:
        """Return a percentile of the latency of the answers in an interval, in seconds."""
        both = zip(self.ended, self.took, strict=True)
        return float(np.percentile([took for end, took in both if window.began < end <= window.until], share))


class Generator:
    """A running load generator."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    @contextlib.contextmanager
    def burst(self, burst: Burst) -> Iterator[list[Answers]]:
        """Send requests inside the block; its answers are in the list after the block."""
        answers = list[Answers]()
        self._write(json.dumps(asdict(burst)))
        try:
            yield answers
        finally:
            self._write("")
            answers.append(Answers(**json.loads(self._read())))

    def _write(self, line: str) -> None:
        if self._process.stdin is None:
            raise ValueError("the load generator has no pipes")
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        if self._process.stdout is None:
            raise ValueError("the load generator has no pipes")
        if not (line := self._process.stdout.readline()):
            raise ChildProcessError("the load generator ended: its error is above")
        return line


@contextlib.contextmanager
def generator() -> Iterator[Generator]:
    """Run a load generator inside the block."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "benchmarks.front.load"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:  # noqa: S603 -- our own program
        try:
            yield Generator(process)
        finally:
            process.kill()


Send = Callable[[], Awaitable[bytes]]


async def _run(burst: Burst, stop: asyncio.Event) -> Answers:
    cpu, ended, took, size = time.process_time(), list[float](), list[float](), 0
    async with _callers(burst) as callers:

        async def work(ask: Send) -> None:
            nonlocal size
            while not stop.is_set():
                began = time.perf_counter()
                reply = await ask()
                ended.append(time.perf_counter())
                size += len(reply)
                took.append(ended[-1] - began)

        async with asyncio.TaskGroup() as group:
            for _, ask in zip(range(burst.under_way), itertools.cycle(callers), strict=False):
                group.create_task(work(ask))
    return Answers(ended, took, time.process_time() - cpu, size / len(ended))


@contextlib.asynccontextmanager
async def _callers(burst: Burst) -> AsyncIterator[list[Send]]:
    """Connect, and yield for each connection a function that sends the next request and returns its reply."""
    packed = itertools.cycle(_requests(burst.kind, burst.model))
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(burst.address, options=OPTIONS))
            for _ in range(1 if burst.kind == "stream" else burst.channels)
        ]
        if burst.kind == "stream":
            stream = await stack.enter_async_context(_streaming(channels[0]))
            yield [lambda: stream.ask(next(packed))]
        else:
            yield [_sender(channel.unary_unary(EXPLAIN), packed) for channel in channels]


def _sender(call: "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]", packed: Iterator[bytes]) -> Send:
    return lambda: call(next(packed), timeout=60)


@contextlib.asynccontextmanager
async def _streaming(channel: grpc.aio.Channel) -> "AsyncIterator[_Stream]":
    call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(STREAM)()
    stream = _Stream(call)
    reading = asyncio.create_task(stream.read())
    yield stream
    await call.done_writing()
    await reading


class _Stream:
    """Requests of one stream, and the replies that they wait for."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        self._call = call
        self._waiting = dict[bytes, asyncio.Future[bytes]]()
        self._numbers = itertools.count()
        self._writing = asyncio.Lock()  # gRPC writes one message of a call at a time

    async def ask(self, packed: bytes) -> bytes:
        """Send a packed ExplainStreamRequest that has no id, and return the reply."""
        name = b"%08d" % next(self._numbers)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[name] = reply
        async with self._writing:  # two messages end to end are one with the fields of both
            await self._call.write(b"\x0a\x08" + name + packed)
        return await reply

    async def read(self) -> None:
        """Read replies until the stream ends; its first field is the id, its second the explanation, else an error."""
        async for reply in self._call:
            if reply[:2] != b"\x0a\x08" or reply[10:11] != b"\x12":
                raise ValueError(f"no explanation: {reply[:200]!r}")
            self._waiting.pop(reply[2:10]).set_result(reply)


def _requests(kind: str, model: str) -> list[bytes]:
    """Return a packed request for each photo."""
    from benchmarks import photos  # noqa: PLC0415 -- it imports OpenCV
    from camserve.v1 import explain_pb2  # noqa: PLC0415

    jpeg = explain_pb2.IMAGE_FORMAT_JPEG
    rendering = {
        "raw map": explain_pb2.Rendering(heatmap=True),
        "224 pixels": explain_pb2.Rendering(overlay=jpeg, max_side=224),
    }.get(kind, explain_pb2.Rendering(overlay=jpeg))
    wanted = [explain_pb2.ExplainRequest(model=model, image=photo, rendering=rendering) for photo in photos.photos()]
    if kind == "stream":
        return [explain_pb2.ExplainStreamRequest(request=one).SerializeToString() for one in wanted]
    return [one.SerializeToString() for one in wanted]


async def _serve() -> None:
    """Run the bursts that are asked for, one after another."""
    loop = asyncio.get_running_loop()
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        stop = asyncio.Event()
        running = asyncio.create_task(_run(Burst(**json.loads(line)), stop))
        ending = loop.run_in_executor(None, sys.stdin.readline)
        await asyncio.wait([running, asyncio.ensure_future(ending)], return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        print(json.dumps(asdict(await running)), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve())
