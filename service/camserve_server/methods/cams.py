"""Class activation maps: one function for each formula.

Notation, for one image: A_k is channel k of the layer's feature maps, g_k the gradient of the score S with respect to
it, both on the grid h×w. Every function takes activations [B,C,h,w], gradients [B,C,h,w] and scores [B], and returns
the signed maps [B,h,w] before the ReLU, which belongs to the rendering; or, where the map is a sum over channels, its
terms [B,C,h,w], which the caller adds up.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from camserve_server.core.arrays import Map
from camserve_server.core.devices import device_of
from camserve_server.core.errors import FailedPrecondition
from camserve_server.imaging.values import View


def gradcam(activations: Tensor, gradients: Tensor, _scores: Tensor) -> Tensor:
    """Weigh each feature map by the mean of its gradient.

    L = Σ_k α_k A_k, where α_k = 1/(hw) Σ_ij g_kij. Selvaraju et al. 2017, equations 1 and 2.
    """
    return gradients.mean((2, 3), keepdim=True) * activations


def hirescam(activations: Tensor, gradients: Tensor, _scores: Tensor) -> Tensor:
    """Weigh each value of the feature maps by its own gradient.

    L = Σ_k g_k ⊙ A_k. Draelos and Carin 2020, equation 4.
    """
    return gradients * activations


def layercam(activations: Tensor, gradients: Tensor, _scores: Tensor) -> Tensor:
    """Weigh each value of the feature maps by its own gradient where that is positive.

    L = Σ_k ReLU(g_k) ⊙ A_k. Jiang et al. 2021, equations 5 to 7.
    """
    return gradients.clamp(min=0) * activations


def gradcam_elementwise(activations: Tensor, gradients: Tensor, _scores: Tensor) -> Tensor:
    """Weigh each value of the feature maps by its own gradient and keep what is positive.

    L = Σ_k ReLU(g_k ⊙ A_k). Gildenblat 2021, pytorch-grad-cam: HiResCAM without what speaks against the score.
    """
    return (gradients * activations).clamp(min=0)


def xgradcam(activations: Tensor, gradients: Tensor, _scores: Tensor) -> Tensor:
    """Weigh each feature map by the mean of its gradient, taken where the map is strong.

    L = Σ_k α_k A_k, where α_k = Σ_ij g_kij A_kij / Σ_ij A_kij. Fu et al. 2020, equations 7 and 8. A map whose sum is
    zero has no such mean and gets no weight. At a layer without a ReLU behind it sums may also be close to zero or
    below, which the paper does not foresee: a few channels then have most of the weight.
    """
    total = activations.sum((2, 3), keepdim=True)
    weight = (gradients * activations).sum((2, 3), keepdim=True) / torch.where(total == 0, 1, total)
    return torch.where(total == 0, 0, weight) * activations


def gradcam_plus_plus(activations: Tensor, gradients: Tensor, _scores: Tensor, *, variant: str) -> Tensor:
    """Weigh each feature map by its positive gradients, each by how much of the evidence it stands for.

    L = Σ_k w_k A_k, where w_k = Σ_ij α_kij ReLU(g_kij) and α_kij = g² / (2 g² + g³ Σ_ab A_kab). Chattopadhay et al.
    2018, equation 19. In the variant "official" the α of a channel are divided by their sum over its positive
    gradients, as the authors' code does. The paper's feature maps are behind a ReLU, and α is between 0 and 1/2; where
    a sum is negative, g³ ΣA counts as zero, for else the denominator may vanish. No constant is added to it: gradients
    of deep layers are so small that a constant of 1e-6, which keeps other codes from dividing by zero, decides the map.
    """
    greatest = _greatest(gradients)
    relative = gradients / greatest
    alpha = _alpha(relative**2, relative**3 * greatest, activations.sum((2, 3), keepdim=True))
    if variant == "official":
        shares = torch.where(gradients > 0, alpha, 0).sum((2, 3), keepdim=True)
        alpha = alpha / torch.where(shares == 0, 1, shares)
    return (alpha * gradients.clamp(min=0)).sum((2, 3), keepdim=True) * activations


def _greatest(gradients: Tensor) -> Tensor:
    """Return the largest |g| of each image [B,1,1,1], 1 where there is none: squares and cubes then do not vanish."""
    greatest = gradients.abs().amax((1, 2, 3), keepdim=True)
    return torch.where(greatest == 0, 1, greatest)


def _alpha(square: Tensor, cube: Tensor, total: Tensor) -> Tensor:
    """Return α of Grad-CAM++ from g² and g³, both divided by the largest g², and Σ_ab A [..,C,1,1]."""
    return torch.where(square == 0, 0, square / (2 * square + (cube * total).clamp(min=0)))


def smoothgradcam_plus_plus(
    _activations: Tensor, gradients: Tensor, _scores: Tensor, **_parameters: float | str
) -> Tensor:
    """Weigh each feature map as Grad-CAM++ does, by derivatives that are means over noisy copies of the image.

    L = Σ_k w_k A_k, where w_k = Σ_ij α_kij ReLU(D1), α_kij = D2 / (2 D2 + D3 Σ_ab A_kab), Dn is the mean of g^n over
    the copies x + N(0, σ²), and A belongs to the image as it is. Omeiza et al. 2019, section 3. The paper prints D1
    for α's numerator, with which α would grow as the score shrinks; it is D2 in Grad-CAM++, whose α it means to smooth.
    """
    return torch.stack([gradients, gradients**2, gradients**3], 1)


def from_means(mean: Tensor, *, features: Tensor, **_parameters: float | str) -> Tensor:
    """Turn the means of g, g² and g³ [3,C,h,w] and the feature maps [C,h,w] of the image as it is into a map [h,w]."""
    first, second, third = mean
    greatest = second.max()
    scale = torch.where(greatest == 0, 1, greatest)
    alpha = _alpha(second / scale, third / scale, features.sum((1, 2), keepdim=True))
    weight = (alpha * first.clamp(min=0)).sum((1, 2), keepdim=True)
    return cast("Tensor", (weight * features).sum(0))


def shapleycam(activations: Tensor, gradients: Tensor, _scores: Tensor, *, curvature: Tensor) -> Tensor:
    """Weigh each feature map by the mean of its gradient, corrected for how the gradient itself bends.

    L = Σ_k α_k A_k, where α_k = 1/(hw) Σ_ij (g − ½ H·A)_kij and H is the Hessian of the score with respect to the
    feature maps: a second-order estimate of each one's Shapley value. Cai 2025, arXiv:2501.06261, section 4. Where
    nothing but ReLUs, pooling and linear layers follows, a logit has no curvature and the map is Grad-CAM's: it
    differs behind the layers of networks with GELU, SiLU, attention or a norm. The paper's own target, the logit minus
    the cross-entropy, bends in every network.
    """
    return (gradients - 0.5 * curvature).mean((2, 3), keepdim=True) * activations


def fem(activations: Tensor, _gradients: Tensor, _scores: Tensor, *, k: float) -> Tensor:
    """Add up the feature maps, each weighed by how much of it stands out.

    L = Σ_k w_k A_k, where w_k is the share of the grid on which A_k > μ_k + k σ_k, its own mean and k standard
    deviations. Fuad et al. 2020, section III. It looks at no score: the map is the same for every target.
    """
    spread = activations.std((2, 3), correction=0, keepdim=True)
    strong = activations > activations.mean((2, 3), keepdim=True) + k * spread
    return strong.float().mean((2, 3), keepdim=True) * activations


def eigencam(activations: Tensor, gradients: Tensor, scores: Tensor) -> Tensor:
    """Project the feature maps on their first principal component.

    L = (A − Ā) v, where A has a row for each position and a column for each channel, and v is the first right singular
    vector of A − Ā. Muhammad and Yeasin 2020, section III. A singular vector has no sign of its own: it gets the one in
    which the score rises, v · Σ_ij g_ij ≥ 0, which is the one with which the map correlates with Grad-CAM's.
    """
    return _agreeing(_component(activations), gradcam(activations, gradients, scores).sum(1))


def eigengradcam(activations: Tensor, gradients: Tensor, _scores: Tensor) -> Tensor:
    """Project the feature maps times their gradients on their first principal component.

    L = (T − T̄) v, where T = g ⊙ A has a row for each position and a column for each channel, and v is the first right
    singular vector of T − T̄, with the sign with which the map agrees with ΣT, HiResCAM's. Gildenblat 2021,
    pytorch-grad-cam, after Muhammad and Yeasin 2020.
    """
    return principal(gradients * activations)


def principal(terms: Tensor) -> Tensor:
    """Project the terms of all channels [B,C,h,w] on their first principal component [B,h,w].

    Of the matrix with a row for each position and a column for each channel, columns centred, the rows are projected on
    the first right singular vector. A singular vector has no sign of its own: it gets the one with which the map agrees
    with the sum of the terms. Muhammad and Yeasin 2020, arXiv:2008.00299, section III.
    """
    return _agreeing(_component(terms), terms.sum(1))


def _component(terms: Tensor) -> Tensor:
    """Return the first principal component [B,h,w], of either sign; NaN for an image that is not finite.

    With M = UΣVᵀ it is M v = σ u. The smaller of MᵀM and MMᵀ is decomposed, in float64, where squaring M costs no
    accuracy that float32 has: 3 to 8 times as fast as the singular values of M in float32, and closer to the truth.
    """
    finite, matrix = _rows(terms)
    if matrix.shape[1] > matrix.shape[2]:
        _, vector = _principal_pair(matrix.mT @ matrix)
        return _grid(matrix @ vector, finite, terms)
    value, vector = _principal_pair(matrix @ matrix.mT)
    return _grid(vector * value.clamp(min=0).sqrt(), finite, terms)


SMALL = 256
"""Rows of a symmetric matrix up to which it is decomposed on the CPU: a GPU takes longer for many small ones."""


def _principal_pair(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalue [B,1,1] and its eigenvector [B,n,1] of symmetric matrices [B,n,n]."""
    device = device_of(matrices.device)
    on_host = device.is_cpu or matrices.shape[1] <= SMALL
    values, vectors = torch.linalg.eigh(matrices.cpu() if on_host else matrices)
    found = values[:, -1, None, None], vectors[:, :, -1:]
    return (device.copied(found[0]), device.copied(found[1])) if on_host else found


