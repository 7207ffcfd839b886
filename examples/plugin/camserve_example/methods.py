"""Methods of the example plugin, one for each of three kinds."""

from collections.abc import Generator

import numpy as np
from torch import Tensor

from camserve_server.methods import Array, Cam, Edit, Parameter, Perturbation, Saliency, Scene


def _signed_layercam(activations: Tensor, gradients: Tensor, _scores: Tensor, *, power: float) -> Tensor:
    """Weight each activation by its gradient, including activations against the target.

    L = Σ_k g_k ⊙ |A_k|^p, with p = power. It is not from a paper: it shows how to add a method.
    """
    return (gradients * activations.abs() ** power).sum(1)  # [B,C,h,w] -> [B,h,w]


POWER = Parameter("power", "Exponent of the activations.", default=1.0, minimum=0.0, maximum=4.0)
signed_layercam = Cam(_signed_layercam, "an example", (POWER,))


def _gradient_norm(gradient: Tensor, _image: Tensor) -> Tensor:
    """Take the length of the gradient at each pixel, √Σ_c (∂S/∂x_c)²."""
    return gradient.square().sum(0).sqrt()  # [3,H,W] -> [H,W]


gradient_norm = Saliency(_gradient_norm, "an example")


def _stripe_occlusion(scene: Scene, *, stripes: float) -> Generator[list[Edit], Array, Array]:
    """Hide one vertical stripe of the image after another, and measure how far the score falls."""
    _, height, width = scene.image.shape
    keep = np.arange(int(stripes))[:, None] != np.arange(width) * int(stripes) // width  # [n,W]
    scores = yield [Edit(np.tile(row, (height, 1)).astype(np.float32)) for row in keep]  # [n,T]
    return (scene.scores - scores).T[:, None]  # [T,1,n]: for each target, a map of one row of cells


STRIPES = Parameter("stripes", "Number of stripes.", default=14, minimum=2, maximum=64, integer=True)
stripe_occlusion = Perturbation(_stripe_occlusion, "an example", lambda stripes, **_size: int(stripes), (STRIPES,))
