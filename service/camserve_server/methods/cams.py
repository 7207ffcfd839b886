"""Class activation maps: the formulas, their kernels and their smaller steps.

Notation, for one image: A_k is channel k of the layer's feature maps and g_k = ∂S/∂A_k is the gradient of the score S
there, both on the grid h×w. Indices i and j run over the grid's rows and columns, and ⊙ multiplies element by element.

The formula of a `Cam` takes activations [B,C,h,w], gradients [B,C,h,w] and scores [B]. No formula here uses the scores:
they are for those of plugins. It returns either the signed maps [B,h,w]; or, if the map is a sum over channels, its
terms [B,C,h,w], which the caller adds up. The ReLU on the map belongs to rendering. `smoothgradcam_plus_plus` returns
derivatives, of which `from_means` makes the map. `fullgrad`, `refinecam`, `windows` and `sess` are functions of other
kinds of method, with the arguments that `kinds` documents.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from camserve_server.core.arrays import Map
from camserve_server.core.devices import device_for
from camserve_server.core.errors import FailedPrecondition
from camserve_server.imaging.values import View


def gradcam(activations: Tensor, gradients: Tensor, _scores: Tensor) -> Tensor:
    """Weight each feature map by the mean of its gradient.

    L = Σ_k α_k A_k, with α_k = 1/(hw) Σ_ij g_kij.

    Selvaraju et al. 2017, equations 1 and 2.

    Returns:
        Terms α_k A_k [B,C,h,w].
    """
    return gradients.mean((2, 3), keepdim=True) * activations


def hirescam(activations: Tensor, gradients: Tensor, _scores: Tensor) -> Tensor:
    """Weight each value of the feature maps by its own gradient.

    L = Σ_k g_k ⊙ A_k.

    Draelos and Carin 2020, equation 4.

    Returns:
        Terms g_k ⊙ A_k [B,C,h,w].
    """
    return gradients * activations


def layercam(activations: Tensor, gradients: Tensor, _scores: Tensor) -> Tensor:
    """Weight each value of the feature maps by its own gradient if that is positive, and by zero otherwise.

    L = Σ_k ReLU(g_k) ⊙ A_k.

    Jiang et al. 2021, equations 5 to 7.

    Returns:
        Terms ReLU(g_k) ⊙ A_k [B,C,h,w].
    """
    return gradients.clamp(min=0) * activations


def gradcam_elementwise(activations: Tensor, gradients: Tensor, _scores: Tensor) -> Tensor:
    """Weight each value of the feature maps by its own gradient and keep the positive products.

    L = Σ_k ReLU(g_k ⊙ A_k).

    This is HiResCAM with its negative terms dropped. Gildenblat 2021, pytorch-grad-cam.

    Returns:
        Terms ReLU(g_k ⊙ A_k) [B,C,h,w].
    """
    return (gradients * activations).clamp(min=0)


def xgradcam(activations: Tensor, gradients: Tensor, _scores: Tensor) -> Tensor:
    """Weight each feature map by the activation-weighted mean of its gradient.

    L = Σ_k α_k A_k, with α_k = Σ_ij g_kij A_kij / Σ_ij A_kij, and α_k = 0 if the denominator is 0.

    Fu et al. 2020, equations 7 and 8. If A can be negative, the denominator may also be negative or close to zero,
    which the paper does not foresee: a few channels then get most of the weight.

    Returns:
        Terms α_k A_k [B,C,h,w].
    """
    activation_sums = activations.sum((2, 3), keepdim=True)
    weighted_sums = (gradients * activations).sum((2, 3), keepdim=True)
    alpha = weighted_sums / torch.where(activation_sums == 0, 1, activation_sums)
    return torch.where(activation_sums == 0, 0, alpha) * activations


def gradcam_plus_plus(activations: Tensor, gradients: Tensor, _scores: Tensor, *, variant: str) -> Tensor:
    """Weight each feature map by the sum of its positive gradients, each weighted by a factor α.

    L = Σ_k w_k A_k, with w_k = Σ_ij α_kij ReLU(g_kij) and α_kij = g_kij² / (2 g_kij² + g_kij³ Σ_ab A_kab).

    Chattopadhay et al. 2018, equation 19. The paper derives it for Y = exp(S). The gradient of Y has a factor exp(S),
    which is the same for all channels, and w_k leaves it out. With `variant` = official, the α of a channel are divided
    by their sum over the positions with a positive gradient, as in the authors' code.

    In the paper, the feature maps come after a ReLU, so α of a positive gradient is between 0 and 1/2. For other
    layers, the denominator could vanish. So a negative g³ ΣA is replaced by zero, and α is zero where g is. Other
    libraries add a constant to the denominator instead. Gradients are often so small that 1e-6 would dominate it.

    Returns:
        Terms w_k A_k [B,C,h,w].
    """
    largest = _largest_gradient(gradients)
    relative = gradients / largest
    alpha = _plus_plus_alpha(relative**2, relative**3 * largest, activations.sum((2, 3), keepdim=True))
    if variant == "official":
        alpha_sums = torch.where(gradients > 0, alpha, 0).sum((2, 3), keepdim=True)
        alpha = alpha / torch.where(alpha_sums == 0, 1, alpha_sums)
    return (alpha * gradients.clamp(min=0)).sum((2, 3), keepdim=True) * activations


def _largest_gradient(gradients: Tensor) -> Tensor:
    """Return max |g| of each image [B,1,1,1], or 1 if all are zero.

    Gradients are divided by it before they are squared and cubed, because small ones would underflow in float32.
    """
    largest = gradients.abs().amax((1, 2, 3), keepdim=True)
    return torch.where(largest == 0, 1, largest)


def _plus_plus_alpha(squares: Tensor, cubes: Tensor, activation_sums: Tensor) -> Tensor:
    """Return α = g² / (2 g² + max(0, g³ Σ_ab A_ab)) of Grad-CAM++, or 0 where g² is 0.

    Args:
        squares: g² [...,C,h,w], divided by max g².
        cubes: g³ [...,C,h,w], divided by max g², like the squares.
        activation_sums: Σ_ab A_ab [...,C,1,1].
    """
    return torch.where(squares == 0, 0, squares / (2 * squares + (cubes * activation_sums).clamp(min=0)))


def smoothgradcam_plus_plus(
    _activations: Tensor, gradients: Tensor, _scores: Tensor, **_parameters: float | str
) -> Tensor:
    """Weight each feature map as Grad-CAM++ does, with derivatives averaged over noisy copies of the image.

    L = Σ_k w_k A_k, with w_k = Σ_ij α_kij ReLU(D1_kij) and α_kij = D2_kij / (2 D2_kij + D3_kij Σ_ab A_kab).

    Dn is the mean of g^n over the copies x + N(0, σ²), with σ = noise · (max x − min x). A are the feature maps of the
    image itself. As in Grad-CAM++, a negative D3 ΣA is replaced by zero, and the factor exp(S) of the derivatives is
    left out, although it differs from copy to copy.

    Omeiza et al. 2019, section 3, except for the numerator of α. The paper prints D1. With it, α has no bound: it grows
    if the score is multiplied by a constant below 1. In Grad-CAM++, which the method smooths, the numerator is D2, and
    α is at most 1/2.

    Returns:
        g, g² and g³ of one copy, float [B,3,C,h,w]. `from_means` turns their means into the map.
    """
    return torch.stack([gradients, gradients**2, gradients**3], 1)


def from_means(mean: Tensor, *, features: Tensor, **_parameters: float | str) -> Tensor:
    """Return the Smooth Grad-CAM++ map [h,w].

    Args:
        mean: D1, D2 and D3 [3,C,h,w], the means of g, g² and g³ over the copies.
        features: A, the activations [C,h,w] of the image itself.
    """
    first, second, third = mean
    largest = second.max()
    scale = torch.where(largest == 0, 1, largest)
    alpha = _plus_plus_alpha(second / scale, third / scale, features.sum((1, 2), keepdim=True))
    weights = (alpha * first.clamp(min=0)).sum((1, 2), keepdim=True)
    return cast("Tensor", (weights * features).sum(0))


def shapleycam(activations: Tensor, gradients: Tensor, _scores: Tensor, *, curvature: Tensor) -> Tensor:
    """Weight each feature map by the mean of its gradient, corrected for the curvature of the score.

    L = Σ_k α_k A_k, with α_k = 1/(hw) Σ_ij (g − ½ H·A)_kij.

    H is the Hessian of the score with respect to the feature maps. Σ_ij A_kij (g − ½ H·A)_kij is a second-order
    estimate of the Shapley value of feature map k; the mean over positions in α_k is Grad-CAM's averaging. Cai 2025,
    arXiv:2501.06261, section 4. If only ReLUs, pooling and linear layers follow, a logit has no curvature and the map
    equals Grad-CAM's. It differs at layers that are followed by GELU, SiLU, attention or a norm. The paper's own
    target, ReST (the logit minus the cross-entropy), is curved in every network.

    Returns:
        Terms α_k A_k [B,C,h,w], computed with `curvature`, which is the Hessian product H·A [B,C,h,w].
    """
    return (gradients - 0.5 * curvature).mean((2, 3), keepdim=True) * activations


def fem(activations: Tensor, _gradients: Tensor, _scores: Tensor, *, k: float) -> Tensor:
    """Weight each feature map by the share of its values that stand out.

    L = Σ_k w_k A_k, with w_k = 1/(hw) #{ij: A_kij > μ_k + κ σ_k}.

    μ_k and σ_k are the mean and the standard deviation of channel k, and κ is the parameter `k`. This is
    pytorch-grad-cam's FEM. That of Fuad et al. 2020, section III, adds up binary maps of the values that stand out,
    each weighted by μ_k. The method does not use the score: the map is the same for every target.

    Returns:
        Terms w_k A_k [B,C,h,w].
    """
    deviations = activations.std((2, 3), correction=0, keepdim=True)
    stands_out = activations > activations.mean((2, 3), keepdim=True) + k * deviations
    return stands_out.float().mean((2, 3), keepdim=True) * activations


def eigencam(activations: Tensor, gradients: Tensor, scores: Tensor) -> Tensor:
    """Project the feature maps onto their first principal component.

    L = (A − Ā) v, where A has a row for each position and a column for each channel, Ā is the mean of its rows, and v
    is the first right singular vector of A − Ā.

    Muhammad and Yeasin 2020, section III, who do not subtract Ā; pytorch-grad-cam does, too. A singular vector has no
    sign of its own. It gets the one with which the score rises, v · Σ_ij g_ij ≥ 0; with it the map correlates
    positively with Grad-CAM's. Where every gradient is zero, it correlates positively with the sum of the channels.

    Returns:
        Maps [B,h,w].
    """
    return _align_sign(_first_component(activations), _rising(activations, gradients, scores))


def _rising(activations: Tensor, gradients: Tensor, scores: Tensor) -> Tensor:
    """Return the map of Grad-CAM [B,h,w], or the sum of the channels where every gradient is zero."""
    has_gradient = gradients.flatten(1).any(1)[:, None, None]
    return torch.where(has_gradient, gradcam(activations, gradients, scores).sum(1), activations.sum(1))


def eigengradcam(activations: Tensor, gradients: Tensor, _scores: Tensor) -> Tensor:
    """Project the feature maps times their gradients onto their first principal component.

    L = (T − T̄) v, where T = g ⊙ A has a row for each position and a column for each channel, T̄ is the mean of its
    rows, and v is the first right singular vector of T − T̄.

    The sign of v is the one with which the map correlates positively with HiResCAM's, Σ_k T_k. Gildenblat 2021,
    pytorch-grad-cam, after Muhammad and Yeasin 2020.

    Returns:
        Maps [B,h,w].
    """
    return principal(gradients * activations)


def principal(terms: Tensor) -> Tensor:
    """Project the terms of all channels [B,C,h,w] onto their first principal component [B,h,w].

    L = (T − T̄) v, where T has a row for each position and a column for each channel, T̄ is the mean of its rows, and v
    is the first right singular vector of T − T̄, with the sign with which L correlates positively with the sum of the
    terms. Muhammad and Yeasin 2020, arXiv:2008.00299, section III.
    """
    return _align_sign(_first_component(terms), terms.sum(1))


def _first_component(terms: Tensor) -> Tensor:
    """Return the projection onto the first principal component [B,h,w], of either sign; NaN for terms with NaN or inf.

    M is the centred matrix of positions and channels. With M = UΣVᵀ the projection is M v = σ u. The smaller of MᵀM and
    MMᵀ is decomposed, in float64, so that forming MᵀM loses nothing at float32 precision. This is 3 to 8 times as fast
    as the singular value decomposition of M in float32, and more accurate.
    """
    finite, matrix = _centred_positions(terms)
    if matrix.shape[1] > matrix.shape[2]:
        _, vector = _principal_pair(matrix.mT @ matrix)
        return _reshape_to_grid(matrix @ vector, finite, terms)
    value, vector = _principal_pair(matrix @ matrix.mT)
    return _reshape_to_grid(vector * value.clamp(min=0).sqrt(), finite, terms)


MAX_SIZE_MOVED_TO_CPU = 256
"""Number of rows of the largest matrix that is copied from a GPU to be decomposed: a GPU is slower for small ones."""


def _principal_pair(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalue [B,1,1] and its eigenvector [B,n,1] of symmetric matrices [B,n,n]."""
    device = device_for(matrices.device)
    on_host = device.is_cpu or matrices.shape[1] <= MAX_SIZE_MOVED_TO_CPU
    values, vectors = torch.linalg.eigh(matrices.cpu() if on_host else matrices)
    value, vector = values[:, -1, None, None], vectors[:, :, -1:]
    return (device.copied(value), device.copied(vector)) if on_host else (value, vector)


