"""Crops of real photos, and changed copies of the default model."""

from pathlib import Path

import cv2
import numpy as np
import skimage
import sklearn
from numpy.typing import NDArray
from torch import nn

from benchmarks.diff import changes
from benchmarks.diff.maps import Photos

SPEC = "efficientnet_lite0"
SIDE = 224

_SKIMAGE, _SKLEARN = Path(skimage.__file__).parent / "data", Path(sklearn.__file__).parent / "datasets" / "images"
_FILES = (
    *(_SKIMAGE / name for name in ("chelsea.png", "coffee.png", "astronaut.png", "rocket.jpg", "motorcycle_left.png")),
    *(_SKLEARN / name for name in ("china.jpg", "flower.jpg")),
)


def crops(count: int, seed: int = 0) -> Photos:
    """Return random square crops of the photos, half of them mirrored, uint8 [224,224,3]."""
    rng = np.random.default_rng(seed)
    whole = [_read(path) for path in _FILES]
    return [_crop(whole[index % len(whole)], rng) for index in range(count)]


def _read(path: Path) -> NDArray[np.uint8]:
    photo = cv2.imread(str(path), cv2.IMREAD_COLOR_RGB)
    if photo is None:
        raise FileNotFoundError(path)
    return np.asarray(photo, np.uint8)


def _crop(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    side = int(min(image.shape[:2]) * rng.uniform(0.55, 1))
    top, left = (rng.integers(0, length - side + 1) for length in image.shape[:2])
    part = np.ascontiguousarray(image[top : top + side, left : left + side])
    small = np.asarray(cv2.resize(part, (SIDE, SIDE), interpolation=cv2.INTER_AREA), np.uint8)
    return np.ascontiguousarray(small[:, :: rng.choice((1, -1))])


def copies(network: nn.Module) -> dict[str, nn.Module]:
    """Return changed copies of the model's network by name."""
    return {
        "rounding errors": changes.rounded(network),
        "int8, a scale per channel": changes.quantised(network, per_channel=True),
        "int8, a scale per tensor": changes.quantised(network, per_channel=False),
        "last block random": changes.randomised(network, 1, "blocks.6"),
        "last convolution random": changes.randomised(network, 1, "conv_head"),
    }
