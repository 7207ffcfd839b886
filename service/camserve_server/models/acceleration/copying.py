"""Copy a model with its folded and converted weights; all other weights are shared with the model.

In half precision the weights before the default layer are converted once, when the model is loaded. Autocast, which the
plain module runs under, converts them in every batch. After the layer everything stays float32, except self-attention
and the linear maps over all tokens.

Measured in bfloat16 at batch 8 (vit_b_16 and convnext_tiny: 4) on one thread, as multiples of the speed of the plain
float32 module: resnet50 3.00, mobilenet_v3_large 2.52, convnext_tiny 2.98, vit_b_16 2.85. The same without conversion:
1.15, 1.41, 1.01 and 0.92. docs/precision.md shows what half precision does to the maps.
"""

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # flattens every output structure that torch knows

from camserve_server.models.acceleration.folding import FoldablePair, folded_parameters, without_normalisation
from camserve_server.models.acceleration.usage import Usage

KERNEL_DIMENSIONS = 4
"""Dimensions of the weight of a convolution."""


def copy_model(
    module: nn.Module, usage: Usage, pairs: Collection[FoldablePair], converted: Collection[str], dtype: torch.dtype
) -> nn.Module:
    """Copy a model with its batch norms folded.

    Args:
        module: the frozen model.
        usage: the recorded usage of its tensors; those used only before the default layer are converted.
        pairs: the batch norms to fold.
        converted: names of modules after the default layer whose parameters are converted too.
        dtype: the type to convert to.
    """
    memo: dict[int, Any] = {}  # deepcopy takes the tensors in it instead of copying the originals
    for tensor in (*module.parameters(), *module.buffers()):
        convert = usage.only_before(tensor) and tensor.is_floating_point()
        memo[id(tensor)] = _converted(tensor, dtype) if convert else tensor
    for name in converted:
        memo |= {id(tensor): _converted(tensor, dtype) for tensor in module.get_submodule(name).parameters()}
    folded = [(pair, *folded_parameters(module, pair)) for pair in pairs]
    for pair, weight, _ in folded:
        memo[id(module.get_submodule(pair.convolution).weight)] = _parameter(weight, dtype)
    copied = copy.deepcopy(module, memo)
    for pair, _, bias in folded:
        copied.get_submodule(pair.convolution).bias = _parameter(bias, dtype)
        copied.set_submodule(pair.norm, without_normalisation(copied.get_submodule(pair.norm)))
    copied.eval()  # these two may return nothing
    copied.requires_grad_(requires_grad=False)
    return copied


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a weight, or share it with the model if it already has the type."""
    if tensor.dtype == dtype:
        return tensor
    return _parameter(tensor, dtype) if isinstance(tensor, nn.Parameter) else tensor.to(dtype)


def _parameter(tensor: Tensor, dtype: torch.dtype) -> nn.Parameter:
    order = torch.channels_last if tensor.dim() == KERNEL_DIMENSIONS else torch.preserve_format
    return nn.Parameter(tensor.detach().to(dtype, memory_format=order), requires_grad=False)


def own_kernels(copied: nn.Module, module: nn.Module) -> list[nn.Parameter]:
    """Return the convolution weights that a copy does not share with the model."""
    shared = {id(parameter) for parameter in module.parameters()}
    kernels = [parameter for parameter in copied.parameters() if parameter.dim() == KERNEL_DIMENSIONS]
    return [parameter for parameter in kernels if id(parameter) not in shared]


def find_token_linears(module: nn.Module, usage: Usage) -> list[str]:
    """Return the linear maps over all tokens after the default layer."""
    return [
        name
        for name, child in module.named_modules()
        if type(child) is nn.Linear and id(child.weight) in usage.token_weights and usage.after[id(child.weight)] == 1
    ]


def linear_in_weight_dtype(linear: nn.Linear, forward: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Apply a linear map in the precision of its weight, and return the result in the precision of the tokens."""
    return forward(tokens.to(linear.weight.dtype)).to(tokens.dtype)


def return_float32(_layer: nn.Module, _args: Any, output: Any) -> Any:
    """Convert the output of the default layer to float32: a forward hook for copies in half precision."""
    return pytree.tree_map(lambda part: part.float() if _is_float(part) else part, output)


def _is_float(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point()