def _centred_positions(terms: Tensor) -> tuple[Tensor, Tensor]:
    """Return which images have finite terms, bool [B,1,1], and the centred matrix of each, float64 [B,hw,C].

    The matrix has a row for each position. It is zero for an image whose terms have NaN or inf. It is float64, because
    a decomposition amplifies rounding errors if two of its eigenvalues are close.
    """
    matrix = terms.flatten(2).transpose(1, 2)
    matrix = matrix.double() if device_for(matrix.device).has_float64 else matrix.cpu().double()
    finite = matrix.isfinite().all(2, keepdim=True).all(1, keepdim=True)  # a decomposition fails on other values
    matrix = torch.where(finite, matrix, 0)
    return finite, matrix - matrix.mean(1, keepdim=True)


def _reshape_to_grid(positions: Tensor, finite: Tensor, terms: Tensor) -> Tensor:
    """Reshape a value for each position [B,hw,1] to maps [B,h,w], NaN for an image whose terms have NaN or inf."""
    return torch.where(finite, positions, torch.nan).reshape(terms.shape[0], *terms.shape[2:]).to(terms)


def _align_sign(maps: Tensor, reference: Tensor) -> Tensor:
    """Negate each map [B,h,w] that correlates negatively with its reference [B,h,w]."""
    centred = reference - reference.mean((1, 2), keepdim=True)
    return maps * torch.where((centred * maps).sum((1, 2), keepdim=True) < 0, -1.0, 1.0)


