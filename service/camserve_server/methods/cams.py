"""Class activation maps: one function for each formula.

Notation, for one image: A_k is channel k of the layer's feature maps, g_k the gradient of the score S with respect to
it, both on the grid h×w. Every function takes activations [B,C,h,w], gradients [B,C,h,w] and scores [B], and returns
the signed maps [B,h,w] before the ReLU, which belongs to the rendering; or, where the map is a sum over channels, its
terms [B,C,h,w], which the caller adds up.
"""

import torch
from torch import Tensor


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


def principal(terms: Tensor) -> Tensor:
    """Project the terms of all channels [B,C,h,w] on their first principal component [B,h,w].

    Of the matrix with a row for each position and a column for each channel, columns centred, the rows are projected on
    the first right singular vector. A singular vector has no sign of its own: it gets the one with which the map agrees
    with the sum of the terms. Muhammad and Yeasin 2020, arXiv:2008.00299, section III.
    """
    matrix = terms.flatten(2).transpose(1, 2)
    matrix = matrix - matrix.mean(1, keepdim=True)
    _, _, right = torch.linalg.svd(matrix, full_matrices=False)
    flat = (matrix @ right[:, :1].transpose(1, 2)).squeeze(2)
    total = terms.sum(1).flatten(1)
    agrees = ((total - total.mean(1, keepdim=True)) * flat).sum(1, keepdim=True)
    signed: Tensor = flat * torch.where(agrees < 0, -1.0, 1.0)
    return signed.reshape(terms.shape[0], *terms.shape[2:])
