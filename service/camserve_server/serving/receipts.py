"""Receipts: the facts needed to compute a result again, and to check that it is the same."""

import functools
import hashlib
import importlib.metadata
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from camserve_server.core.arrays import Input
from camserve_server.models.values import Intervention, ModelInfo

_PACKAGES = ("camserve", "torch", "torchvision", "timm", "numpy", "opencv-python-headless")


@dataclass(frozen=True, slots=True)
class Receipt:
    """The model, the input and the software that a result was computed with.

    Attributes:
        source: origin of the model, for example "timm:resnet50".
        weights: "default", "file" or "none".
        digest: SHA-256 of the model's parameters and buffers, hexadecimal.
        precision: number format that the model computed in.
        device: device that the model ran on.
        image_sha256: SHA-256 of the encoded photo, hexadecimal.
        input_sha256: SHA-256 of the values of the model's input, hexadecimal.
        versions: versions of the software, by package name.
        texts: the texts that were the model's classes; none if its classes were its own.
        value_range: the values of the photo that were taken as 0 and 1; None for those of their type.
        interventions: the changes to what layers returned.
    """

    source: str
    weights: str
    digest: str
    precision: str
    device: str
    image_sha256: str
    input_sha256: str
    versions: Mapping[str, str]
    texts: tuple[str, ...] = ()
    value_range: tuple[float, float] | None = None
    interventions: tuple[Intervention, ...] = ()


def receipt_of(model: ModelInfo, image: bytes, seen: Input, interventions: tuple[Intervention, ...] = ()) -> Receipt:
    """Return the receipt of a request.

    Args:
        model: the model that computed the result.
        image: the encoded photo.
        seen: the model's input made from the photo.
        interventions: the changes to what layers returned.
    """
    return Receipt(
        source=model.source,
        weights=model.weights,
        digest=model.digest,
        precision=model.precision,
        device=model.device,
        image_sha256=hashlib.sha256(image).hexdigest(),
        input_sha256=hashlib.sha256(np.ascontiguousarray(seen).data).hexdigest(),
        versions=_versions(),
        texts=model.texts,
        value_range=model.preprocess.value_range,
        interventions=interventions,
    )


@functools.cache
def _versions() -> Mapping[str, str]:
    """Return the versions of the packages that compute explanations, by name."""
    versions = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