MAX_POSITIONS = 1024
"""Number of positions of the finest grid, 32×32, that kpcacam accepts.

Its kernel matrix, 1024×1024, takes half a second to decompose. The kernel matrix of a 56×56 grid would take ten seconds
or more.
"""


def kpcacam(activations: Tensor, gradients: Tensor, scores: Tensor, *, kernel: str) -> Tensor:
    """Project the feature maps onto the first component of their kernel PCA.

    L = √λ u, where λ and u are the largest eigenvalue and its eigenvector of the centred kernel matrix K(x, y), in
    which x and y are the values of all channels at two positions.

    First, each channel is centred. With γ = 1 / the number of channels, K is: sigmoid tanh(γ x·y + 1), rbf
    exp(−γ |x − y|²), poly (γ x·y + 1)³, cosine x·y / (|x| |y|), or linear x·y, which is EigenCAM. The sign of u is the
    one with which the map correlates positively with Grad-CAM's, or with the sum of the channels where every gradient
    is zero. The layer's grid can have up to 1024 positions, such
    as 32×32. Karmani et al. 2024, arXiv:2410.00267, section 3.

    Returns:
        Maps [B,h,w].

    Raises:
        FailedPrecondition: the layer's grid is too fine.
    """
    positions = activations[0, 0].numel()
    if positions > MAX_POSITIONS:
        raise FailedPrecondition(
            f"the layer's grid has {positions} positions; kpcacam takes up to {MAX_POSITIONS}: name a deeper layer"
        )
    finite, matrix = _centred_positions(activations)
    value, vector = _principal_pair(_centre_kernel(KERNELS[kernel](matrix)))
    component = vector * value.clamp(min=0).sqrt()
    maps = _reshape_to_grid(component, finite, activations)
    return _align_sign(maps, _rising(activations, gradients, scores))


