"""The first convolution of a network, rebuilt for another number of channels."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from camserve_server.core.errors import ConfigError
from camserve_server.imaging.values import Preprocess
from camserve_server.models.live import runs
from camserve_server.models.spec import ModelSpec

RGB = 3


def rebuild(module: nn.Module, channels: int) -> None:
    """Replace the first convolution of a network, which takes RGB, by one with other channels, in place.

    Its weights are adapted as by `adapt_weight`.

    Raises:
        ConfigError: the first convolution takes no RGB.
    """
    name, first = next(((name, child) for name, child in module.named_modules() if _is_convolution(child)), ("", None))
    if not isinstance(first, nn.Conv2d) or first.in_channels != RGB:
        raise ConfigError("channels= needs a network whose first module with weights is a convolution of RGB")
    convolution = nn.Conv2d(
        channels,
        first.out_channels,
        first.kernel_size,  # type: ignore[arg-type]  # a pair, which torch's annotation does not say
        first.stride,  # type: ignore[arg-type]
        first.padding,  # type: ignore[arg-type]
        first.dilation,  # type: ignore[arg-type]
        bias=first.bias is not None,
        padding_mode=first.padding_mode,
    )
    with torch.no_grad():
        convolution.weight.copy_(adapt_weight(first.weight, channels))
        if convolution.bias is not None and first.bias is not None:
            convolution.bias.copy_(first.bias)
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, convolution)


def channels_of(module: nn.Module) -> int:
    """Return the number of channels that the first convolution of a network takes; 0 without a convolution."""
    first = next(filter(_is_convolution, module.modules()), None)
    return first.in_channels if isinstance(first, nn.Conv2d) else 0


def input_channels(network: nn.Module, height: int, width: int) -> int:
    """Return the number of channels of a network's input: those of its first convolution, unless it runs on RGB."""
    channels = channels_of(network)
    return RGB if channels in (0, RGB) or runs(network, (1, RGB, height, width)) else channels


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d)


def adapt_weight(weight: Tensor, channels: int) -> Tensor:
    """Return the weight of a convolution of RGB for another number of channels.

    For one channel the weights of red, green and blue are added up, so that a grey image gives the same as its RGB. For
    more they are repeated and multiplied by 3 / channels. Both as in timm.

    Args:
        weight: the weight [out,3,h,w].
        channels: the number of channels.
    """
    if channels == 1:
        return weight.sum(1, keepdim=True)
    repeated = weight.repeat(1, -(-channels // RGB), 1, 1)[:, :channels]
    return repeated * (RGB / channels)


def adapt_state(state: Mapping[str, Tensor], module: nn.Module, channels: int | None) -> Mapping[str, Tensor]:
    """Return weights of a network for RGB as weights for this network, if they are that, and otherwise as they are."""
    if channels is None or channels == RGB:
        return state
    own = module.state_dict()
    adapted = {
        name: adapt_weight(tensor, channels)
        for name, tensor in state.items()
        if name in own
        and tensor.dim() == 4  # noqa: PLR2004 -- the weight of a convolution
        and tensor.shape[1] == RGB
        and own[name].shape == (tensor.shape[0], channels, *tensor.shape[2:])
    }
    return {**state, **adapted} if len(adapted) == 1 else state


def with_statistics(preprocess: Preprocess, spec: ModelSpec) -> Preprocess:
    """Return a preprocessing with the channels, the mean and the standard deviation of a spec.

    Without mean and std, those of RGB stay for three channels; other channels have their averages.

    Raises:
        ConfigError: mean or std has another number of values than the input has channels.
    """
    channels = spec.channels or preprocess.channels
    mean, std = (
        _for_channels(given, own, channels, name)
        for given, own, name in ((spec.mean, preprocess.mean, "mean"), (spec.std, preprocess.std, "std"))
    )
    if (mean, std) == (preprocess.mean, preprocess.std):
        return preprocess
    if preprocess.prepare is not None:
        raise ConfigError("mean= and std= are for models without a transform of their own")
    return replace(preprocess, mean=mean, std=std)


def of_channels(preprocess: Preprocess, channels: int) -> Preprocess:
    """Return a preprocessing for another number of channels, each with the averages of those that there are."""
    mean, std = (_for_channels((), own, channels, "") for own in (preprocess.mean, preprocess.std))
    return replace(preprocess, mean=mean, std=std)


def _for_channels(given: tuple[float, ...], own: tuple[float, ...], channels: int, name: str) -> tuple[float, ...]:
    if not given:
        return own if len(own) == channels else (sum(own) / len(own),) * channels
    if len(given) == 1:
        return given * channels
    if len(given) != channels:
        raise ConfigError(f"{name}= has {len(given)} numbers, and the input has {channels} channels")
    return given
