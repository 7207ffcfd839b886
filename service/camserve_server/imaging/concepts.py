"""Pictures of concepts: where each is in the model's input, in a colour of its own."""

import numpy as np

from camserve_server.core.arrays import Map, Pixels
from camserve_server.imaging.opencv import cv2

_GROUND = 0.55  # brightness of the input below the colours
_OPACITY = 0.75  # of a concept at its strongest
_GOLDEN = 0.618034  # of the circle of hues between two concepts: so any number of the first ones are far apart


def colours(count: int) -> Pixels:
    """Return a distinct colour for each concept, RGB, uint8 [count,3]."""
    hues = (0.02 + np.arange(count) * _GOLDEN) % 1 * 180  # OpenCV's hues end at 180
    hsv = np.stack((hues, np.full(count, 200), np.full(count, 255)), axis=1).astype(np.uint8)
    rgb: Pixels = cv2.cvtColor(hsv[None], cv2.COLOR_HSV2RGB)[0].astype(np.uint8, copy=False)
    return rgb


def paint(image: Pixels, maps: Map, palette: Pixels) -> Pixels:
    """Paint concepts on a grey copy of an image: each pixel in the colour of the one that is strongest there.

    Each concept is scaled to its own maximum, and interpolated between the centres of cells.

    Args:
        image: uint8 [H,W,3].
        maps: strength of each concept, not negative, float32 [k,h,w].
        palette: a colour for each concept, RGB, uint8 [k,3].
    """
    size = (image.shape[1], image.shape[0])
    best, colour = np.zeros(image.shape[:2], np.float32), np.zeros_like(image)
    for each, rgb in zip(maps, palette, strict=True):  # one at a time: 32 maps of a large input are 100 MB
        strength = cv2.resize(each / max(each.max(), np.finfo(np.float32).tiny), size, interpolation=cv2.INTER_LINEAR)
        stronger = strength > best
        best[stronger], colour[stronger] = strength[stronger], rgb
    ground = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None] * np.float32(_GROUND)
    opacity = _OPACITY * best.clip(0, 1)[..., None]
    painted: Pixels = np.rint(ground * (1 - opacity) + colour * opacity).astype(np.uint8)
    return painted
