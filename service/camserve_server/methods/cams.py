"""Class activation maps: one function for each formula.

Notation, for one image: A_k is channel k of the layer's feature maps, g_k the gradient of the score S with respect to
it, both on the grid h×w. Every function takes activations [B,C,h,w], gradients [B,C,h,w] and scores [B], and returns
the signed maps [B,h,w] before the ReLU, which belongs to the rendering.
"""

from torch import Tensor


def gradcam(activations: Tensor, gradients: Tensor, _scores: Tensor) -> Tensor:
    """Weigh each feature map by the mean of its gradient.

    L = Σ_k α_k A_k, where α_k = 1/(hw) Σ_ij g_kij. Selvaraju et al. 2017, equations 1 and 2.
    """
    return (gradients.mean((2, 3), keepdim=True) * activations).sum(1)


def hirescam(activations: Tensor, gradients: Tensor, _scores: Tensor) -> Tensor:
    """Weigh each value of the feature maps by its own gradient.

    L = Σ_k g_k ⊙ A_k. Draelos and Carin 2020, equation 4.
    """
    return (gradients * activations).sum(1)


def layercam(activations: Tensor, gradients: Tensor, _scores: Tensor) -> Tensor:
    """Weigh each value of the feature maps by its own gradient where that is positive.

    L = Σ_k ReLU(g_k) ⊙ A_k. Jiang et al. 2021, equations 5 to 7.
    """
    return (gradients.clamp(min=0) * activations).sum(1)
