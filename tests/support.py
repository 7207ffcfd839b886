"""What several tests need: a server whose insides are within reach, and photos to send it."""

import asyncio
import contextlib
import ctypes
import gc
import io
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import skimage
import sklearn
import torch
from PIL import Image

import needs
from camserve_server.api import grpc_server
from camserve_server.app import server
from camserve_server.core import config
from camserve_server.serving.explain import Pipeline

GPU = pytest.param(
    "cuda:0",
    marks=(pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=needs.CUDA)),
)
"""A device that a test is run on too, where there is one."""

SKIMAGE = Path(skimage.__file__).parent / "data"
SKLEARN = Path(sklearn.__file__).parent / "datasets" / "images"

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
"""A user's own module, with a model that is there at once."""


def wait_until(condition):
    """Return the first true result of a condition that has no event of its own.

    There is no deadline: pytest's timeout ends a test that waits in vain, so a busy machine fails no test.
    """
    while not (found := condition()):
        time.sleep(0.005)
    return found


async def wait_in_loop_until(condition):
    """Do the same in a running event loop, independently of its clock."""
    while not (found := condition()):
        await asyncio.to_thread(time.sleep, 0.002)
    return found


def rows_waiting(served):
    """Return the number of rows in a server's queue that are not in a batch yet."""
    return served.do(lambda: served.pipeline.batcher.waiting)


class StoppedClock:
    """The clock of the running event loop inside the block: it stands still until it is advanced."""

    def __enter__(self):
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time()
        self._loop.time = self._read
        return self

    def __exit__(self, *_):
        del self._loop.time  # the class's own is back

    def _read(self):
        self._now += 1e-6  # no two readings of a clock are the same
        return self._now

    def advance(self, seconds):
        """Let so many seconds pass at once; timers that are due run when the loop is next entered."""
        self._now += seconds


@dataclass
class Served:
    address: str
    pipeline: Pipeline
    loop: asyncio.AbstractEventLoop

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
        stop, loop = grpc_server.Stop(), asyncio.get_running_loop()
        await server.serve(chosen, stop, lambda port, pipeline: started.set_result((port, pipeline, loop, stop)))

    def run():
        try:
            asyncio.run(main())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    port, pipeline, loop, stop = started.result()  # however busy the machine is: pytest's timeout ends what hangs
    try:
        yield Served(f"127.0.0.1:{port}", pipeline, loop)
    finally:
        loop.call_soon_threadsafe(stop.requested.set)
        thread.join(60)


def give_back_memory():
    """Return to the system what earlier tests freed: in a heap that keeps it, new memory would not show."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def jpeg(image, quality=92):
    packed = io.BytesIO()
    Image.fromarray(image).save(packed, "JPEG", quality=quality)
    return packed.getvalue()


def children(process_id):
    """Return the ids of the processes that one has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if int(status.read_text().rpartition(")")[2].split()[1]) == process_id:
                found.append(int(status.parent.name))
    return found


def alive(process_id):
    """Return whether a process is there, and not only remembered."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
