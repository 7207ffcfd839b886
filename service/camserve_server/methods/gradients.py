"""Saliency: maps from the gradient of the score at the model's input.

The image x is the normalised input [3,H,W]. A method makes copies of it, takes the mean of a term of the gradient over
them, and turns the mean into a map [H,W]: of a sensitivity the largest absolute value over the colours, of an
attribution, whose values add up to a score, the sum over the colours.

Whatever is drawn for a copy depends on the seed and the copy's index alone, so that neither batching nor the device
changes it.
"""

from functools import lru_cache
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from camserve_server.core.devices import Device, device_of
from camserve_server.methods.kinds import Parameters

BLUR = 20
"""The standard deviation of the blurred baseline is the image's shorter side over this."""

WIDTH = 3
"""Standard deviations after which the blur is cut off."""


def strongest_channel(mean: Tensor, _image: Tensor, **_parameters: float | str) -> Tensor:
    """Take the gradient at the input, the largest absolute value over the colours.

    M_ij = max_c |∂S/∂x_cij|. Simonyan et al. 2014, section 3.1.
    """
    return mean.abs().amax(0)


def input_x_gradient(mean: Tensor, image: Tensor, **_parameters: float | str) -> Tensor:
    """Multiply the image by the gradient and add up the colours.

    M = Σ_c x_c ⊙ ∂S/∂x_c. Shrikumar et al. 2016. For a network of ReLUs without biases the map adds up to
    the score. x is the normalised input: a pixel of the mean colour gets nothing.
    """
    return (image * mean).sum(0)


def guided_backprop(mean: Tensor, _image: Tensor, **_parameters: float | str) -> Tensor:
    """Take the gradient that each ReLU passes on only where it and its input are positive.

    R^l = 1[x^l > 0] ⊙ max(R^(l+1), 0) at each ReLU, the chain rule elsewhere; the largest absolute value over the
    colours. Springenberg et al. 2015, section 3.4. It shows what the early layers respond to, and depends little on the
    class: Nie et al. 2018, arXiv:1805.07039.
    """
    return mean.abs().amax(0)


def deconvnet(mean: Tensor, _image: Tensor, **_parameters: float | str) -> Tensor:
    """Take the gradient that each ReLU passes on only where it is positive, whatever its input.

    R^l = max(R^(l+1), 0) at each ReLU, the chain rule elsewhere; the largest absolute value over the colours. Zeiler
    and Fergus 2014, section 2.1.
    """
    return mean.abs().amax(0)


def guided_gradcam() -> None:
    """Multiply the map of guided backpropagation by that of Grad-CAM, brought to the pixels.

    M = max_c |R_c| ⊙ U(max(L, 0)), where R is what guided backpropagation finds and U the bilinear upsampling of the
    Grad-CAM L. Selvaraju et al. 2017, section 3.2.
    """


def noisy(image: Tensor, index: int, *, noise: float, seed: float, **_parameters: float | str) -> Tensor:
    """Average the gradient over noisy copies of the image.

    x + N(0, σ²), where σ = noise · (max x − min x); of the mean the largest absolute value over the colours. Smilkov et
    al. 2017, section 3.
    """
    return image + noise * (image.max() - image.min()) * _noise(image, int(seed), index)


def squared(_image: Tensor, _copy: Tensor, gradient: Tensor, _index: int, **_parameters: float | str) -> Tensor:
    """Average the squared gradient over noisy copies of the image.

    M = max_c 1/n Σ_i g_i², where g_i is the gradient at a copy as SmoothGrad makes them. Hooker et al. 2019.
    """
    return gradient.square()


def variance(mean: Tensor, _image: Tensor, **_parameters: float | str) -> Tensor:
    """Take the variance of the gradient over noisy copies of the image.

    M = max_c (1/n Σ_i g_i² − (1/n Σ_i g_i)²), where g_i is the gradient at a copy as SmoothGrad makes them. Adebayo et
    al. 2018, arXiv:1810.03307.
    """
    return (mean[1] - mean[0].square()).clamp(min=0).amax(0)


def samples(*, samples: float, **_parameters: float | str) -> int:
    """Return the parameter `samples`."""
    return int(samples)


def along(
    image: Tensor, index: int, *, steps: float, baseline: str, quadrature: str, **_parameters: float | str
) -> Tensor:
    """Go a part of the way from the baseline to the image; the last copy is the baseline itself."""
    start = _baseline(image, baseline)
    places, _ = _quadrature(quadrature, int(steps))
    return start + places[index] * (image - start)


def weighted(image: Tensor, copy: Tensor, gradient: Tensor, index: int, **parameters: float | str) -> Tensor:
    """Weigh the gradient at a place as the quadrature does; and that times the slope of the score along the way there.

    [2,3,H,W], both times the number of copies, which the mean divides by.
    """
    steps = int(parameters["steps"])
    places, weights = _quadrature(cast("str", parameters["quadrature"]), steps)
    slope = ((image - copy) * gradient).sum() / (1 - places[index])  # (x − x') · g, without making the baseline again
    return (steps + 1) * weights[index] * torch.stack((gradient, gradient * slope))


