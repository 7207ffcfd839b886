"""Example plugin for camserve: three methods, and the model source `zoo:NAME`."""

from collections.abc import Callable, Mapping

from torch import nn

from camserve_server.models import ModelSpec, Preprocess, Source


def _stripes(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=4, padding=3),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, classes),
    )


NETWORKS: Mapping[str, Callable[[int], nn.Module]] = {"stripes": _stripes}


def zoo(spec: ModelSpec) -> Source:
    """Build the model `zoo:stripes`."""
    if spec.arch not in NETWORKS:
        raise LookupError(f'there is no "{spec.arch}" in the zoo: {", ".join(NETWORKS)}')
    preprocess = Preprocess((64, 64), 64, "bilinear", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    return Source(NETWORKS[spec.arch](spec.classes or 2), preprocess, ("plain", "striped") if not spec.classes else ())
