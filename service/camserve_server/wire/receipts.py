"""Receipts: what is needed to compute an answer again, and to know whether it is the same."""

import functools
import hashlib
import importlib.metadata
from contextlib import suppress

from camserve.v1 import explain_pb2
from camserve_server.types import Input, ModelInfo

_PARTS = ("camserve", "torch", "torchvision", "timm", "numpy", "opencv-python-headless")


def receipt(model: ModelInfo, image: bytes, seen: Input) -> explain_pb2.Receipt:
    """Write the receipt of one request.

    Args:
        model: that was explained.
        image: the photo's file.
        seen: what the model saw of it.
    """
    return explain_pb2.Receipt(
        source=model.source,
        weights=model.weights,
        digest=model.digest,
        precision=model.precision,
        device=model.device,
        image_sha256=hashlib.sha256(image).hexdigest(),
        input_sha256=hashlib.sha256(seen.tobytes()).hexdigest(),
        versions=versions(),
    )


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of what computes explanations, by name."""
    found = {}
    for name in _PARTS:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