def _centre_kernel(kernel: Tensor) -> Tensor:
    """Centre kernel matrices [B,n,n] in the kernel's feature space."""
    return kernel - kernel.mean(1, keepdim=True) - kernel.mean(2, keepdim=True) + kernel.mean((1, 2), keepdim=True)


def _linear_kernel(vectors: Tensor) -> Tensor:
    return vectors @ vectors.transpose(1, 2)


def _cosine_kernel(vectors: Tensor) -> Tensor:
    return _linear_kernel(functional.normalize(vectors, dim=2))


def _rbf_kernel(vectors: Tensor) -> Tensor:
    return (-(torch.cdist(vectors, vectors) ** 2) / vectors.shape[2]).exp()


KERNELS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda vectors: torch.tanh(_linear_kernel(vectors) / vectors.shape[2] + 1),
    "rbf": _rbf_kernel,
    "poly": lambda vectors: (_linear_kernel(vectors) / vectors.shape[2] + 1) ** 3,
    "cosine": _cosine_kernel,
    "linear": _linear_kernel,
}
"""Kernels by name: vectors [B,n,C] -> kernel matrices [B,n,n]."""


def fullgrad(terms: Tensor, *, size: tuple[int, int]) -> Tensor:
    """Add up the contributions of the input and of the layers' biases to the score.

    M = Σ_c ψ(∂S/∂x_c ⊙ x_c) + Σ_l Σ_c ψ(g_lc b_lc), where b_lc is the bias of channel c of layer l and g_lc the
    gradient of the score at the output of that layer.

    ψ takes absolute values, scales those of one layer together to 0..1, and resizes them to the input bilinearly, with
    corners aligned. Srinivas and Fleuret 2019, arXiv:1905.00780, equation 5, with the scaling of the authors' code.
    The bias of a batch normalisation is the one that remains if it is written as a scale and a shift. Biases of
    convolutions, normalisations and linear layers count if their output has a grid over the image; others are left
    out. In a network of ReLUs the terms before ψ add up to the score, if those without a grid are added (equation 3).
    Other activations have implicit biases too, which are left out.

    Args:
        terms: of one layer [B,C,h,w].
        size: height and width of the input.

    Returns:
        Maps [B,H,W] of that layer.
    """
    strength = terms.abs()
    strength = strength - strength.amin((1, 2, 3), keepdim=True)
    largest = strength.amax((1, 2, 3), keepdim=True)
    total = (strength / torch.where(largest == 0, 1, largest)).sum(1, keepdim=True)
    return functional.interpolate(total, size, mode="bilinear", align_corners=True)[:, 0]


