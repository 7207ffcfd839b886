"""The least that a request's pictures cost: the same libraries on the same photos, in one thread, without a server."""

import hashlib
import time
from collections.abc import Callable
from typing import cast

import cv2
import numpy as np
import torch

from benchmarks.photos import photos
from camserve_server.core.arrays import Pixels
from camserve_server.imaging.fitting import fit
from camserve_server.imaging.values import Box
from camserve_server.models.source import DEFAULT_PREPROCESS

QUALITY = (cv2.IMWRITE_JPEG_QUALITY, 90)  # the server's default
GRID = np.linspace(0, 1, 49, dtype=np.float32).reshape(7, 7)


def picture_work(kind: str) -> Callable[[bytes], object]:
    """Return the function that does a request's work on its photo, by the kind of the request."""
    sides = {"raw map": None, "224 pixels": 224}
    side = sides.get(kind, 0)

    def work(photo: bytes) -> object:
        pixels = cast("Pixels", cv2.imdecode(np.frombuffer(photo, np.uint8), cv2.IMREAD_COLOR_RGB))
        image, seen = fit(pixels, DEFAULT_PREPROCESS)
        digests = hashlib.sha256(photo).hexdigest(), hashlib.sha256(image.tobytes()).hexdigest()
        return digests if side is None else (digests, overlay(pixels, seen, side))

    return work


def overlay(pixels: Pixels, seen: Box, side: int = 0) -> bytes:
    """Draw a map of 7 x 7 on the part of a photo that the model saw, and encode it; `side` 0 keeps the photo's size."""
    height, width = pixels.shape[:2]
    scale = min(1.0, side / max(height, width)) if side else 1.0
    if scale < 1:
        size = round(width * scale), round(height * scale)
        pixels = cast("Pixels", cv2.resize(pixels, size, interpolation=cv2.INTER_AREA))
    picture = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
    left, top, right, bottom = (max(0, round(edge * scale)) for edge in (seen.left, seen.top, seen.right, seen.bottom))
    part = picture[top:bottom, left:right]
    map_ = cv2.resize(GRID, (part.shape[1], part.shape[0]), interpolation=cv2.INTER_LINEAR)
    coloured = cv2.applyColorMap(cv2.convertScaleAbs(map_, alpha=255), cv2.COLORMAP_JET)
    cv2.addWeighted(part, 0.5, coloured, 0.5, 0, dst=part)
    return np.asarray(cv2.imencode(".jpg", picture, QUALITY)[1]).tobytes()


def processor_time(kind: str, seconds: float) -> float:
    """Return the seconds of processor time that this thread takes for the picture work of one request."""
    work, threads = picture_work(kind), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for photo in photos():
            work(photo)
        began, until, count = time.thread_time(), time.perf_counter() + seconds, 0
        while not count or time.perf_counter() < until:
            for photo in photos():
                work(photo)
            count += len(photos())
        return (time.thread_time() - began) / count
    finally:
        torch.set_num_threads(threads)
