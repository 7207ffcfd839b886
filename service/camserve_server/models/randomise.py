"""A model whose last modules have random weights, for as long as a batch runs.

The weights are exchanged in place and put back, so that there is never a second model: nothing to list, and no more
memory than the random weights themselves. A GPU keeps these for the next batch: while the CPU draws, it has nothing to
do. resnet50 takes 0.17 s, several times as long as its batch.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from camserve_server.core.devices import device_of
from camserve_server.models.load import LoadedModel
from camserve_server.models.values import ModelInfo, Randomised


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
    drawn = _drawn_before(model, how.seed)
    try:
        for name, parameter in chosen.items():
            if name not in drawn:
                drawn[name] = _drawn(parameter.data, zlib.crc32(name.encode()) + how.seed)
            parameter.data = drawn[name]
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


def _drawn_before(model: LoadedModel, seed: int) -> dict[str, Tensor]:
    """Return the random weights that a model's device keeps, by name: those of the newest seed, on a CPU none."""
    if device_of(model.info.device).is_cpu:
        return {}
    if seed not in model.drawn:
        model.drawn.clear()
    return model.drawn.setdefault(seed, {})


def _drawn(weights: Tensor, seed: int) -> Tensor:
    # Drawn on the CPU, so that every device draws the same. Not in page-locked memory: torch keeps that for the life of
    # the process, and the largest weight of vgg16 has 392 MiB.
    noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(seed))
    noise = device_of(weights.device).upload(noise).to(weights.dtype)
    drawn: Tensor = noise * weights.std(correction=0) + weights.mean()
    return drawn
