"""Baselines: maps that no model contributes to. An explanation that scores no better than these explains nothing."""

import torch
from torch.nn import functional

from camserve_server.methods.kinds import Array


def random(image: Array, *, seed: float, **_parameters: float | str) -> Array:
    """Draw every pixel at random.

    M_ij is uniform in 0..1.

    Adebayo et al. 2018 and Hooker et al. 2019 compare with it.
    """
    generator = torch.Generator().manual_seed(int(seed))
    values: Array = torch.rand(image.shape[1:], generator=generator, dtype=torch.float32).numpy()
    return values


def edges(image: Array, **_parameters: float | str) -> Array:
    """Find the image's edges.

    M = √(G_x² + G_y²), where G_x and G_y are the Sobel derivatives of the mean over the colour channels.

    Beyond its edges the image is mirrored. Some saliency maps are hard to tell from this one: Adebayo et al. 2018,
    arXiv:1810.03292.
    """
    grey = torch.from_numpy(image).mean(0)[None, None]
    sobel_x = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]], dtype=torch.float32)
    kernels = torch.stack((sobel_x, sobel_x.T))[:, None]
    padded = functional.pad(grey, [1] * 4, mode="reflect")
    magnitude: Array = functional.conv2d(padded, kernels)[0].norm(dim=0).numpy()
    return magnitude
