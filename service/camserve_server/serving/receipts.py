"""Receipts: what is needed to compute an answer again, and to check that it is the same."""

import functools
import hashlib
import importlib.metadata
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from camserve_server.core.arrays import Input
from camserve_server.models.values import ModelInfo

_PARTS = ("camserve", "torch", "torchvision", "timm", "numpy", "opencv-python-headless")


@dataclass(frozen=True, slots=True)
class Receipt:
    """The model, the input and the software that an answer was computed with.

    Attributes:
        source: where the model comes from, as "timm:resnet50".
        weights: "default", "file" or "none".
        digest: SHA-256 of the model's parameters and buffers, hexadecimal.
        precision: that the model computed in.
        device: that it ran on.
        image_sha256: of the photo's file, hexadecimal.
        input_sha256: of the pixels that the model saw, uint8 [h,w,3], hexadecimal.
        versions: of the software, by package name.
    """

    source: str
    weights: str
    digest: str
    precision: str
    device: str
    image_sha256: str
    input_sha256: str
    versions: Mapping[str, str]


def receipt_of(model: ModelInfo, image: bytes, seen: Input) -> Receipt:
    """Return the receipt of a request.

    Args:
        model: that was explained.
        image: the photo's file.
        seen: what the model saw of it.
    """
    return Receipt(
        source=model.source,
        weights=model.weights,
        digest=model.digest,
        precision=model.precision,
        device=model.device,
        image_sha256=hashlib.sha256(image).hexdigest(),
        input_sha256=hashlib.sha256(seen.tobytes()).hexdigest(),
        versions=_versions(),
    )


@functools.cache
def _versions() -> Mapping[str, str]:
    """Return the versions of the packages that compute explanations, by name."""
    found = {}
    for name in _PARTS:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
