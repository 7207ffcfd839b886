"""Saliency: maps from the gradient of the score at the model's input.

The image x is the normalised input [3,H,W]. A method makes copies of it, averages a term of the gradient over them, and
turns that mean into a map [H,W]. The map of a sensitivity is the channel-wise maximum of its absolute value. The map of
an attribution, whose values add up to a score, is the sum over the channels. A map of one channel is the same without
the maximum or the sum.

The random numbers of a copy depend on the seed and the copy's index alone, so that neither batching nor the device
changes them.
"""

from functools import lru_cache
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from camserve_server.core.devices import Device, device_for
from camserve_server.methods.kinds import Parameters

BLUR_DIVISOR = 20
"""The standard deviation of the blurred baseline is the image's shorter side divided by this."""

BLUR_CUTOFF = 3
"""Distance at which the blur's kernel is cut off, in standard deviations."""


def strongest_channel(mean: Tensor, _image: Tensor, **_parameters: float | str) -> Tensor:
    """Take the channel-wise maximum of |∂S/∂x|, the gradient at the input.

    M_ij = max_c |∂S/∂x_cij|.

    Simonyan et al. 2014, section 3.1.
    """
    return mean.abs().amax(0)


def input_x_gradient(mean: Tensor, image: Tensor, **_parameters: float | str) -> Tensor:
    """Multiply the image by the gradient and add up the colour channels.

    M = Σ_c x_c ⊙ ∂S/∂x_c.

    Shrikumar et al. 2016. For a network of ReLUs without biases the map adds up to the score. x is the normalised
    input: a pixel of the mean colour gets zero.
    """
    return (image * mean).sum(0)


def guided_backprop(mean: Tensor, _image: Tensor, **_parameters: float | str) -> Tensor:
    """Take the gradient that each ReLU passes on only where the gradient and the ReLU's input are positive.

    M = max_c |R_c| at the input, with R^l = 1[x^l > 0] ⊙ ReLU(R^(l+1)) at each ReLU, and the chain rule elsewhere.

    x^l is the input of the ReLU, and R^(l+1) the gradient that arrives at its output. Springenberg et al. 2015,
    section 3.4. It shows what the early layers respond to, and depends little on the class: Nie et al. 2018,
    arXiv:1805.07039.
    """
    return mean.abs().amax(0)


def deconvnet(mean: Tensor, _image: Tensor, **_parameters: float | str) -> Tensor:
    """Take the gradient that each ReLU passes on only where the gradient is positive, whatever the ReLU's input.

    M = max_c |R_c| at the input, with R^l = ReLU(R^(l+1)) at each ReLU, and the chain rule elsewhere.

    R^(l+1) is the gradient that arrives at the ReLU's output. Zeiler and Fergus 2014, section 2.1.
    """
    return mean.abs().amax(0)


def guided_gradcam() -> None:
    """Multiply the map of guided backpropagation by that of Grad-CAM, resized to the pixels.

    M = max_c |R_c| ⊙ U(ReLU(L)), where R is the gradient of guided backpropagation, L the Grad-CAM map, and U bilinear
    upsampling to the pixels.

    Selvaraju et al. 2017, section 3.2.
    """


def noisy(image: Tensor, index: int, *, noise: float, seed: float, **_parameters: float | str) -> Tensor:
    """Average the gradient over noisy copies of the image.

    M = max_c |1/n Σ_q ∂S(x_q)/∂x_c|, where x_q = x + N(0, σ²) is noisy copy q, and σ = noise · (max x − min x).

    Smilkov et al. 2017, section 3.

    Returns:
        The copy [3,H,W] of this index.
    """
    return image + noise * (image.max() - image.min()) * _noise(image, int(seed), index)


def squared(_image: Tensor, _copy: Tensor, gradient: Tensor, _index: int, **_parameters: float | str) -> Tensor:
    """Average the squared gradient over noisy copies of the image.

    M = max_c 1/n Σ_q (∂S(x_q)/∂x_c)², where x_q is noisy copy q of SmoothGrad.

    Hooker et al. 2019.
    """
    return gradient.square()


def variance(mean: Tensor, _image: Tensor, **_parameters: float | str) -> Tensor:
    """Take the variance of the gradient over noisy copies of the image.

    M = max_c (1/n Σ_q d_qc² − (1/n Σ_q d_qc)²), with d_qc = ∂S(x_q)/∂x_c at noisy copy q of SmoothGrad.

    Adebayo et al. 2018, arXiv:1810.03307.
    """
    return (mean[1] - mean[0].square()).clamp(min=0).amax(0)