def _rows(terms: Tensor) -> tuple[Tensor, Tensor]:
    """Return which images [B,1,1] are finite, and a centred row for each position [B,hw,C], zero where they are not.

    The rows are float64: a decomposition amplifies rounding where two of its values are close.
    """
    matrix = terms.flatten(2).transpose(1, 2)
    matrix = matrix.double() if device_of(matrix.device).has_float64 else matrix.cpu().double()
    finite = matrix.isfinite().all(2, keepdim=True).all(1, keepdim=True)  # no decomposition takes what is not
    matrix = torch.where(finite, matrix, 0)
    return finite, matrix - matrix.mean(1, keepdim=True)


def _grid(flat: Tensor, finite: Tensor, terms: Tensor) -> Tensor:
    return torch.where(finite, flat, torch.nan).reshape(terms.shape[0], *terms.shape[2:]).to(terms)


def _agreeing(maps: Tensor, guide: Tensor) -> Tensor:
    """Turn each map [B,h,w] round that does not correlate with its guide."""
    centred = guide - guide.mean((1, 2), keepdim=True)
    return maps * torch.where((centred * maps).sum((1, 2), keepdim=True) < 0, -1.0, 1.0)


POSITIONS = 1024
"""Positions of a grid, 32×32, of which a kernel matrix is decomposed: half a second; 56×56 would take ten or more."""


