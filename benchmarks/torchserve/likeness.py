"""Compare the overlays that two servers drew on the photos."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from benchmarks.photos import SIZE
from benchmarks.torchserve.load import Side

FAR = 3.0  # in levels of 255: JPEG's own noise, another interpolation and bfloat16 stay well below


def differences(sides: Sequence[Side]) -> Mapping[str, float]:
    """Ask every side about every photo; return how far the pictures are from the first side's.

    Returns:
        For each side, the mean difference in levels of 255, of the photo where it is greatest.

    Raises:
        ValueError: a picture does not have the photo's size, or shows something else.
    """
    first, *others = ([_picture(side, request) for request in side.requests] for side in sides if side.picture)
    names = [side.name for side in sides if side.picture][1:]
    found = {
        name: max(float(np.abs(a - b).mean()) for a, b in zip(first, other, strict=True))
        for name, other in zip(names, others, strict=True)
    }
    if far := {name: f"{levels:.1f}" for name, levels in found.items() if levels > FAR}:
        raise ValueError(f"the pictures are not those of {sides[0].name}, by levels of 255: {far}")
    return found


def _picture(side: Side, request: bytes) -> np.ndarray:
    if side.picture is None:
        raise ValueError(f"{side.name} draws no picture")
    image = Image.open(io.BytesIO(side.picture(side.ask(request))))
    if image.size != SIZE or image.format != "JPEG":
        raise ValueError(f"{side.name} answered a {image.format} of {image.size}")
    return np.asarray(image, np.float32)