def samples(*, samples: float, **_parameters: float | str) -> int:
    """Return the parameter `samples`."""
    return int(samples)


def along(
    image: Tensor, index: int, *, steps: float, baseline: str, quadrature: str, **_parameters: float | str
) -> Tensor:
    """Return one of the points on the line from the baseline to the image; the last copy is the baseline itself."""
    start = _baseline(image, baseline)
    positions, _ = _quadrature(quadrature, int(steps))
    return start + positions[index] * (image - start)


def weighted(image: Tensor, copy: Tensor, gradient: Tensor, index: int, **parameters: float | str) -> Tensor:
    """Weight the gradient at a point of the line as the quadrature does.

    Returns:
        The weighted gradient, and the same times the slope of the score along the line there, stacked [2,3,H,W]. Both
        are multiplied by the number of copies, because the mean divides by it.
    """
    steps = int(parameters["steps"])
    positions, weights = _quadrature(cast("str", parameters["quadrature"]), steps)
    slope = ((image - copy) * gradient).sum() / (1 - positions[index])  # (x − x') · g, without computing x' again
    return (steps + 1) * weights[index] * torch.stack((gradient, gradient * slope))


def integrated(
    mean: Tensor, image: Tensor, *, baseline: str, quadrature: str, gained: float, **_parameters: float | str
) -> Tensor:
    """Integrate the gradient along the straight line from a baseline to the image.

    M = Σ_c (x − x')_c ⊙ ∫₀¹ ∂S(x' + α (x − x'))/∂x_c dα.

    Sundararajan et al. 2017, equation 1. The map adds up to S(x) − S(x'). The completeness error is the relative error
    of ΣM, |ΣM − (S(x) − S(x'))| / |S(x) − S(x')|.

    The baseline x' is "zero", the normalised input's zero, which is the mean colour of the training set; "mean", the
    image's own mean colour; or "blur", the image blurred by a Gaussian whose σ is 1/20 of its shorter side. Where the
    image equals its baseline, the map is zero: Sturmfels et al. 2020, doi:10.23915/distill.00022, discuss what each
    baseline hides.

    The parameter `quadrature` selects how the integral is computed. "cubic" is the midpoint rule in t with α = t³,
    because most of a score's change lies near a baseline without structure. "gauss-legendre" is Captum's.

    "matched" scales the weights of "cubic" to a sum of 1. Then it changes them as little as needed for the slope of the
    score to integrate to S(x) − S(x'), which is known. If C is the map by the scaled weights, the matched map is
    C + (S(x) − S(x') − ΣC) Cov(m, s) / Var(s). There m is the integrand's map at a point of the line, s = Σm the slope
    there, and both moments are under the weights: the regression estimator of a control variate.

    A matched map adds up however few the steps are. So use the completeness error of "cubic" to check that the steps
    follow the line. The matched maps of single channels take ΣC and Var(s) from all channels, and so add up to the
    matched map.

    Returns:
        Map [H,W], float64, from the mean [2,3,H,W] of `weighted` over the copies and `gained`, which is S(x) − S(x').
    """
    return _match(_line_integrals(mean, image, baseline).sum(1), quadrature, gained)


def integrated_by_channel(
    mean: Tensor, image: Tensor, *, baseline: str, quadrature: str, gained: float, **_parameters: float | str
) -> Tensor:
    """Return the maps of all channels [C,H,W], float64, which add up to the map of `integrated`."""
    return _match(_line_integrals(mean, image, baseline), quadrature, gained)


def _line_integrals(mean: Tensor, image: Tensor, baseline: str) -> Tensor:
    """Return the integral of each channel and pixel, and that of its product with the slope, [2,C,H,W] in float64."""
    return (image - _baseline(image, baseline)) * mean.double()


def _match(integrals: Tensor, quadrature: str, gained: float) -> Tensor:
    """Correct integrals [2,...] as the quadrature says; the correction is linear, so that it applies to parts, too."""
    total, with_slope = integrals.unbind()
    if quadrature != "matched":
        return total
    slope = total.sum()
    covariance = with_slope - slope * total
    variance = covariance.sum()
    if variance <= 0:  # the slope is the same everywhere, so it cannot correct the map
        return total
    return total + (gained - slope) / variance * covariance


def steps_and_baseline(*, steps: float, **_parameters: float | str) -> int:
    """Return the number of copies of integrated gradients: the steps and the baseline."""
    return int(steps) + 1


def last(*, steps: float, **_parameters: float | str) -> int:
    """Return the index of the copy that is the baseline."""
    return int(steps)


