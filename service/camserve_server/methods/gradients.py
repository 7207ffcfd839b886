"""Saliency: maps from the gradient of the score at the model's input.

The image x is the normalised input [3,H,W]. A method makes copies of it, takes the mean of a term of the gradient over
them, and turns the mean [3,H,W] into a map [H,W].
"""

import torch
from torch import Tensor


def strongest_channel(mean: Tensor, _image: Tensor, **_parameters: float | str) -> Tensor:
    """Take the gradient at the input, the largest absolute value over the colours.

    M_ij = max_c |∂S/∂x_cij|. Simonyan et al. 2014, section 3.1.
    """
    return mean.abs().amax(0)


def noisy(image: Tensor, index: int, *, noise: float, seed: float, **_parameters: float | str) -> Tensor:
    """Average the gradient over noisy copies of the image.

    x + N(0, σ²), where σ = noise · (max x − min x). Smilkov et al. 2017, section 3. The noise of a copy depends on the
    seed and its index alone, so that neither batching nor the device changes it.
    """
    generator = torch.Generator().manual_seed(int(seed) * 100_003 + index)
    drawn = torch.randn(image.shape, generator=generator).to(image)
    return image + noise * (image.max() - image.min()) * drawn


def samples(*, samples: float, **_parameters: float | str) -> int:
    """Return the parameter `samples`."""
    return int(samples)
