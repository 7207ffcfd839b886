"""A model whose last modules have random weights, for as long as a batch runs.

The weights are exchanged in place and put back, so that there is never a second model: nothing to list, nothing to
forget, and no more memory than the random weights themselves.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from camserve_server.models.load import LoadedModel
from camserve_server.types import ModelInfo, Randomised


def stack(info: ModelInfo) -> tuple[str, ...]:
    """Return the modules that have parameters of their own, from the output down to the input.

    What belongs to no module that runs by itself counts to the nearest around it that does.
    """
    own = {name: layer.parameters for name, layer in info.layers.items()}
    for name, layer in info.layers.items():
        if around := _owner(name.rpartition(".")[0], own):
            own[around] -= layer.parameters
    return tuple(name for name in reversed(own) if own[name] > 0)


def _owner(name: str, known: dict[str, int]) -> str:
    """Return the nearest known module that holds this one, or is it; empty where only the model itself does."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


@contextmanager
def randomised(model: LoadedModel, how: Randomised | None) -> Iterator[None]:
    """Give some of a model's modules random weights inside the block.

    Every parameter is drawn anew from the normal distribution that has its mean and its standard deviation, so that
    what flows through the model keeps its size: with a constructor's own weights, a deep model that was trained with
    others may answer with nothing but zeros. What a parameter becomes depends on the seed and its name alone, so that a
    module has the same random weights in every stage of a cascade.

    Args:
        model: that is given random weights.
        how: which modules; None for none.
    """
    if how is None:
        yield
        return
    chosen = _chosen(model, how)
    kept = {name: parameter.data for name, parameter in chosen.items()}
    try:
        for name, parameter in chosen.items():
            parameter.data = _drawn(parameter.data, zlib.crc32(name.encode()) + how.seed)
        yield
    finally:
        for name, parameter in chosen.items():
            parameter.data = kept[name]


def _chosen(model: LoadedModel, how: Randomised) -> dict[str, nn.Parameter]:
    """Return the parameters that become random, by name; those of the model itself with the last of its modules."""
    modules = stack(model.info)
    top = set(modules[: how.modules]) | ({""} if how.modules >= len(modules) else set())
    known = dict.fromkeys(model.info.layers, 0)
    named = model.module.named_parameters()
    return {name: one for name, one in named if _owner(name.rpartition(".")[0], known) in top}


def _drawn(weights: Tensor, seed: int) -> Tensor:
    # Drawn on the CPU, so that every device draws the same.
    noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(seed)).to(weights)
    drawn: Tensor = noise * weights.std(correction=0) + weights.mean()
    return drawn