def between(image: Tensor, index: int, **parameters: float | str) -> Tensor:
    """Return a random point on the line from a baseline to a noisy copy of the image."""
    start, end, position = _draw_line(image, index, parameters)
    return start + position * (end - start)


def travelled(image: Tensor, _copy: Tensor, gradient: Tensor, index: int, **parameters: float | str) -> Tensor:
    """Multiply the gradient by the difference between the noisy copy of the image and the baseline."""
    start, end, _ = _draw_line(image, index, parameters)
    return (end - start) * gradient


def expected(mean: Tensor, _image: Tensor, **_parameters: float | str) -> Tensor:
    """Average the gradient at random points between baselines and the image, or noisy copies of it.

    M = Σ_c 1/n Σ_q (x_q − x'_q)_c ⊙ ∂S(x'_q + α_q (x_q − x'_q))/∂x_c, with α_q uniform in 0..1 and x_q = x + N(0, σ²).

    As in SmoothGrad, σ = noise · (max x − min x). It is 0 by default: then every x_q is x itself. Erion et al. 2021;
    Lundberg and Lee 2017. Without noise its expectation is integrated gradients averaged over the baselines. The
    baseline "any" draws each x'_q from the three of integrated gradients.
    """
    return mean.sum(0)


BASELINES = ("zero", "mean", "blur")
"""Names of the baselines that an image can be compared with."""


def _baseline(image: Tensor, name: str) -> Tensor:
    if name == "blur":
        return _blur(image)
    return torch.zeros_like(image) if name == "zero" else image.mean((1, 2), keepdim=True).expand_as(image)


def _blur(image: Tensor) -> Tensor:
    """Blur an image [3,H,W] by a Gaussian; beyond its edges it is mirrored."""
    sigma = min(image.shape[1:]) / BLUR_DIVISOR
    radius = min(round(BLUR_CUTOFF * sigma), min(image.shape[1:]) - 1)
    offsets = torch.arange(-radius, radius + 1, device=image.device).to(image.dtype)
    kernel = torch.softmax(-((offsets / sigma) ** 2) / 2, 0)
    padded = functional.pad(image[:, None], [radius] * 4, mode="reflect")
    return functional.conv2d(functional.conv2d(padded, kernel[None, None, None]), kernel[None, None, :, None])[:, 0]


@lru_cache(maxsize=16)
def _quadrature(rule: str, steps: int) -> tuple[list[float], list[float]]:
    """Return a quadrature's positions α between 0 and 1, and their weights; the last position is 0, with weight 0."""
    if rule == "gauss-legendre":
        nodes, doubled_weights = np.polynomial.legendre.leggauss(steps)
        positions, weights = (1 + nodes) / 2, doubled_weights / 2
    else:
        midpoints = (np.arange(steps) + 0.5) / steps
        positions, weights = midpoints**3, 3 * midpoints**2 / steps
        if rule == "matched":  # so that a constant is integrated exactly too
            weights /= weights.sum()
    return [*positions.tolist(), 0.0], [*weights.tolist(), 0.0]


def _draw_line(image: Tensor, index: int, parameters: Parameters) -> tuple[Tensor, Tensor, float]:
    """Draw a baseline, a noisy copy of the image and a position α between them."""
    generator = _generator(cast("float", parameters["seed"]), index)
    position = float(torch.rand((), generator=generator, dtype=torch.float32))
    drawn_name = BASELINES[int(torch.randint(len(BASELINES), (), generator=generator))]
    name = cast("str", parameters["baseline"])
    sigma = cast("float", parameters["noise"]) * (image.max() - image.min())
    end = image + sigma * device_for(image.device).randn(tuple(image.shape), generator).to(image.dtype)
    return _baseline(image, drawn_name if name == "any" else name), end, position


def _noise(image: Tensor, seed: int, index: int) -> Tensor:
    """Return the standard normal noise of one copy, of the image's shape."""
    device = device_for(image.device)
    if device.is_cpu:
        return device.randn(tuple(image.shape), _generator(seed, index)).to(image.dtype)
    return device.upload(_cached_noise(device, tuple(image.shape), seed, index)).to(image.dtype)


@lru_cache(maxsize=64)
def _cached_noise(device: Device, shape: tuple[int, ...], seed: int, index: int) -> Tensor:
    """Return noise in a host buffer that the device can copy from.

    It is cached because requests that name no seed share their noise. Drawing 3x224x224 numbers takes a millisecond on
    the host, in which a GPU computes the whole copy.
    """
    return torch.randn(shape, generator=_generator(seed, index), out=device.host_buffer(shape, torch.float32))


def _generator(seed: float, index: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(seed) * 100_003 + index)