def kpcacam(activations: Tensor, gradients: Tensor, scores: Tensor, *, kernel: str) -> Tensor:
    """Project the feature maps on their first principal component as a kernel sees them.

    L = √λ u, where λ and u are the largest eigenvalue and its eigenvector of the centred kernel matrix of all
    positions' features, channels centred before. With γ one over the number of channels: sigmoid tanh(γ x·y + 1), rbf
    exp(−γ |x − y|²), poly (γ x·y + 1)³, cosine x·y / |x||y|, linear x·y, which is EigenCAM. Karmani et al. 2024,
    arXiv:2410.00267, section 3. The sign is the one with which the map correlates with Grad-CAM's.

    Raises:
        FailedPrecondition: the layer's grid is too fine.
    """
    positions = activations[0, 0].numel()
    if positions > POSITIONS:
        raise FailedPrecondition(
            f"the layer's grid has {positions} positions; kpcacam takes up to {POSITIONS}: name a deeper layer"
        )
    finite, matrix = _rows(activations)
    value, vector = _principal_pair(_centred(KERNELS[kernel](matrix)))
    flat = vector * value.clamp(min=0).sqrt()
    return _agreeing(_grid(flat, finite, activations), gradcam(activations, gradients, scores).sum(1))


def _centred(kernel: Tensor) -> Tensor:
    """Centre kernel matrices [B,n,n] in the space that the kernel maps to."""
    return kernel - kernel.mean(1, keepdim=True) - kernel.mean(2, keepdim=True) + kernel.mean((1, 2), keepdim=True)


def _linear(rows: Tensor) -> Tensor:
    return rows @ rows.transpose(1, 2)


def _cosine(rows: Tensor) -> Tensor:
    return _linear(functional.normalize(rows, dim=2))


def _rbf(rows: Tensor) -> Tensor:
    return (-(torch.cdist(rows, rows) ** 2) / rows.shape[2]).exp()


KERNELS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda rows: torch.tanh(_linear(rows) / rows.shape[2] + 1),
    "rbf": _rbf,
    "poly": lambda rows: (_linear(rows) / rows.shape[2] + 1) ** 3,
    "cosine": _cosine,
    "linear": _linear,
}
"""Rows [B,n,C] -> kernel matrices [B,n,n]."""


