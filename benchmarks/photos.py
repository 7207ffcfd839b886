"""Real photos, as JPEG files of 500 by 375, and the requests that are made of them."""

import functools
from pathlib import Path

import cv2
import numpy as np
import skimage
import sklearn

from camserve.v1 import explain_pb2

SIZE = (500, 375)  # width, height
QUALITY = 90

_SKIMAGE, _SKLEARN = Path(skimage.__file__).parent / "data", Path(sklearn.__file__).parent / "datasets" / "images"
_FILES = (
    *(_SKIMAGE / name for name in ("chelsea.png", "coffee.png", "astronaut.png", "rocket.jpg")),
    *(_SKLEARN / name for name in ("china.jpg", "flower.jpg")),
)


@functools.cache
def photos() -> tuple[bytes, ...]:
    """Return the photos as JPEG files."""
    return tuple(_jpeg(path) for path in _FILES)


def _jpeg(path: Path) -> bytes:
    photo = cv2.imread(str(path), cv2.IMREAD_COLOR)
    if photo is None:
        raise FileNotFoundError(path)
    height, width = photo.shape[:2]
    tall, wide = min(height, width * SIZE[1] // SIZE[0]), min(width, height * SIZE[0] // SIZE[1])
    top, left = (height - tall) // 2, (width - wide) // 2
    small = cv2.resize(photo[top : top + tall, left : left + wide], SIZE, interpolation=cv2.INTER_AREA)
    _, packed = cv2.imencode(".jpg", small, (cv2.IMWRITE_JPEG_QUALITY, QUALITY))
    return np.asarray(packed).tobytes()


def requests(model: str = "") -> list[explain_pb2.ExplainRequest]:
    """Ask for Grad-CAM of the top class of each photo, as a JPEG overlay in the photo's size."""
    wanted = explain_pb2.Rendering(overlay=explain_pb2.IMAGE_FORMAT_JPEG)
    return [explain_pb2.ExplainRequest(model=model, image=photo, rendering=wanted) for photo in photos()]
