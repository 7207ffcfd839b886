"""Random weights for the last modules of a model, while a batch runs.

The weights are exchanged in place and put back afterwards. So no second model is needed, and no more memory than for
the random weights themselves. For a GPU the random weights are kept for the next batch, because the GPU would be idle
while the CPU draws them: 0.17 s for resnet50, several times as long as its batch.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from camserve_server.core.devices import device_for
from camserve_server.models.loaded import LoadedModel
from camserve_server.models.values import ModelInfo, Randomised


def stack(info: ModelInfo) -> tuple[str, ...]:
    """Return the modules that have parameters of their own, from the output to the input.

    The parameters of a module that never runs count for the nearest enclosing module that does.
    """
    own = {name: layer.parameters for name, layer in info.layers.items()}
    for name, layer in info.layers.items():
        if enclosing := _owner(name.rpartition(".")[0], own):
            own[enclosing] -= layer.parameters
    return tuple(name for name in reversed(own) if own[name] > 0)


def _owner(name: str, known: dict[str, int]) -> str:
    """Return the module itself if it is known, else the nearest known module around it; empty if only the model is."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


@contextmanager
def random_weights(model: LoadedModel, how: Randomised | None) -> Iterator[None]:
    """Give some of a model's modules random weights inside the block.

    Every parameter is drawn from the normal distribution with its own mean and standard deviation, so that activations
    keep their scale. With the initial weights of a constructor, a deep model that was trained with others may return
    only zeros. The random values depend only on the seed and the parameter's name, so a module has the same random
    weights in every stage of a cascade.

    Args:
        model: the model.
        how: the modules and the seed; None for no modules.
    """
    if how is None:
        yield
        return
    selected = _select_parameters(model, how)
    original = {name: parameter.data for name, parameter in selected.items()}
    cache = _cached_weights(model, how.seed)
    try:
        for name, parameter in selected.items():
            if name not in cache:
                cache[name] = _draw(parameter.data, zlib.crc32(name.encode()) + how.seed)
            parameter.data = cache[name]
        yield
    finally:
        for name, parameter in selected.items():
            parameter.data = original[name]


def _select_parameters(model: LoadedModel, how: Randomised) -> dict[str, nn.Parameter]:
    """Return the parameters that become random, by name.

    Parameters of the model itself, outside all modules, belong to the last of the modules.
    """
    modules = stack(model.info)
    top = set(modules[: how.modules]) | ({""} if how.modules >= len(modules) else set())
    known = dict.fromkeys(model.info.layers, 0)
    named = model.module.named_parameters()
    return {name: parameter for name, parameter in named if _owner(name.rpartition(".")[0], known) in top}


def _cached_weights(model: LoadedModel, seed: int) -> dict[str, Tensor]:
    """Return the random weights that are kept on a GPU for the latest seed, by name; an empty dict for a CPU."""
    if device_for(model.info.device).is_cpu:
        return {}
    if seed not in model.random_weights:
        model.random_weights.clear()
    return model.random_weights.setdefault(seed, {})


def _draw(weights: Tensor, seed: int) -> Tensor:
    # Drawn on the CPU, so that every device gets the same values. Not in page-locked memory: torch keeps that for the
    # life of the process, and the largest weight of vgg16 has 392 MiB.
    noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    noise = device_for(weights.device).upload(noise).to(weights.dtype)
    drawn: Tensor = noise * weights.std(correction=0) + weights.mean()
    return drawn