def refinecam(maps: Map) -> Map:
    """Multiply the Grad-CAM maps of several layers, coarse and fine.

    L = Π_l L_l over the layers l, where each map L_l goes through a ReLU, is min-max normalised, and is resized to the
    finest grid bilinearly.

    If a request names one layer, camserve adds the last layer of each finer grid before it, up to four layers in all.

    Domeniconi et al. 2026, arXiv:2605.14641. Libraries that have this method use Grad-CAM++ maps by default. camserve
    uses Grad-CAM's, because they change only by a factor if the score is multiplied by a positive constant.

    Args:
        maps: normalised and resized maps [layers,h,w].
    """
    return cast("Map", maps.prod(0))


SCALE_STEP = 2 / 7
"""Difference between one scale of SESS and the next, as a share of the image's size."""


def windows(*, height: int, width: int, scales: float, **_parameters: float | str) -> Sequence[View]:
    """Return the windows of SESS: side by side over the image at every scale, the last shifted to end at its edge."""
    return [
        View(scale=scale, top=top, left=left)
        for scale in (1 + SCALE_STEP * number for number in range(int(scales)))
        for large in [View(scale=scale).enlarged(height, width)]
        for top in _window_starts(large[0], height)
        for left in _window_starts(large[1], width)
    ]


def _window_starts(length: int, window: int) -> list[int]:
    """Return the starts of the windows that cover a length."""
    return [min(start, length - window) for start in range(0, length, window)]


