"""Changed copies of networks: harmless ones, such as another precision, and random weights."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def quantised(network: nn.Module, *, per_channel: bool) -> nn.Module:
    """Return a copy whose weights are rounded to int8, with one scale for each channel or for each tensor."""

    def rounded(weight: Tensor) -> Tensor:
        axes = tuple(range(1, weight.ndim)) if per_channel else tuple(range(weight.ndim))
        scale = weight.abs().amax(axes, keepdim=True).clamp(min=1e-12) / 127
        return (weight / scale).round() * scale

    return _with_weights(network, rounded)


def rounded(network: nn.Module, share: float = 1e-6, seed: int = 0) -> nn.Module:
    """Return a copy whose weights have relative errors, as large as those of float32 on another machine."""
    generator = torch.Generator().manual_seed(seed)
    return _with_weights(network, lambda weight: weight * (1 + share * torch.randn(weight.shape, generator=generator)))


def randomised(network: nn.Module, seed: int, within: str = "") -> nn.Module:
    """Return a copy with random parameters in a module, each drawn with its own mean and standard deviation."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(weight: Tensor) -> Tensor:
        return torch.randn(weight.shape, generator=generator) * weight.std(correction=0) + weight.mean()

    return _with_weights(network, drawn, within, least=1)


def in_bfloat16(network: nn.Module, blocks: Sequence[str]) -> nn.Module:
    """Return a copy whose weights, and the outputs of whose blocks, have the precision of bfloat16."""
    halved = _with_weights(network, lambda weight: weight.bfloat16().float(), least=1)

    def hook(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output + (output.bfloat16().float() - output).detach()

    for name in blocks:
        halved.get_submodule(name).register_forward_hook(hook)
    return halved


def _with_weights(
    network: nn.Module, change: Callable[[Tensor], Tensor], within: str = "", least: int = 2
) -> nn.Module:
    """Return a copy with changed parameters: those in a module that have that many dimensions or more."""
    changed = copy.deepcopy(network)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if name.startswith(within) and parameter.ndim >= least:
                parameter.copy_(change(parameter))
    return changed
