"""Baselines: maps in which no model has a part. An explanation that scores no better than these explains nothing."""

import torch
from torch.nn import functional

from camserve_server.methods.kinds import Array


def random(image: Array, *, seed: float, **_parameters: float | str) -> Array:
    """Draw every pixel by chance.

    M_ij uniform in 0..1. Adebayo et al. 2018 and Hooker et al. 2019 compare with it.
    """
    dice = torch.Generator().manual_seed(int(seed))
    drawn: Array = torch.rand(image.shape[1:], generator=dice).numpy()
    return drawn


def edges(image: Array, **_parameters: float | str) -> Array:
    """Find the image's edges.

    M = √(G_x² + G_y²), where G_x and G_y are the Sobel derivatives of the mean over the colours; beyond its edges the
    image is mirrored. Adebayo et al. 2018, arXiv:1810.03292: some saliency maps are hard to tell from it.
    """
    grey = torch.from_numpy(image).mean(0)[None, None]
    across = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
    both = torch.stack((across, across.T))[:, None]
    found: Array = functional.conv2d(functional.pad(grey, [1] * 4, mode="reflect"), both)[0].norm(dim=0).numpy()
    return found