def sess(
    maps: Map, probabilities: Map, views: Sequence[View], *, height: int, width: int, **_parameters: float | str
) -> Map:
    """Combine the Grad-CAM maps of windows that slide over the image at several scales.

    M = G(Σ_v p_v m_v / #{v: p_v m_v > 0}), for each pixel, where m_v is the map of window v, p_v the target's
    probability there divided by the largest among all windows, and G a Gaussian filter of 11 × 11 pixels with σ = 5.

    The windows slide over enlarged copies of the image, of 1 + 2s/7 times its size for s = 0, 1, …. m_v goes through a
    ReLU, is resized to the window bilinearly, min-max normalised, put where the window was in the enlarged image, and
    resized with that to the image.

    The probability is the softmax for a class, and the score for a target that is a probability or a detection. For any
    other target, and for a model without a softmax, it is the logistic function of the score. Tursun et al. 2022,
    arXiv:2207.01769, section 3, with the scales of the authors' code, which uses 12.

    Args:
        maps: maps of the windows [n,h,w].
        probabilities: the target's probability in each window [n].
        views: the windows.
        height: height of the model's input.
        width: width of the model's input.

    Returns:
        Map [H,W].
    """
    total, count = (torch.zeros(height, width, dtype=torch.float32) for _ in range(2))
    weights = torch.from_numpy(probabilities / max(float(probabilities.max()), 1e-30))
    for heatmap, weight, view in zip(torch.from_numpy(maps), weights, views, strict=True):
        weighted_map = weight * _place_window(heatmap, view, (height, width))
        total += weighted_map
        count += weighted_map > 0
    return cast("Map", _blur(total / count.clamp(min=1)).numpy())


def _place_window(heatmap: Tensor, view: View, size: tuple[int, int]) -> Tensor:
    """Scale the map [h,w] of a window to 0..1 and return it at its place in the image [H,W]."""
    window = _resize(heatmap.clamp(min=0), size)
    window = window - window.min()
    canvas = torch.zeros(view.enlarged(*size), dtype=torch.float32)
    canvas[view.top : view.top + size[0], view.left : view.left + size[1]] = window / window.max().clamp(min=1e-30)
    return _resize(canvas, size)


def _resize(heatmap: Tensor, size: tuple[int, int]) -> Tensor:
    return functional.interpolate(heatmap[None, None], size, mode="bilinear", align_corners=False)[0, 0]


def _blur(heatmap: Tensor) -> Tensor:
    """Blur a map [H,W] by a Gaussian of 11 pixels, σ = 5; beyond its edges it is mirrored."""
    taps = torch.exp(-(torch.arange(-5.0, 6.0, dtype=torch.float32) ** 2) / 50)
    taps = taps / taps.sum()
    padded = functional.pad(heatmap[None, None], (5, 5, 5, 5), mode="reflect")
    rows = functional.conv2d(padded, taps[None, None, :, None])
    return functional.conv2d(rows, taps[None, None, None, :])[0, 0]
