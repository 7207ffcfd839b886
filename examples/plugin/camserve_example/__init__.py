"""A plugin of camserve: a method, `signed_layercam`, and a source of models, `zoo:NAME`."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from camserve_server.methods import Cam
from camserve_server.models import ModelSpec, Preprocess, Source


def _signed_layercam(activations: Tensor, gradients: Tensor, _scores: Tensor) -> Tensor:
    """Weigh each value by its gradient, those that speak against the target too.

    L = Σ_k g_k ⊙ |A_k|. Ours, to show how a method is added.
    """
    return (gradients * activations.abs()).sum(1)


signed_layercam = Cam(_signed_layercam, "an example")


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
    """Make the model that is named `zoo:stripes`."""
    if spec.arch not in NETWORKS:
        raise LookupError(f'there is no "{spec.arch}" in the zoo: {", ".join(NETWORKS)}')
    sees = Preprocess((64, 64), 64, "bilinear", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    return Source(NETWORKS[spec.arch](spec.classes or 2), sees, ("plain", "striped") if not spec.classes else ())
