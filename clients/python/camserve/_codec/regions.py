"""Decode the regions of a map."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from camserve._core.errors import Internal
from camserve._values.picture import Box, Photo
from camserve._values.regions import MAX_LENGTH, MAX_REGIONS, Region, RunLengths, run_lengths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from camserve.v1 import explain_pb2

_MAX_CHARACTERS = 1 << 23  # of a mask; while it is read, each takes some 60 bytes


def decode_regions(messages: Sequence[explain_pb2.Region], photo: Photo) -> tuple[Region, ...]:
    """Decode the regions of a map.

    Raises:
        Internal: They are invalid, such as a mask that does not have the photo's size.
    """
    if len(messages) > MAX_REGIONS:
        raise Internal("the server sent more regions than a request can ask for")
    return tuple(_decode(message, photo) for message in messages)


def _decode(message: explain_pb2.Region, photo: Photo) -> Region:
    contour = np.array(message.contour, np.float32)
    box = (message.box.left, message.box.top, message.box.right, message.box.bottom)
    numbers = (*box, message.peak.x, message.peak.y, message.peak_value, message.share)
    if contour.size % 2 or not np.isfinite(contour).all() or not all(map(math.isfinite, numbers)):
        raise Internal("the server sent a region that has no valid place")
    if message.area > photo.width * photo.height:
        raise Internal("the server sent a region that is larger than the photo")
    contour.setflags(write=False)
    return Region(
        box=Box(*box),
        area=message.area,
        contour=contour.reshape(-1, 2),
        peak=(message.peak.x, message.peak.y),
        peak_value=message.peak_value,
        share=message.share,
        mask=_decode_mask(message.mask, photo) if message.HasField("mask") else None,
    )


def _decode_mask(message: explain_pb2.RunLengths, photo: Photo) -> RunLengths:
    pixels = photo.width * photo.height
    if len(message.counts) > min(MAX_LENGTH * (pixels + 1), _MAX_CHARACTERS):
        raise Internal(f"the server sent a mask of {len(message.counts):,} characters, more than a photo can need")
    runs = run_lengths(message.counts)
    has_photo_size = (message.height, message.width) == (photo.height, photo.width)
    # A sum of floats does not overflow, and is exact up to 2^53.
    if not has_photo_size or runs.min() < 0 or runs.max() > pixels or runs.sum(dtype=np.float64) != pixels:
        raise Internal(f"the server sent a mask that does not have {photo.height} × {photo.width} pixels")
    return RunLengths(size=[message.height, message.width], counts=message.counts)
