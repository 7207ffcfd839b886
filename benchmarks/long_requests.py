"""Measure how a long request delays short ones: Grad-CAM of single photos, alone and during a RISE of 4,096 masks.

Idle and busy stretches take turns, so that a noisy machine is noisy for both.
"""

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np

import camserve
from benchmarks.photos import photos
from benchmarks.results import Part, Table
from benchmarks.scale import Scale
from benchmarks.serving import serving

STRETCHES = 6
LONG = camserve.Method("rise", {"samples": 4096})
MODEL = "efficientnet_lite0"


@contextlib.contextmanager
def beside_a_long_one(address: str, image: bytes) -> Iterator[None]:
    """Keep a long request going inside the block, and give it up after."""
    with camserve.Client(address, timeout=600, retries=0) as client, concurrent.futures.ThreadPoolExecutor(1) as thread:
        going = thread.submit(client.explain, image, methods=LONG, overlay=None)
        time.sleep(1.5)  # until it is at its masks
        if going.done():
            going.result()
        yield
        if going.done():
            raise RuntimeError("the long request ended too soon to be measured against")
        client.close()
        with contextlib.suppress(camserve.Cancelled):
            going.result()


def latencies(client: camserve.Client, image: bytes, count: int) -> list[float]:
    """Time Grad-CAM for one photo after another, in milliseconds."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        client.explain(image, methods="gradcam")
        found.append(1e3 * (time.perf_counter() - began))
    return found


def measure(scale: Scale, *, say: Callable[[str], None] = print) -> Part:
    """Measure both percentiles, and their ratio."""
    if not scale.photos:
        say("long_requests: left to --full, for its percentiles want hundreds of requests")
    image = photos()[0]
    alone: list[float] = []
    busy: list[float] = []
    with serving((MODEL,)) as server, camserve.Client(server.address, timeout=60) as client:
        latencies(client, image, scale.photos)
        for _ in range(STRETCHES if scale.photos else 0):
            alone += latencies(client, image, scale.photos)
            with beside_a_long_one(server.address, image):
                busy += latencies(client, image, scale.photos)
    rows = []
    for share in (50, 99) if alone else ():
        idle, beside = np.percentile(alone, share), np.percentile(busy, share)
        rows.append((f"p{share}", f"{idle:.1f}", f"{beside:.1f}", f"{beside / idle:.2f}"))
        say(f"long_requests: {', '.join(rows[-1])}")
    title = f"{MODEL}: Grad-CAM of one photo, {STRETCHES * scale.photos} requests each"
    return Part("long_requests", [Table(title, ("", "alone ms", "beside RISE of 4,096 masks ms", "ratio"), rows)])
