"""Picture of principal components: the first three as red, green and blue, over the photo."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from camserve_server.core.arrays import Map, Pixels
from camserve_server.imaging.interpolation import interpolate
from camserve_server.imaging.opencv import cv2
from camserve_server.imaging.tiles import encode
from camserve_server.imaging.values import Box, Picture

MAX_SIDE = 1024  # pixels of the longer side of a picture: a grid has far fewer cells
COLOURS = 3
_UNSEEN = 0.4  # brightness of the part of the photo that the model did not see


def reduce(photo: Pixels) -> Pixels:
    """Return a photo with a longer side of at most MAX_SIDE pixels."""
    height, width = photo.shape[:2]
    if (scale := MAX_SIDE / max(height, width)) >= 1:
        return photo
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return cv2.resize(photo, size, interpolation=cv2.INTER_AREA).astype(np.uint8, copy=False)


def draw(photo: Pixels, scores: Sequence[Map], ranges: Map, seen: Box, kind: Literal["jpeg", "png", "webp"]) -> Picture:
    """Draw the scores on up to three components in the photo's geometry.

    Each colour rises from the first to the second value of its component's range; a missing component is a colour
    without brightness. The values are interpolated between the centres of cells. Cells that are not finite are black.
    What the model did not see of the photo is dark grey.

    Args:
        photo: uint8 [height, width, 3].
        scores: scores on the components, float32 [h, w] each; those after the third are not drawn.
        ranges: for each component, the scores that are drawn darkest and brightest [k, 2].
        seen: the part of the photo that the scores cover, in its pixels.
        kind: encoding of the picture.
    """
    size = (photo.shape[0], photo.shape[1])
    grey = cv2.cvtColor(photo, cv2.COLOR_RGB2GRAY)
    canvas = np.repeat((grey * _UNSEEN).astype(np.uint8)[..., None], 3, axis=2)
    for colour in range(COLOURS):
        level = np.zeros_like(scores[0])
        if colour < len(scores):
            low, high = ranges[colour]
            level = np.nan_to_num((scores[colour] - low) / max(high - low, np.finfo(np.float32).tiny)).clip(0, 1)
            level[~np.isfinite(scores[colour])] = 0
        grid = interpolate(level.astype(np.float32), seen, size)
        for first, last in grid.bands():
            rows, columns = grid.place(first, last)
            canvas[rows, columns, 2 - colour] = np.rint(grid.values(first, last) * 255)  # OpenCV's order is BGR
    return encode(canvas, kind)
