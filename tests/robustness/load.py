"""Load generator: many concurrent callers that send serialized requests and count the status codes."""

import asyncio
import contextlib
import io
import itertools
import random
import time
from dataclasses import dataclass

import grpc
import numpy as np
from PIL import Image

from camserve.v1 import explain_pb2

EXPLAIN, STREAM = "/camserve.v1.ExplainService/Explain", "/camserve.v1.ExplainService/ExplainStream"
OVERLAY = explain_pb2.Rendering(overlay=explain_pb2.IMAGE_FORMAT_JPEG)
OK, CANCELLED = grpc.StatusCode.OK, grpc.StatusCode.CANCELLED
POISONED = (grpc.StatusCode.INTERNAL, grpc.StatusCode.FAILED_PRECONDITION)
CHANNELS = 4
BATCH_SPREAD = 0.02  # seconds within which the answers of one batch arrive


@dataclass(frozen=True)
class Item:
    """A request and how to send it.

    Attributes:
        packed: the serialized message.
        right: the status codes that are correct besides OK and RESOURCE_EXHAUSTED.
        timeout: the deadline in seconds, or None.
        given_up: seconds after which the call is cancelled, or None.
    """

    packed: bytes
    right: tuple[grpc.StatusCode, ...] = ()
    timeout: float | None = None
    given_up: float | None = None


@dataclass(frozen=True)
class Answer:
    """The start and end of a call, and its status code."""

    began: float
    ended: float
    code: grpc.StatusCode
    right: bool

    @property
    def took(self):
        return self.ended - self.began


def photo(number, size=(160, 120)):
    """Return a JPEG of a few kilobytes, a different one for each number."""
    grid = np.random.default_rng(number).integers(0, 255, (6, 8, 3), np.uint8)
    packed = io.BytesIO()
    Image.fromarray(grid).resize(size, Image.Resampling.BICUBIC).save(packed, "JPEG")
    return packed.getvalue()


def request(image, *methods, model="", **fields):
    calls = [
        explain_pb2.Method(
            name=name, parameters={key: explain_pb2.Parameter(number=value) for key, value in parameters.items()}
        )
        for name, parameters in methods
    ]
    return explain_pb2.ExplainRequest(image=image, methods=calls, model=model, rendering=OVERLAY, **fields)


def plain(model="", count=12):
    """Return Grad-CAM requests for several photos, of one row each."""
    return [Item(request(photo(number), model=model).SerializeToString()) for number in range(count)]


CHEAP = (("gradcam", {}), ("layercam", {}), ("hirescam", {}), ("eigencam", {}), ("saliency", {}))
DEAR = (
    ("smoothgrad", {"samples": 12}),
    ("integrated_gradients", {"steps": 12}),
    ("rise", {"samples": 40}),
    ("guided_backprop", {}),
    ("gradcam_plus_plus", {}),
)


def random_requests(chance, model="", poisons=()):
    """Yield endless random requests: many methods, invalid requests, short deadlines, cancelled calls."""
    codes, photos = grpc.StatusCode, [photo(number) for number in range(12)]

    def packed(*methods, image=None, **fields):
        return request(image or chance.choice(photos), *methods, model=model, **fields).SerializeToString()

    kinds = (
        (50, lambda: Item(packed(chance.choice(CHEAP)))),
        (15, lambda: Item(packed(chance.choice(DEAR), chance.choice(CHEAP)))),
        (5, lambda: Item(packed(("gradcam", {}), top_k=3))),
        (5, lambda: Item(packed(image=b"rubbish"), (codes.INVALID_ARGUMENT,))),
        (5, lambda: Item(packed(layers=["nowhere"]), (codes.NOT_FOUND,))),
        (5, lambda: Item(b"\xff\xff rubbish", (codes.INVALID_ARGUMENT,))),
        (5, lambda: Item(packed(DEAR[0]), (codes.DEADLINE_EXCEEDED,), timeout=chance.uniform(1e-3, 0.1))),
        (5, lambda: Item(packed(DEAR[2]), (CANCELLED,), given_up=chance.uniform(0, 0.2))),
        (5, lambda: Item(chance.choice(poisons), POISONED) if poisons else Item(packed())),
    )
    while True:
        yield chance.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]()


class Callers:
    """Callers that share a few connections.

    Args:
        address: the server's address.
    """

    def __init__(self, address):
        self.answers = []
        self._address = address

    async def __aenter__(self):
        self._stack = contextlib.AsyncExitStack()
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
        channels = [
            await self._stack.enter_async_context(grpc.aio.insecure_channel(self._address, options))
            for _ in range(CHANNELS)
        ]
        self._explain = itertools.cycle([channel.unary_unary(EXPLAIN) for channel in channels])
        self._stream = channels[0].stream_stream(STREAM)
        return self

    async def __aexit__(self, *_):
        await self._stack.aclose()

    async def send(self, item):
        """Send a request; return the seconds to wait before the next one."""
        began = time.perf_counter()
        call = next(self._explain)(item.packed, timeout=item.timeout)
        code, pause = OK, 0.0
        try:
            if item.given_up is None:
                await call
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(item.given_up):
                        await call
                code = await call.code()
        except grpc.aio.AioRpcError as error:
            code = error.code()
            pause = int(dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms", 0)) / 1e3
        right = code in {OK, grpc.StatusCode.RESOURCE_EXHAUSTED, *item.right}
        self.answers.append(Answer(began, time.perf_counter(), code, right))
        return pause

    async def closed(self, callers, seconds, requests, enough=lambda _answers: True):
        """Let `callers` callers send one request after the other; refused ones wait for about the server's retry delay.

        They end after `seconds`, and not before `enough` is true of the answers.

        They start one by one and wait for random times, so that they do not move in step.
        """
        until, chance = time.perf_counter() + seconds, random.Random(callers)

        async def caller():
            await asyncio.sleep(chance.uniform(0, min(0.5, seconds / 8)))
            while True:  # at least one request, even on a busy machine
                pause = chance.uniform(0.8, 1.2) * await self.send(next(requests))
                await asyncio.sleep(min(pause, max(0.0, until - time.perf_counter())))
                if time.perf_counter() >= until and enough(self.answers):
                    return

        await asyncio.gather(*(caller() for _ in range(callers)))

    async def stream(self, seconds, packed):
        """Open one stream after the other, and cancel each before its end."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            call = self._stream()
            for _ in range(8):
                await call.write(packed)
            for _ in range(5):
                assert (await call.read()) is not grpc.aio.EOF
            call.cancel()


def run(address, callers, seconds, requests=None, **options):
    """Run `callers` callers for `seconds`; return their answers and the processor time that they used."""

    async def work():
        async with Callers(address) as all_callers:
            await all_callers.closed(callers, seconds, requests or itertools.cycle(plain()), **options)
            return all_callers.answers

    began = time.process_time()
    return asyncio.run(work()), time.process_time() - began


def rate(answers, since, until):
    """Return the explanations a second between the end of the first batch and of the last one in a time span.

    It is 0 if fewer than two ended in it.
    """
    ended = sorted(answer.ended for answer in answers if answer.code is OK and since < answer.ended <= until)
    if len(ended) < 2 or ended[0] == ended[-1]:
        return 0.0
    first = sum(at < ended[0] + BATCH_SPREAD for at in ended)
    return (len(ended) - first) / (ended[-1] - ended[0])


def seeded_requests(seed, **options):
    return random_requests(random.Random(seed), **options)
