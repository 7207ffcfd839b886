"""What a long request costs those beside it: the 99th percentile of Grad-CAM, alone and beside a RISE of 4,096 masks.

Over gRPC on loopback, one client asking one photo after another. Idle and busy stretches take turns, so that a noisy
machine is noisy for both.
"""

import concurrent.futures
import contextlib
import io
import time
from collections.abc import Iterator

import numpy as np
from PIL import Image

import camserve
from camserve_server import running

STRETCHES, PHOTOS = 6, 60
LONG = camserve.Method("rise", {"samples": 4096})


def photo() -> bytes:
    """Make a photo of 500 by 375."""
    coarse = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC).save(out, "JPEG")
    return out.getvalue()


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


def latencies(client: camserve.Client, image: bytes) -> list[float]:
    """Time Grad-CAM for one photo after another, in milliseconds."""
    found = []
    for _ in range(PHOTOS):
        began = time.perf_counter()
        client.explain(image, methods="gradcam")
        found.append(1e3 * (time.perf_counter() - began))
    return found


def main() -> None:
    """Print both percentiles and their ratio."""
    image = photo()
    alone: list[float] = []
    busy: list[float] = []
    with running(models=["efficientnet_lite0"]) as address, camserve.Client(address, timeout=60) as client:
        latencies(client, image)
        for _ in range(STRETCHES):
            alone += latencies(client, image)
            with beside_a_long_one(address, image):
                busy += latencies(client, image)
    print(f"company: Grad-CAM of one photo over gRPC, efficientnet_lite0, {STRETCHES * PHOTOS} requests each")
    for share in (50, 99):
        idle, beside = np.percentile(alone, share), np.percentile(busy, share)
        print(f"p{share}: alone {idle:.1f} ms, beside RISE of 4,096 masks {beside:.1f} ms, ratio {beside / idle:.2f}")
