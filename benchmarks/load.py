"""A client that costs little processor time: it sends prepared bytes again and again, and counts the answers.

A closed loop keeps a fixed number of requests in flight. An open loop sends by the clock, whatever is answered.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import grpc
import numpy as np

from benchmarks.photos import requests
from camserve.v1 import explain_pb2

BATCH = 8  # rows of a server on a CPU: so many answers come at once
CHANNELS = 4  # a connection carries 100 calls at once
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
_EXPLAIN, _STREAM = "/camserve.v1.ExplainService/Explain", "/camserve.v1.ExplainService/ExplainStream"

Send = Callable[[], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Answer:
    """When one request went out and was answered, on the clock of `time.perf_counter`, and how."""

    began: float
    ended: float
    code: grpc.StatusCode = grpc.StatusCode.OK

    @property
    def ok(self) -> bool:
        """True for an explanation, False for an error."""
        return self.code is grpc.StatusCode.OK

    @property
    def took(self) -> float:
        """Seconds."""
        return self.ended - self.began


@dataclass(slots=True)
class Stretch:
    """Answers to a stretch of load.

    Attributes:
        began: when its first request went out.
        until: when it stopped sending; what came later belongs to no full load.
        answers: in the order in which they came.
        sample: some replies, as bytes.
        client: seconds of processor time that the client used.
        server: the same of the server.
    """

    began: float = field(default_factory=time.perf_counter)
    until: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    sample: list[bytes] = field(default_factory=list)
    client: float = 0.0
    server: float = 0.0

    def add(self, began: float, reply: bytes, code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        """Note an answer."""
        self.answers.append(Answer(began, time.perf_counter(), code))
        if reply and len(self.answers) % 7 == 0:  # no multiple of the batches' size, so that every place is seen
            self.sample.append(reply)

    def rate(self, under_way: int) -> float:
        """Return the answers a second of a closed loop, from when its first answers were out until it stopped."""
        ends = [one.ended for one in self.answers if one.ok and one.ended <= self.until]
        if len(ends) <= under_way + BATCH:  # too short a stretch for more than a guess
            return self.count / (self.answers[-1].ended - self.began)
        return (len(ends) - under_way) / (ends[-1] - ends[under_way - 1])

    def good(self, warm: float) -> float:
        """Return the explanations a second after the warm-up, while requests were still sent."""
        since = self.began + warm
        return sum(one.ok and since < one.ended <= self.until for one in self.answers) / (self.until - since)

    def latency(self, share: float, *, ok: bool = True) -> float:
        """Return a percentile of what answers, or refusals, took, in seconds; NaN if there were none."""
        took = [one.took for one in self.answers if one.ok is ok]
        return float(np.percentile(took, share)) if took else float("nan")

    @property
    def count(self) -> int:
        """Number of explanations."""
        return sum(one.ok for one in self.answers)

    @property
    def shed(self) -> float:
        """The share that was refused."""
        return 1 - self.count / max(1, len(self.answers))


def closed(address: str, under_way: int, seconds: float) -> Stretch:
    """Keep a number of requests in flight for some seconds."""
    return _measured(_closed(address, under_way, seconds))


def opened(address: str, rate: float, seconds: float, *, burst: int = 0, seed: int = 0) -> Stretch:
    """Send requests as a Poisson process of a given rate after a burst, whether or not they are answered."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, int(2 * rate * seconds) + 10)
    times = [float(one) for one in np.cumsum(gaps) if one < seconds]
    return _measured(_opened(address, [0.0] * burst + times, seconds))


def streamed(address: str, under_way: int, seconds: float) -> Stretch:
    """Keep a number of requests of one stream in flight for some seconds."""
    return _measured(_streamed(address, under_way, seconds))


def _measured(work: Awaitable[Stretch]) -> Stretch:
    async def run() -> Stretch:
        return await work

    began = time.process_time()
    stretch = asyncio.run(run())
    stretch.client = time.process_time() - began
    return stretch


@contextlib.asynccontextmanager
async def caller(address: str) -> AsyncIterator[Send]:
    """Open some connections, and yield a function that sends the next request over the next of them."""
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=_OPTIONS))
            for _ in range(CHANNELS)
        ]
        multi: list[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = [one.unary_unary(_EXPLAIN) for one in channels]
        calls = itertools.cycle(multi)
        packed = itertools.cycle([one.SerializeToString() for one in requests()])
        yield lambda: next(calls)(next(packed), timeout=300)


async def _closed(address: str, under_way: int, seconds: float) -> Stretch:
    async with caller(address) as ask:
        stretch = Stretch()
        stretch.until = stretch.began + seconds

        async def work() -> None:
            while (began := time.perf_counter()) < stretch.until:
                stretch.add(began, await ask())

        async with asyncio.TaskGroup() as group:
            for _ in range(under_way):
                group.create_task(work())
        return stretch


async def _opened(address: str, times: Sequence[float], seconds: float) -> Stretch:
    async with caller(address) as ask:
        stretch = Stretch()
        stretch.until = stretch.began + seconds

        async def send(due: float) -> None:
            try:
                stretch.add(due, await ask())
            except grpc.aio.AioRpcError as error:
                stretch.add(due, b"", error.code())

        async with asyncio.TaskGroup() as group:
            for one in times:
                due = stretch.began + one
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(send(due))
        return stretch


async def _streamed(address: str, under_way: int, seconds: float) -> Stretch:
    packed = itertools.cycle([explain_pb2.ExplainStreamRequest(request=one).SerializeToString() for one in requests()])
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        multi: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(_STREAM)
        call = multi()
        stretch = Stretch()
        stretch.until = stretch.began + seconds
        going: dict[bytes, float] = {}
        for number in range(under_way):
            await _send(call, number, next(packed), going)
        number = under_way
        while going:
            reply = cast("bytes", await call.read())
            stretch.add(going.pop(_id_in(reply)), reply)
            if time.perf_counter() < stretch.until:
                await _send(call, number, next(packed), going)
                number += 1
        await call.done_writing()
        return stretch


async def _send(
    call: "grpc.aio.StreamStreamCall[bytes, bytes]", number: int, packed: bytes, going: dict[bytes, float]
) -> None:
    # Two messages end to end are one with the fields of both.
    name = b"%08d" % number
    going[name] = time.perf_counter()
    await call.write(b"\x0a\x08" + name + packed)


def _id_in(reply: bytes) -> bytes:
    """Return the request_id of a reply, which is its first field; its second is the explanation, or else an error."""
    if reply[:2] != b"\x0a\x08" or reply[10:11] != b"\x12":
        raise ValueError(f"no explanation: {reply[:200]!r}")
    return reply[2:10]


def replies(sample: Sequence[bytes]) -> list[explain_pb2.ExplainResponse]:
    """Read the replies of Explain that were kept."""
    return [explain_pb2.ExplainResponse.FromString(one) for one in sample]