def fullgrad(terms: Tensor, *, size: tuple[int, int]) -> Tensor:
    """Add up what the input and every bias contribute to the score.

    M = ψ(∇S ⊙ x) + Σ_l Σ_c ψ(g_lc b_lc), where b_lc is the bias of channel c of layer l, g_lc the gradient behind it,
    and ψ takes absolute values, scales those of a layer to 0 to 1 and brings them to the input's size, bilinearly and
    corner to corner. Srinivas and Fleuret 2019, arXiv:1905.00780, equation 5, with the scaling of the authors' code. A
    batch normalisation has the bias that remains when it is written as a scale and a shift. Biases of convolutions,
    normalisations and linear layers count where their output has a grid over the image. In a network of ReLUs the
    terms, with those that have no grid, add up to the score (equation 3); other activations have implicit biases
    besides, which are left out.
    """
    strength = terms.abs()
    strength = strength - strength.amin((1, 2, 3), keepdim=True)
    greatest = strength.amax((1, 2, 3), keepdim=True)
    total = (strength / torch.where(greatest == 0, 1, greatest)).sum(1, keepdim=True)
    return functional.interpolate(total, size, mode="bilinear", align_corners=True)[:, 0]


def refinecam(maps: Map) -> Map:
    """Multiply the Grad-CAM maps of several layers: what is coarse and sure with what is fine.

    L = Π_l L_l, each map cut at zero, scaled to 0 to 1 and brought to the finest grid bilinearly. Where one layer is
    named, it is joined by the last layer of each finer grid before it. Domeniconi et al. 2026, arXiv:2605.14641. The
    libraries that have it take Grad-CAM++'s maps unless told otherwise; these are Grad-CAM's, which keep their shape
    when the score is scaled.
    """
    return cast("Map", maps.prod(0))


STEP = 2 / 7
"""By how much of the image's size a scale of SESS is larger than the one before."""


def windows(*, height: int, width: int, scales: float, **_parameters: float | str) -> Sequence[View]:
    """Return the windows of SESS: side by side over the image at every scale, the last ones moved back into it."""
    return [
        View(scale=scale, top=top, left=left)
        for scale in (1 + STEP * number for number in range(int(scales)))
        for large in [View(scale=scale).enlarged(height, width)]
        for top in _starts(large[0], height)
        for left in _starts(large[1], width)
    ]


def _starts(length: int, window: int) -> list[int]:
    """Return where windows begin that cover a length."""
    return [min(start, length - window) for start in range(0, length, window)]


def sess(maps: Map, chances: Map, views: Sequence[View], *, height: int, width: int, **_parameters: float | str) -> Map:
    """Put together the Grad-CAM maps of windows that slide over the image at several scales.

    M = Σ_n p_n m_n / #{n: p_n m_n > 0}, for each pixel, where m_n is the map of window n, cut at zero, scaled to 0 to 1
    and put back where the window was, and p_n the target's probability there, as a share of the greatest. Then a
    Gaussian of 11 pixels, σ = 5. Tursun et al. 2022, arXiv:2207.01769, section 3. Scale n is 1 + 2n/7 times the
    image's size, as in the authors' code, which takes 12. A target that is no class of a softmax has the logistic
    function of its score for a probability.
    """
    total, seen = torch.zeros(height, width), torch.zeros(height, width)
    weights = torch.from_numpy(chances / max(float(chances.max()), 1e-30))
    for heatmap, weight, view in zip(torch.from_numpy(maps), weights, views, strict=True):
        placed = weight * _placed(heatmap, view, (height, width))
        total += placed
        seen += placed > 0
    return cast("Map", _blurred(total / seen.clamp(min=1)).numpy())


def _placed(heatmap: Tensor, view: View, size: tuple[int, int]) -> Tensor:
    """Put the map [h,w] of a window, scaled to 0 to 1, where it belongs in the image [H,W]."""
    window = _resized(heatmap.clamp(min=0), size)
    window = window - window.min()
    canvas = torch.zeros(view.enlarged(*size))
    canvas[view.top : view.top + size[0], view.left : view.left + size[1]] = window / window.max().clamp(min=1e-30)
    return _resized(canvas, size)


def _resized(heatmap: Tensor, size: tuple[int, int]) -> Tensor:
    return functional.interpolate(heatmap[None, None], size, mode="bilinear", align_corners=False)[0, 0]


def _blurred(heatmap: Tensor) -> Tensor:
    """Blur a map [H,W] by a Gaussian of 11 pixels, σ = 5."""
    taps = torch.exp(-(torch.arange(-5.0, 6.0) ** 2) / 50)
    taps = taps / taps.sum()
    padded = functional.pad(heatmap[None, None], (5, 5, 5, 5), mode="reflect")
    rows = functional.conv2d(padded, taps[None, None, :, None])
    return functional.conv2d(rows, taps[None, None, None, :])[0, 0]
