"""The output of a network that a model explains: one of several, or two classes made of a single logit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from camserve_server.core.errors import ConfigError, did_you_mean
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


def composed(first: Output | None, second: Output) -> Output:
    """Return the function that applies two functions, one after the other."""
    return second if first is None else lambda output: second(first(output))
