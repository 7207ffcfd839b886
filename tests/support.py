"""Helpers that many tests share: a server in this process, photos, and functions that wait."""

import asyncio
import contextlib
import ctypes
import functools
import gc
import importlib.util
import io
import math
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image

import needs
from camserve_server import models
from camserve_server.api import grpc_server
from camserve_server.app import server
from camserve_server.core import config
from camserve_server.serving import pool_health
from camserve_server.serving.explain import Pipeline

GPU = pytest.param(
    "cuda:0",
    marks=(pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=needs.CUDA)),
)
"""Parameter for tests that also run on a GPU, if there is one."""


def folder_of(package):
    """Return the folder of a package, without importing it: scikit-learn takes seconds."""
    return Path(importlib.util.find_spec(package).origin).parent


SKIMAGE = folder_of("skimage") / "data"
SKLEARN = folder_of("sklearn") / "datasets" / "images"

PHOTOS = {
    "chelsea": SKIMAGE / "chelsea.png",
    "coffee": SKIMAGE / "coffee.png",
    "astronaut": SKIMAGE / "astronaut.png",
    "rocket": SKIMAGE / "rocket.jpg",
    "china": SKLEARN / "china.jpg",
    "flower": SKLEARN / "flower.jpg",
}

TINY = """
import torch
from torch import nn


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
"""
"""Source of a user's module with a model that loads at once."""


def wait_until(condition):
    """Return the first true result of a condition that has no event of its own.

    There is no deadline, so that a busy machine fails no test: pytest's timeout ends a test that waits for ever.
    """
    while not (result := condition()):
        time.sleep(0.005)
    return result


async def wait_in_loop_until(condition):
    """Do the same in a running event loop, independently of its clock."""
    while not (result := condition()):
        await asyncio.to_thread(time.sleep, 0.002)
    return result


def rows_waiting(served):
    """Return the number of rows in a server's queue that are not in a batch yet."""
    return served.do(lambda: served.pipeline.batcher.waiting)


class StoppedClock:
    """Clock of the running event loop that stops inside the block and moves only by `advance`."""

    def __enter__(self):
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time()
        self._loop.time = self._read
        return self

    def __exit__(self, *_):
        del self._loop.time  # restores the method of the class

    def _read(self):
        self._now += 1e-6  # readings of a real clock are never equal
        return self._now

    def advance(self, seconds):
        """Advance the clock by `seconds`; due timers run when the loop runs next."""
        self._now += seconds


@dataclass
class Served:
    """A server in a thread of this process: its address, its pipeline, its event loop, and its port of HTTP."""

    address: str
    pipeline: Pipeline
    loop: asyncio.AbstractEventLoop
    http_port: int = 0

    def do(self, function, *args):
        """Call a function on the server's event loop."""
        done = Future()
        self.loop.call_soon_threadsafe(lambda: done.set_result(function(*args)))
        return done.result(60)


@contextmanager
def serving(**settings):
    """Serve on a free port, in a thread."""
    started = Future()
    flags = {"address": "127.0.0.1:0", "isolation": "thread", **settings}
    chosen = config.load(flags=flags, environment={})

    async def main():
        stop, loop, http_ports = grpc_server.Stop(), asyncio.get_running_loop(), [0]

        def ready(port, pipeline):
            started.set_result((port, pipeline, loop, stop, http_ports[-1]))

        await server.serve(chosen, stop, ready, http_ready=http_ports.append)

    def run():
        try:
            asyncio.run(main())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    port, pipeline, loop, stop, http_port = started.result()  # no deadline: pytest's timeout ends a hang
    pipeline.batcher._capacity.seconds = 3600.0  # rows share a batch however long they take on a busy machine
    try:
        yield Served(f"127.0.0.1:{port}", pipeline, loop, http_port)
    finally:
        loop.call_soon_threadsafe(stop.requested.set)
        thread.join(60)


@contextmanager
def without_canaries():
    """Let servers of this process compute nothing while they are idle.

    A server that several tests share would otherwise run a batch of its own every ten seconds, and tests count the
    batches of all threads.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_health, "CANARY_INTERVAL", math.inf)
        yield


@functools.lru_cache(maxsize=8)  # tests that share a model are next to each other
def loaded(spec):
    """Return the model of a spec. Tests share it, so they must not change it."""
    return models.load(models.parse(spec))


def give_back_memory():
    """Return freed memory to the system, so that new allocations show in the process's size."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def jpeg(image, quality=92):
    packed = io.BytesIO()
    Image.fromarray(image).save(packed, "JPEG", quality=quality)
    return packed.getvalue()


def children(process_id):
    """Return the ids of a process's children."""
    result = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process ended meanwhile
            if int(status.read_text().rpartition(")")[2].split()[1]) == process_id:
                result.append(int(status.parent.name))
    return result


def alive(process_id):
    """Return True if a process runs, and is not a zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
