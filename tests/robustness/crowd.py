"""Many callers at once who ask again and again: requests packed before, answers counted and hardly looked at."""

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
TOGETHER = 0.02  # seconds within which the answers of one batch come


@dataclass(frozen=True)
class Asked:
    """A request, and how it is asked.

    Attributes:
        packed: the message.
        right: what it may be answered with, beside OK and RESOURCE_EXHAUSTED.
        timeout: seconds, or None.
        given_up: seconds after which it is taken back, at most, or None.
    """

    packed: bytes
    right: tuple[grpc.StatusCode, ...] = ()
    timeout: float | None = None
    given_up: float | None = None


@dataclass(frozen=True)
class Answer:
    """When a call began and ended, and how."""

    began: float
    ended: float
    code: grpc.StatusCode
    right: bool

    @property
    def took(self):
        return self.ended - self.began


def photo(number, size=(160, 120)):
    """A JPEG of a few kilobytes that differs from the others."""
    grid = np.random.default_rng(number).integers(0, 255, (6, 8, 3), np.uint8)
    packed = io.BytesIO()
    Image.fromarray(grid).resize(size, Image.Resampling.BICUBIC).save(packed, "JPEG")
    return packed.getvalue()


def request(image, *methods, model="", **fields):
    given = [
        explain_pb2.Method(name=name, parameters={key: explain_pb2.Parameter(number=to) for key, to in more.items()})
        for name, more in methods
    ]
    return explain_pb2.ExplainRequest(image=image, methods=given, model=model, rendering=OVERLAY, **fields)


def plain(model="", count=12):
    """Grad-CAM of several photos, each a row."""
    return [Asked(request(photo(number), model=model).SerializeToString()) for number in range(count)]


CHEAP = (("gradcam", {}), ("layercam", {}), ("hirescam", {}), ("eigencam", {}), ("saliency", {}))
DEAR = (
    ("smoothgrad", {"samples": 12}),
    ("integrated_gradients", {"steps": 12}),
    ("rise", {"samples": 40}),
    ("guided_backprop", {}),
    ("gradcam_plus_plus", {}),
)


def mixed(chance, model="", poisons=()):
    """Whatever callers send, for ever: all sorts of methods, mistakes, deadlines too short, calls taken back."""
    codes, photos = grpc.StatusCode, [photo(number) for number in range(12)]

    def packed(*methods, image=None, **fields):
        return request(image or chance.choice(photos), *methods, model=model, **fields).SerializeToString()

    kinds = (
        (50, lambda: Asked(packed(chance.choice(CHEAP)))),
        (15, lambda: Asked(packed(chance.choice(DEAR), chance.choice(CHEAP)))),
        (5, lambda: Asked(packed(("gradcam", {}), top_k=3))),
        (5, lambda: Asked(packed(image=b"rubbish"), (codes.INVALID_ARGUMENT,))),
        (5, lambda: Asked(packed(layers=["nowhere"]), (codes.NOT_FOUND,))),
        (5, lambda: Asked(b"\xff\xff rubbish", (codes.INVALID_ARGUMENT,))),
        (5, lambda: Asked(packed(DEAR[0]), (codes.DEADLINE_EXCEEDED,), timeout=chance.uniform(1e-3, 0.1))),
        (5, lambda: Asked(packed(DEAR[2]), (CANCELLED,), given_up=chance.uniform(0, 0.2))),
        (5, lambda: Asked(chance.choice(poisons), POISONED) if poisons else Asked(packed())),
    )
    while True:
        yield chance.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]()


class Crowd:
    """Callers over a few connections.

    Args:
        address: of the server.
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

    async def ask(self, asked):
        """Ask once; return the answer, and how long to wait before the next."""
        began = time.perf_counter()
        call = next(self._explain)(asked.packed, timeout=asked.timeout)
        code, pause = OK, 0.0
        try:
            if asked.given_up is None:
                await call
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(asked.given_up):
                        await call
                code = await call.code()
        except grpc.aio.AioRpcError as error:
            code = error.code()
            pause = int(dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms", 0)) / 1e3
        right = code in {OK, grpc.StatusCode.RESOURCE_EXHAUSTED, *asked.right}
        self.answers.append(Answer(began, time.perf_counter(), code, right))
        return pause

    async def closed(self, callers, seconds, questions):
        """Let so many callers ask one question after the other; who is refused waits about as long as it is told.

        They come one by one, and no two of them wait equally long: a crowd that moves as one is another thing.
        """
        until, chance = time.perf_counter() + seconds, random.Random(callers)

        async def caller():
            await asyncio.sleep(chance.uniform(0, min(0.5, seconds / 8)))
            while True:  # at least once, however busy the machine is
                pause = chance.uniform(0.8, 1.2) * await self.ask(next(questions))
                await asyncio.sleep(min(pause, max(0.0, until - time.perf_counter())))
                if time.perf_counter() >= until:
                    return

        await asyncio.gather(*(caller() for _ in range(callers)))

    async def streamed(self, seconds, packed):
        """Ask over one stream after the other, each of which is left before its end."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            call = self._stream()
            for _ in range(8):
                await call.write(packed)
            for _ in range(5):
                assert (await call.read()) is not grpc.aio.EOF
            call.cancel()


def run(address, callers, seconds, questions=None):
    """Let so many callers ask for so long; return their answers, and the processor time that they used."""

    async def work():
        async with Crowd(address) as crowd:
            await crowd.closed(callers, seconds, questions or itertools.cycle(plain()))
            return crowd.answers

    began = time.process_time()
    return asyncio.run(work()), time.process_time() - began


def rate(answers, since, until):
    """Return the explanations a second in a stretch of time, from one batch that came to the last one."""
    ended = sorted(one.ended for one in answers if one.code is OK and since < one.ended <= until)
    first = sum(at < ended[0] + TOGETHER for at in ended)
    return (len(ended) - first) / (ended[-1] - ended[0])


def seeded(seed, **options):
    return mixed(random.Random(seed), **options)