def integrated(
    mean: Tensor, image: Tensor, *, baseline: str, quadrature: str, gained: float, **_parameters: float | str
) -> Tensor:
    """Integrate the gradient on the straight way from a baseline to the image.

    M = Σ_c (x − x')_c ⊙ ∫₀¹ ∂S(x' + α (x − x'))/∂x_c dα. Sundararajan et al. 2017, equation 1. The map adds up to
    S(x) − S(x'); by how much it fails to, as a share of that, is the completeness error.
    The quadrature is "cubic", the midpoint rule in t with α = t³, because most of a score's change lies near a baseline
    without structure; "gauss-legendre", Captum's; or "matched", cubic with its weights changed as little as makes them
    integrate the score's own slope to S(x) − S(x'), which is known: M + (S(x) − S(x') − ΣM) Cov(m, s) / Var(s), where m
    is the map at a place, s = Σm the slope there, and both moments are under the weights: the regression estimator of a
    control variate. A matched map adds up however few the steps are; how well they follow the way, the completeness
    error of "cubic" says.
    The baseline x' is "zero", the normalised input's zero, which is the mean colour of what the model was trained on;
    "mean", the image's own mean colour; or "blur", the image blurred. Sturmfels et al. 2020,
    doi:10.23915/distill.00022, say what each cannot see: where the image equals its baseline the map is zero.
    """
    total, with_slope = ((image - _baseline(image, baseline)) * mean.double()).sum(1).unbind()
    if quadrature != "matched":
        return total
    slope = total.sum()
    covariance = with_slope - slope * total
    variance = covariance.sum()
    if variance <= 0:  # the same slope everywhere, and nothing to learn from it
        return total
    return total + (gained - slope) / variance * covariance


def steps_and_baseline(*, steps: float, **_parameters: float | str) -> int:
    """Return how many copies integrated gradients take: the steps, and the baseline."""
    return int(steps) + 1


def last(*, steps: float, **_parameters: float | str) -> int:
    """Return the index of the copy that is the baseline."""
    return int(steps)


def between(image: Tensor, index: int, **parameters: float | str) -> Tensor:
    """Take a random place on the way from the baseline to a noisy copy of the image."""
    start, end, position = _way(image, index, parameters)
    return start + position * (end - start)


def travelled(image: Tensor, _copy: Tensor, gradient: Tensor, index: int, **parameters: float | str) -> Tensor:
    """Multiply the gradient by the way from the baseline to the noisy copy of the image."""
    start, end, _ = _way(image, index, parameters)
    return (end - start) * gradient


def expected(mean: Tensor, _image: Tensor, **_parameters: float | str) -> Tensor:
    """Average the gradient at random places between baselines and noisy copies of the image.

    M = Σ_c 1/n Σ_i (x_i − x'_i)_c ⊙ ∂S(x'_i + α_i (x_i − x'_i))/∂x_c with α_i uniform in 0..1 and x_i noisy as in
    SmoothGrad. Erion et al. 2021; Lundberg and Lee 2017. In the mean it is integrated gradients, averaged
    over the baselines. "any" draws each x'_i from the three that integrated gradients know.
    """
    return mean.sum(0)


BASELINES = ("zero", "mean", "blur")
"""What an image is compared with, by name."""


def _baseline(image: Tensor, name: str) -> Tensor:
    if name == "blur":
        return _blurred(image)
    return torch.zeros_like(image) if name == "zero" else image.mean((1, 2), keepdim=True).expand_as(image)


def _blurred(image: Tensor) -> Tensor:
    """Blur an image [3,H,W] by a Gaussian; beyond its edges it is mirrored."""
    deviation = min(image.shape[1:]) / BLUR
    reach = min(round(WIDTH * deviation), min(image.shape[1:]) - 1)
    offsets = torch.arange(-reach, reach + 1, device=image.device).to(image.dtype)
    kernel = torch.softmax(-((offsets / deviation) ** 2) / 2, 0)
    padded = functional.pad(image[:, None], [reach] * 4, mode="reflect")
    return functional.conv2d(functional.conv2d(padded, kernel[None, None, None]), kernel[None, None, :, None])[:, 0]


@lru_cache(maxsize=16)
def _quadrature(rule: str, steps: int) -> tuple[list[float], list[float]]:
    """Return the places between 0 and 1 and the weights of a quadrature; at the end 0, which has none."""
    if rule == "gauss-legendre":
        nodes, doubled = np.polynomial.legendre.leggauss(steps)
        places, weights = (1 + nodes) / 2, doubled / 2
    else:
        middles = (np.arange(steps) + 0.5) / steps
        places, weights = middles**3, 3 * middles**2 / steps
        if rule == "matched":  # a constant is integrated exactly too
            weights /= weights.sum()
    return [*places.tolist(), 0.0], [*weights.tolist(), 0.0]


def _way(image: Tensor, index: int, parameters: Parameters) -> tuple[Tensor, Tensor, float]:
    """Draw a baseline, a noisy copy of the image and a place between them."""
    dice = _dice(cast("float", parameters["seed"]), index)
    position = float(torch.rand((), generator=dice))
    any_of_them = BASELINES[int(torch.randint(len(BASELINES), (), generator=dice))]
    chosen = cast("str", parameters["baseline"])
    wide = cast("float", parameters["noise"]) * (image.max() - image.min())
    end = image + wide * device_of(image.device).randn(tuple(image.shape), dice).to(image.dtype)
    return _baseline(image, any_of_them if chosen == "any" else chosen), end, position


def _noise(image: Tensor, seed: int, index: int) -> Tensor:
    """Return the standard normal noise of an image's shape that belongs to a copy."""
    device = device_of(image.device)
    if device.is_cpu:
        return device.randn(tuple(image.shape), _dice(seed, index)).to(image.dtype)
    return device.upload(_held_noise(device, tuple(image.shape), seed, index)).to(image.dtype)


@lru_cache(maxsize=64)
def _held_noise(device: Device, shape: tuple[int, ...], seed: int, index: int) -> Tensor:
    """Return noise in memory that a device can fetch from: requests that name no seed have the same noise.

    To draw 3x224x224 numbers takes a millisecond of the host, in which a GPU does the whole copy.
    """
    return torch.randn(shape, generator=_dice(seed, index), out=device.host_buffer(shape, torch.float32))


def _dice(seed: float, index: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(seed) * 100_003 + index)
