"""The output of a network that a model explains: one of several, or two classes made of a single logit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # flattens every output structure that torch knows

from camserve_server.core.errors import ConfigError, did_you_mean
from camserve_server.models.endings import Probabilities
from camserve_server.models.tasks import values_of

Output: TypeAlias = Callable[[Any], Any]
"""Returns what a model explains, such as its logits [B, classes], from whatever its network returns."""


def output_of(choice: Output | str | int | None) -> Output | None:
    """Return the function of a choice: a function itself, or the key, attribute or index of one of several outputs."""
    if choice is None or callable(choice):
        return choice
    return lambda output: _selected(output, str(choice))


def _selected(output: Any, name: str) -> Any:
    parts = dict(_parts(output))
    if name in parts:
        return parts[name]
    if name.isidentifier() and hasattr(output, name):
        return getattr(output, name)
    found = ", ".join(f'"{part}"' for part in parts) or "one only"
    raise ConfigError(f'it has no output "{name}"{did_you_mean(name, parts)}: its outputs are {found}')


def _parts(output: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(output, Mapping):
        yield from ((str(key), value) for key, value in output.items())
    elif isinstance(output, Sequence):
        yield from ((str(index), value) for index, value in enumerate(output))


SMALLEST, LARGEST = 2.0**-126, 1 - 2.0**-24
"""The smallest normal float32 above 0, and the largest below 1."""


def logits_of(probabilities: Probabilities) -> Output:
    """Return the function that turns the probabilities of a softmax or sigmoid into logits that have them.

    The logits of a softmax are the logarithms of its probabilities: they are its own, but for a number that all classes
    share. Those of a sigmoid are its own. A probability of exactly 0 or 1 has no gradient.
    """

    def logits(output: Any) -> Any:
        values = values_of(output, "classify")
        inner = values.clamp(SMALLEST, LARGEST)
        result = inner.log() if probabilities == "softmax" else inner.log() - torch.log1p(-inner)
        return {"out": result} if values.dim() == 4 else result  # noqa: PLR2004 -- [B,C,h,w]

    return logits


def leaf_of(index: int) -> Output:
    """Return the function that selects one of all tensors of an output by its index."""
    return lambda output: pytree.tree_leaves(output)[index]


def two_classes(output: Any) -> Any:
    """Return the logits of two classes from one logit z of the second class: -z/2 and z/2.

    Their softmax is the sigmoid of z and of -z, and their difference is z. One logit for each pixel gives the output of
    a segmentation model.

    Raises:
        ConfigError: there is not one logit, for each image or each pixel.
    """
    values: Tensor = values_of(output, "classify")
    if values.dim() not in (2, 4) or values.shape[1] != 1:
        raise ConfigError(f"task=binary needs one logit for two classes, [B, 1], and not {list(values.shape)}")
    logits = torch.cat([-values, values], 1) / 2
    return {"out": logits} if values.dim() == 4 else logits  # noqa: PLR2004 -- [B,1,h,w]


def composed(*functions: Output | None) -> Output | None:
    """Return the function that applies functions one after the other; None without one."""
    steps = [function for function in functions if function is not None]
    if not steps:
        return None

    def apply(output: Any) -> Any:
        for step in steps:
            output = step(output)
        return output

    return apply
